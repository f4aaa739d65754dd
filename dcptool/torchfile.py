"""What a torch file claims, found out without torch and without running it.

The pickle inside is walked by an unpickler that knows a dozen harmless names and makes
nothing but notes: which storages and tensors it would build, and how large. Any other
name ends the walk. Only what passes here is ever given to torch.load.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

PURSE = 16 << 20
STEP_COST = 16
DIRECTORY_LIMIT = 16 << 20
TENSOR_LIMIT = 100_000

SAVE_PLAIN = "save the weights alone: torch.save(model.state_dict(), FILE), or as safetensors"
_MAGIC = 0x1950A86A20F9469CFC6C
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_WIDTHS = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2,
    "Char": 1, "Byte": 1, "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
_MALFORMED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError,
    AttributeError, OverflowError, RecursionError, struct.error,
)  # fmt: skip
# All that Python's zip reader may raise over damaged bytes.
_BAD_ZIP = (
    zipfile.BadZipFile, ValueError, OSError, EOFError, KeyError, RuntimeError, OverflowError,
    struct.error,
)  # fmt: skip
# Ways to make objects or to allocate memory that torch.save never uses.
_FORBIDDEN = (
    pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID,
    pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
)  # fmt: skip


class Refused(Exception):
    """Why a file is not taken, and what to do about it."""

    def __init__(self, why: str, try_: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.try_ = try_


@dataclass(frozen=True)
class Storage:
    """A run of numbers that the file says it holds."""

    key: str
    width: int
    numel: int


@dataclass(frozen=True)
class _Note:
    """Stands in for a tensor or another harmless value."""

    what: str


@dataclass(frozen=True)
class _Known:
    """Stands in for a name that a torch file may mention."""

    name: str
    act: Callable[..., object]


@dataclass(frozen=True)
class _StorageType:
    width: int


class _Meter:
    """Lets the walk read only so many bytes in so many steps: both are paid from one purse."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.left = PURSE
        self.short = False

    def read(self, size: int) -> bytes:
        self.left -= size + STEP_COST
        if self.left < 0:
            raise Refused("it is a pickle of too many steps or bytes for weights", SAVE_PLAIN)
        data = self.stream.read(size)
        if len(data) < size:
            self.short = True
        return data

    def readline(self) -> bytes:
        line = self.stream.readline(4096)
        self.left -= len(line) + STEP_COST
        if not line.endswith(b"\n"):
            self.short = True
            raise EOFError
        return line


def _tensor(storage: object, offset: object, size: object, stride: object, *_: object) -> _Note:
    whole = (
        isinstance(storage, Storage) and _counts((offset,)) and _counts(size) and _counts(stride)
    )
    if not whole or len(size) != len(stride):  # type: ignore[arg-type]
        raise Refused("it describes a tensor that makes no sense", SAVE_PLAIN)
    return _measure(storage, offset, size, stride)  # type: ignore[arg-type]


