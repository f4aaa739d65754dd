"""The only reader of weight files: bytes in, tensors by name out.

Takes safetensors, and torch files under torch's own weights-only rules. Everything that a
file claims about itself (sizes, counts, shapes, names) is checked against the bytes that
are there before a tensor is made, so a hostile file costs neither memory nor time, and
no code inside a file is ever run. Whatever is refused is refused by saying what it is.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dcptool import files, torchfile
from dcptool.errors import InputError
from dcptool.torchfile import Refused

if TYPE_CHECKING:
    from torch import Tensor

HEADER_LIMIT = 8 << 20
TENSOR_LIMIT = 100_000

_WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip
# The average of training comes first, as in timm: it is what gets published and measured.
_NESTS = ("state_dict_ema", "model_ema", "state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")
_OTHERS = (
    (b"\x1f\x8b", "a gzip archive", "unpack it first: gunzip"),
    (b"BZh", "a bzip2 archive", "unpack it first: bunzip2"),
    (b"\xfd7zXZ\x00", "an xz archive", "unpack it first: unxz"),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive", "unpack it first: unzstd"),
    (b"\x89HDF", "an HDF5 file", "convert it to safetensors"),
    (b"\x93NUMPY", "a numpy array", "convert it to safetensors"),
    (b"GGUF", "a GGUF file", "convert it to safetensors"),
    (b"\x89PNG", "an image", ""),
    (b"\xff\xd8\xff", "an image", ""),
    (b"\x7fELF", "a program", ""),
    (b"%PDF", "a PDF document", ""),
)


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a weight file, prefixes and nests of training removed, on the CPU."""

    def check(stream: IO[bytes], size: int) -> None:
        try:
            _inspect(stream, size, path.suffix, whole=False)
        except Refused as err:
            raise _fault(path, err) from err

    data = files.read_bytes(path, what="weights", check=check)
    return parse(data, path)