def _measure(
    storage: Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> _Note:
    numel = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if numel and (numel > storage.numel or last >= storage.numel):
        shape = " x ".join(map(str, size))
        raise Refused(
            f"the shape of a tensor exceeds its storage: {shape} numbers in {storage.numel:,}",
            "save contiguous tensors: {name: t.contiguous() for name, t in state.items()}",
        )
    return _Note("tensor")


def _counts(values: object) -> bool:
    if not isinstance(values, tuple) or len(values) > 64:
        return False
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _typed(function: object, _kind: object, arguments: object, _state: object = None) -> object:
    if not isinstance(function, _Known) or not isinstance(arguments, tuple):
        raise Refused("it describes a tensor that makes no sense", SAVE_PLAIN)
    return function.act(*arguments)


def _known() -> dict[str, _Known | _StorageType]:
    def note(*_: object) -> _Note:
        return _Note("value")

    def first(value: object, *_: object) -> object:
        return value

    table: dict[str, _Known | _StorageType] = {}
    acts: dict[str, Callable[..., object]] = {
        "collections.OrderedDict": OrderedDict,
        "collections.Counter": OrderedDict,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_parameter": first,
        "torch._utils._rebuild_parameter_with_state": first,
        "torch._tensor._rebuild_from_type_v2": _typed,
    }
    inert = ["torch.Size", "torch.device", "torch.Tensor", "torch.nn.parameter.Parameter"]
    inert += ["torch.serialization._get_layout", "builtins.set", "builtins.complex"]
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"):
        inert.append(f"torch.{name}")
    acts.update(dict.fromkeys(inert, note))
    for name, act in acts.items():
        table[name] = _Known(name, act)
    for name, width in _WIDTHS.items():
        for place in ("torch", "torch.cuda"):
            table[f"{place}.{name}Storage"] = _StorageType(width)
    return table


_KNOWN = _known()
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class _Walk(pickle._Unpickler):
    """Python's own unpickler with every door closed but the known ones."""

    dispatch = dict(pickle._Unpickler.dispatch)  # noqa: RUF012 - as in the parent

    def __init__(self, meter: _Meter) -> None:
        super().__init__(meter, encoding="latin1")
        self.storages: dict[str, Storage] = {}
        self.tensors = 0

    def find_class(self, module: str, name: str) -> Any:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if full not in _KNOWN:
            raise Refused(
                f"it is a pickle that calls {full!r}; refused: it can run code", SAVE_PLAIN
            )
        return _KNOWN[full]

    def persistent_load(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise Refused("it refers to something outside the file", SAVE_PLAIN)
        if len(pid) == 6 and pid[5] is not None:
            raise Refused("it holds views of storages, as torch before 0.4 wrote them", SAVE_PLAIN)
        kind, key, numel = pid[1], pid[2], pid[4]
        if not isinstance(kind, _StorageType) or not isinstance(key, str) or not _counts((numel,)):
            raise Refused("it describes a storage that makes no sense", SAVE_PLAIN)
        storage = Storage(key, kind.width, numel)
        if self.storages.setdefault(key, storage) != storage:
            raise Refused(f"it describes the storage {key!r} twice, differently")
        return storage

    def _call(self, function: object, arguments: object) -> object:
        if not isinstance(function, _Known) or not isinstance(arguments, tuple):
            raise Refused("it calls something that is no function", SAVE_PLAIN)
        result = function.act(*arguments)
        if function.act is _tensor:
            self.tensors += 1
            if self.tensors > TENSOR_LIMIT:
                raise Refused(f"it holds more than {TENSOR_LIMIT:,} tensors")
        return result

    def load_reduce(self) -> None:
        arguments = self.stack.pop()  # type: ignore[attr-defined]
        self.stack[-1] = self._call(self.stack[-1], arguments)  # type: ignore[attr-defined]

    def load_build(self) -> None:
        self.stack.pop()  # type: ignore[attr-defined]
        if not isinstance(self.stack[-1], OrderedDict | _Note):  # type: ignore[attr-defined]
            raise Refused("it sets the state of something that is no tensor", SAVE_PLAIN)

    def load_inst(self) -> None:
        module, name = (self.readline()[:-1].decode("ascii") for _ in range(2))  # type: ignore[attr-defined]
        self.find_class(module, name)
        raise Refused("it makes objects in a way torch never does", SAVE_PLAIN)

    def load_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()  # type: ignore[attr-defined]
        self.find_class(str(module), str(name))
        raise Refused(
            "it is a pickle of protocol 4 or newer; torch takes weights from 2", SAVE_PLAIN
        )

    dispatch.update(
        {
            pickle.REDUCE[0]: load_reduce,  # type: ignore[dict-item]
            pickle.NEWOBJ[0]: load_reduce,  # type: ignore[dict-item]
            pickle.BUILD[0]: load_build,  # type: ignore[dict-item]
            pickle.INST[0]: load_inst,  # type: ignore[dict-item]
            pickle.STACK_GLOBAL[0]: load_stack_global,  # type: ignore[dict-item]
        }
    )
    for _code in _FORBIDDEN:
        dispatch.pop(_code[0], None)


def inspect_zip(stream: IO[bytes], size: int, *, whole: bool) -> None:
    """Refuse a zip archive unless it is a plain torch file; `whole` checks every byte too."""
    _directory(stream, size)
    try:
        archive = zipfile.ZipFile(stream)
    except _BAD_ZIP as err:
        raise Refused(f"it is a damaged zip archive: {err}") from err
    with archive:
        entries = archive.infolist()
        names = {entry.filename for entry in entries}
        _kind_of_zip(names)
        if len(names) != len(entries):
            raise Refused("its zip archive has two records of one name")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise Refused(f"it has a compressed record, {entry.filename!r}", SAVE_PLAIN)
        if sum(entry.file_size for entry in entries) > size:
            raise Refused("the records of its zip archive overlap")
        pickles = [name for name in names if name.endswith("/data.pkl")]
        root = pickles[0].removesuffix("data.pkl")
        try:
            with archive.open(pickles[0]) as record:
                walk = _walk(_Meter(record))
            sizes = {entry.filename: entry.file_size for entry in entries}
            _compare(walk.storages, sizes, root)
            damaged = archive.testzip() if whole else None
        except _BAD_ZIP as err:
            raise Refused(f"it is damaged: {err}") from err
    if damaged:
        raise Refused(f"it is damaged: the checksum of {damaged!r} differs")


def _directory(stream: IO[bytes], size: int) -> None:
    """Refuse an archive without an end, or with a directory too large to read."""
    stream.seek(max(0, size - 98))
    tail = stream.read(98)
    end = tail[-22:]
    if not end.startswith(_END):
        raise Refused(f"it is truncated: a zip archive whose end is missing after {size:,} bytes")
    (length,) = struct.unpack_from("<I", end, 12)
    if tail[-42:-38] == _LOCATOR64:
        (place,) = struct.unpack_from("<Q", tail, len(tail) - 42 + 8)
        stream.seek(min(place, size))
        record = stream.read(56)
        if len(record) < 56 or not record.startswith(_END64):
            raise Refused("it is a damaged zip archive: its directory is not where it should be")
        (length,) = struct.unpack_from("<Q", record, 40)
    if length > DIRECTORY_LIMIT:
        raise Refused(f"its zip directory has {length:,} bytes; the limit is {DIRECTORY_LIMIT:,}")
    stream.seek(0)


def _kind_of_zip(names: set[str]) -> None:
    """Tell what else a zip archive may be."""
    leaves = {name.rpartition("/")[2] for name in names}
    if "archive_format" in leaves or "serialized_exported_program.json" in leaves:
        raise Refused("it is an exported program (.pt2); refused: it can run code", SAVE_PLAIN)
    if "constants.pkl" in leaves or any("/code/" in name for name in names):
        raise Refused("it is a TorchScript archive; refused: it can run code", SAVE_PLAIN)
    if leaves and all(name.endswith(".npy") for name in leaves):
        raise Refused("it is a numpy archive (.npz), not a torch file")
    pickles = [name for name in names if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise Refused("it is a zip archive, but not one that torch.save wrote")


def _compare(storages: Mapping[str, Storage], sizes: Mapping[str, int], root: str) -> None:
    for storage in storages.values():
        want = storage.numel * storage.width
        have = sizes.get(f"{root}data/{storage.key}")
        if have is None:
            raise Refused(f"the record {root}data/{storage.key} is missing")
        if have != want:
            raise Refused(
                f"the record {root}data/{storage.key} has {have:,} bytes, but its storage {want:,}"
            )


def inspect_legacy(stream: IO[bytes], size: int) -> None:
    """Refuse anything but the form that torch.save wrote before it used zip archives."""
    meter = _Meter(stream)
    head = _walk(meter).result
    if head != _MAGIC:
        raise Refused("it is a pickle, but not one that torch.save wrote", SAVE_PLAIN)
    _walk(meter), _walk(meter)
    walk = _walk(meter)
    keys = _walk(meter).result
    if not isinstance(keys, list) or any(key not in walk.storages for key in keys):
        raise Refused("it is damaged: its list of storages does not fit")
    want = stream.tell()
    for storage in walk.storages.values():
        want += 8 + storage.numel * storage.width
    if len(set(keys)) != len(walk.storages):
        raise Refused("it is damaged: its list of storages does not fit")
    if size < want:
        raise Refused(f"it is truncated: it should have {want:,} bytes and has {size:,}")


@dataclass(frozen=True)
class _Found:
    result: object
    storages: Mapping[str, Storage]


def _walk(meter: _Meter) -> _Found:
    walk = _Walk(meter)
    try:
        result = walk.load()
    except _MALFORMED as err:
        state = "truncated" if meter.short else "damaged"
        raise Refused(f"it is no weight file, or a {state} one") from err
    return _Found(result, walk.storages)