def parse(data: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors in the bytes of a weight file; `path` names it in messages."""
    try:
        kind = _inspect(io.BytesIO(data), len(data), path.suffix, whole=True)
        state = _strip(_unwrap(_safetensors(data) if kind == "safetensors" else _torch(data)))
        _require_finite(state)
    except Refused as err:
        raise _fault(path, err) from err
    return state


def _fault(path: Path, refused: Refused) -> InputError:
    remedy = refused.try_ or "give a .safetensors file, or a torch file with a state dict"
    return InputError(f"cannot use {path} as weights", why=refused.why, try_=remedy)


def _inspect(stream: IO[bytes], size: int, suffix: str, *, whole: bool) -> str:
    """Refuse what is no weight file, or claims more than it holds; tell the format."""
    head = stream.read(512)
    stream.seek(0)
    if not head:
        raise Refused("it is empty")
    # A length in binary and a brace; its bytes may look like the start of something else.
    if head[8:9] == b"{" and (b"\0" in head[:8] or b"\xff" in head[:8]):
        _inspect_safetensors(stream, size)
        return "safetensors"
    _recognise(head)
    if head.startswith(b"PK\x03\x04"):
        torchfile.inspect_zip(stream, size, whole=whole)
        return "torch"
    if suffix == ".safetensors":
        _inspect_safetensors(stream, size)
        return "safetensors"
    try:
        torchfile.inspect_legacy(stream, size)
    except Refused as err:
        if err.__cause__ is not None and _is_text(head):
            raise Refused("it is a text file") from err
        raise
    return "torch"


def _recognise(head: bytes) -> None:
    """Refuse the usual suspects by name."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    if head.startswith(b"version https://git-lfs.github.com/"):
        raise Refused("it is a Git LFS pointer; the weights were not downloaded", "git lfs pull")
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")):
        raise Refused("it is an HTML page, probably of a failed download", "download it again")
    if start.startswith((b"{", b"[")):
        raise Refused("it is a JSON file")
    if head[257:262] == b"ustar":
        raise Refused(
            "it is a tar archive; refused: the tar form of torch can run code",
            "unpack it first, or " + torchfile.SAVE_PLAIN,
        )
    for magic, name, remedy in _OTHERS:
        if head.startswith(magic):
            raise Refused(f"it is {name}", remedy)
    # A protobuf whose first field is a small IR version, followed by another known field.
    if head[0] == 0x08 and 0 < head[1] < 64 and head[2:3] in (b"\x12", b"\x1a", b"\x3a", b"\x42"):
        raise Refused("it is an ONNX model; channels are cut before export, not after")


def _is_text(head: bytes) -> bool:
    try:
        text = head[:500].decode("utf-8", errors="strict" if len(head) < 500 else "ignore")
    except UnicodeDecodeError:
        return False
    return all(char.isprintable() or char in "\r\n\t\f" for char in text)


def _inspect_safetensors(stream: IO[bytes], size: int) -> None:
    """Check that header and tensors describe the file exactly: no hole, no overlap, no rest."""
    length = int.from_bytes(stream.read(8), "little")
    if size < 10:
        raise Refused(f"it is truncated: a safetensors file of {size} bytes")
    if length > HEADER_LIMIT:
        raise Refused(f"its header claims {length:,} bytes; the limit is {HEADER_LIMIT:,}")
    if size < 8 + length:
        raise Refused(f"it is truncated: it should have over {8 + length:,} bytes and has {size:,}")
    header = stream.read(length)
    if header.count(b"{") > TENSOR_LIMIT + 2 or header.count(b'":') > 4 * TENSOR_LIMIT + 1000:
        raise Refused(f"it holds more than {TENSOR_LIMIT:,} tensors")
    try:
        entries = json.loads(header, object_pairs_hook=_once)
    except (ValueError, RecursionError) as err:
        raise Refused(f"its safetensors header cannot be read: {err}") from err
    if not isinstance(entries, dict):
        raise Refused("its safetensors header is no JSON object")
    entries.pop("__metadata__", None)
    end = 0
    for first, last, name in sorted(_span(name, entry) for name, entry in entries.items()):
        if first != end:
            raise Refused(f"the bytes of {name!r} start at {first:,}, but {end:,} is next")
        end = last
    want = 8 + length + end
    if size < want:
        raise Refused(f"it is truncated: it should have {want:,} bytes and has {size:,}")
    if size > want:
        raise Refused(f"it has {size - want:,} bytes more than its header describes")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, value in pairs:
        if name in result:
            raise Refused(f"the name {name[:100]!r} is there twice (duplicate name)")
        result[name] = value
    return result


def _span(name: str, entry: object) -> tuple[int, int, str]:
    """First and last byte of one tensor, when its dtype and shape agree with them."""
    label = name[:100]
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Refused(f"the header entry of {label!r} is malformed")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in _WIDTHS:
        raise Refused(
            f"{label!r} has the number format {str(dtype)[:20]!r}, which is not supported"
        )
    if not _sizes(shape, 64) or not _sizes(span, 2) or len(span) != 2:
        raise Refused(f"the header entry of {label!r} is malformed")
    want = math.prod(shape) * _WIDTHS[dtype]
    if span[1] - span[0] != want:
        raise Refused(f"{label!r} needs {want:,} bytes, but {span[1] - span[0]:,} are given to it")
    return span[0], span[1], name


def _sizes(value: object, most: int) -> bool:
    if not isinstance(value, list) or len(value) > most:
        return False
    return all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _safetensors(data: bytes) -> Mapping[str, Tensor]:
    import safetensors
    from safetensors.torch import load

    try:
        state: Mapping[str, Tensor] = load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as err:
        raise Refused(f"safetensors cannot read it: {err}") from err
    return state


def _torch(data: bytes) -> object:
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, KeyError) as err:
            lines = str(err).partition("WeightsUnpickler error: ")[2] or str(err)
            reason = lines.strip().partition("\n")[0][:200]
            raise Refused(
                f"torch cannot read it as weights alone: {reason}", torchfile.SAVE_PLAIN
            ) from err
        except (EOFError, IndexError, AttributeError, AssertionError, OverflowError) as err:
            raise Refused("torch cannot read it as weights alone", torchfile.SAVE_PLAIN) from err


def _unwrap(content: object) -> dict[str, Tensor]:
    """Find the state dict inside what a training script saved."""
    from torch import Tensor

    for _ in range(4):
        if not isinstance(content, Mapping):
            break
        inner = [content[nest] for nest in _NESTS if isinstance(content.get(nest), Mapping)]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, Mapping):
        raise Refused(f"it holds a {type(content).__name__}, not weights by name")
    state = {
        name: value.detach()
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    if not state:
        keys = ", ".join(str(key)[:40] for key in list(content)[:5])
        raise Refused(f"it holds no tensors by name{'; it has ' + keys if keys else ''}")
    return state


def _strip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes that parallel, averaged and compiled modules put before each name."""
    if "n_averaged" in state:  # the counter of torch's averaged models
        state = {name: value for name, value in state.items() if name != "n_averaged"}
    while prefix := next((p for p in _PREFIXES if all(n.startswith(p) for n in state)), ""):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _require_finite(state: Mapping[str, Tensor]) -> None:
    import torch

    counts = {}
    for name, value in state.items():
        if value.is_floating_point() or value.is_complex():
            number = value.float() if value.itemsize == 1 else value
            if bad := value.numel() - int(torch.isfinite(number).sum()):
                counts[name] = bad
    if counts:
        shown = ", ".join(f"{name} ({bad:,})" for name, bad in list(counts.items())[:5])
        raise Refused(
            f"NaN or infinite numbers in {len(counts)} of {len(state)} tensors: {shown}",
            "use the weights of an earlier epoch: this training has diverged",
        )
