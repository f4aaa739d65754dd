import io
import json
import os
import pickle
import resource
import struct
import sys
import tarfile
import time
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from dcptool import torchfile, weights
from dcptool.errors import InputError

STATE = {
    "conv.weight": torch.arange(24.0).reshape(2, 3, 2, 2),
    "conv.bias": torch.tensor([1.0, -1.0]),
    "steps": torch.tensor(7),
}


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def refusal(path: Path, seconds: float = 1.0) -> InputError:
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        weights.read(path)
    assert time.monotonic() - start < seconds
    assert str(path) in caught.value.message
    assert caught.value.why
    return caught.value


def safetensors_bytes(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def same(state: dict[str, torch.Tensor]) -> bool:
    return state.keys() == STATE.keys() and all(torch.equal(state[k], STATE[k]) for k in STATE)


@pytest.mark.parametrize("zipped", [True, False])
def test_reads_torch_files(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "a.pt"
    torch.save(OrderedDict(STATE), path, _use_new_zipfile_serialization=zipped)
    assert same(weights.read(path))


def test_reads_safetensors(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors", metadata={"format": "pt"})
    (tmp_path / "a.safetensors").rename(tmp_path / "no_suffix")
    assert same(weights.read(tmp_path / "no_suffix"))


@pytest.mark.parametrize("nest", ["state_dict", "model", "state_dict_ema", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_unwraps_what_training_scripts_save(tmp_path: Path, nest: str, prefix: str) -> None:
    content = {nest: {prefix + k: v for k, v in STATE.items()}, "epoch": 3, "best": 0.5}
    torch.save(content, tmp_path / "a.pt")
    assert same(weights.read(tmp_path / "a.pt"))


def test_average_comes_first_and_parameters_are_tensors(tmp_path: Path) -> None:
    other = {k: torch.zeros_like(v) for k, v in STATE.items()}
    torch.save({"state_dict": other, "state_dict_ema": STATE}, tmp_path / "a.pt")
    assert same(weights.read(tmp_path / "a.pt"))
    torch.save(dict(torch.nn.Linear(2, 3).named_parameters()), tmp_path / "b.pt")
    assert set(weights.read(tmp_path / "b.pt")) == {"weight", "bias"}


def test_prefix_of_some_keys_stays(tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.pt")
    assert set(weights.read(tmp_path / "a.pt")) == {"module.a", "b"}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "LFS"),
        (b"\n<!DOCTYPE html><html>404</html>", "HTML"),
        (b'{"error": "not found"}', "JSON"),
        (b"Entry not found, sorry\n", "text"),
        (b"\x08\x0a\x12\x07pytorch\x1a\x032.1:\x10", "ONNX"),
        (b"\x1f\x8b\x08\x00rest", "gzip"),
        (os.urandom(3000).replace(b"PK", b"__").join([b"\xf0\xf1", b""]), "no weight file"),
        (pickle.dumps({"a": 1}), "not one that torch.save wrote"),
    ],
)
def test_says_what_the_file_is(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    error = refusal(path)
    assert word in error.why
    if word == "LFS":
        assert error.try_ == "git lfs pull"


def test_refuses_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in refusal(tmp_path / "pipe").why
    assert "folder" in refusal(tmp_path).why
    assert "device" in refusal(Path("/dev/zero")).why
    assert "No such file" in refusal(tmp_path / "absent").why


@pytest.mark.parametrize("form", ["zip", "legacy", "raw0", "raw2", "raw5", "inside"])
def test_code_is_named_and_not_run(tmp_path: Path, form: str) -> None:
    path, mark = tmp_path / "model.pt", tmp_path / "mark"
    payload = Payload(mark)
    if form.startswith("raw"):
        path.write_bytes(pickle.dumps(payload, protocol=int(form[3])))
    elif form == "inside":
        torch.save({"state_dict": STATE, "extra": [payload]}, path)
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=form == "zip")
    error = refusal(path)
    assert f"{os.system.__module__}.system" in error.why
    assert "can run code" in error.why
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        b"cposix\nsystem\n(S'touch MARK'\ntR.",
        b"(S'touch MARK'\niposix\nsystem\n.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.",
    ],
)
def test_handwritten_pickles(tmp_path: Path, text: bytes) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "model.bin"
    path.write_bytes(text.replace(b"MARK", str(mark).encode()))
    assert "can run code" in refusal(path).why
    assert not mark.exists()


def test_whole_module_is_refused_by_its_class(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    error = refusal(tmp_path / "a.pt")
    assert "torch.nn.modules.linear.Linear" in error.why
    assert "state_dict" in error.try_


def test_programs_and_archives(tmp_path: Path) -> None:
    def archive(name: str, *records: str) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w") as out:
            for record in records:
                out.writestr(record, b"x")
        return tmp_path / name

    script = archive("s.pt", "s/data.pkl", "s/code/__torch__.py", "s/constants.pkl")
    assert "TorchScript" in refusal(script).why
    program = archive("p.pt2", "p/archive_format", "p/models/model.json", "p/data/x.pkl")
    assert "pt2" in refusal(program).why
    assert "numpy" in refusal(archive("n.npz", "a.npy", "b.npy")).why
    assert "torch.save" in refusal(archive("z.pt", "readme.txt")).why
    with tarfile.open(tmp_path / "t.pt", "w") as tar:
        info = tarfile.TarInfo("pickle")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"abcd"))
    error = refusal(tmp_path / "t.pt")
    assert "tar archive" in error.why
    assert "can run code" in error.why


@pytest.mark.parametrize("form", ["safetensors", "zip", "legacy"])
def test_truncated_anywhere(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"a.{'safetensors' if form == 'safetensors' else 'pt'}"
    if form == "safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=form == "zip")
    data = path.read_bytes()
    for part in range(1, 16):
        path.write_bytes(data[: len(data) * part // 16])
        error = refusal(path)
        assert "truncated" in error.why, part
    path.write_bytes(data[:-1])
    why = refusal(path).why
    if form != "zip":
        assert f"{len(data):,}" in why
        assert f"{len(data) - 1:,}" in why


@pytest.mark.parametrize("length", [2**64 - 1, 150 << 20])
def test_absurd_header(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as out:
        out.write(struct.pack("<Q", length) + b"{")
        out.truncate(200 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert f"{length:,}" in error.why
    assert "limit" in error.why


def test_more_tensors_than_anyone_needs(tmp_path: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = "{" + ",".join(entry % n for n in range(120_000)) + "}"
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes(header.encode()))
    assert "100,000" in refusal(path).why


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b'{"a":%(e)s,"a":%(e)s}' % {b"e": json.dumps(ENTRY).encode()}, "duplicate name"),
        ({"a": {**ENTRY, "shape": [2**40]}}, "needs"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, "start at"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, "start at"),
        ({"a": {**ENTRY, "shape": [-2]}}, "malformed"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, "malformed"),
        ({"a": {**ENTRY, "dtype": "F33"}}, "F33"),
        ({"a": [1]}, "malformed"),
        (b"{" + b"[" * 5000, "cannot be read"),
        ({}, "more than its header"),
    ],
)
def test_safetensors_headers(tmp_path: Path, header: object, word: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes(header, bytes(8)))
    assert word in refusal(path).why


def test_compressed_record(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 16)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as source,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
    assert "compressed record" in refusal(tmp_path / "b.pt").why


def test_shape_beyond_its_storage(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(2**40)}, tmp_path / "a.pt")
    assert "exceeds its storage" in refusal(tmp_path / "a.pt").why
    torch.save({"a": torch.arange(6.0).reshape(2, 3).t()[1:]}, tmp_path / "b.pt")
    assert weights.read(tmp_path / "b.pt")["a"].tolist() == [[1, 4], [2, 5]]


def test_storage_larger_than_its_record(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(300)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as source,
        zipfile.ZipFile(tmp_path / "b.pt", "w") as target,
    ):
        for record in source.infolist():
            data = source.read(record)
            target.writestr(record.filename, data[:-4] if record.filename.endswith("/0") else data)
    assert "bytes, but its storage" in refusal(tmp_path / "b.pt").why


def test_legacy_storage_of_absurd_size(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(300)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "a.pt").read_bytes()
    small, huge = b"M" + struct.pack("<H", 300), b"J" + struct.pack("<i", 2**31 - 1)
    assert data.count(small) == 2  # the storage, then the shape
    (tmp_path / "b.pt").write_bytes(data.replace(small, huge, 1))
    assert "truncated" in refusal(tmp_path / "b.pt").why


def test_flipped_bit_in_a_torch_file(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(300)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    place = data.index(bytes(400)) + 200
    data[place] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    assert "damaged" in refusal(tmp_path / "a.pt").why


def test_pickle_that_never_ends(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"\x80\x02" + b"N0" * 4_000_000 + b".")
    error = refusal(tmp_path / "a.pt", seconds=3.0)
    assert "steps" in error.why


def test_numbers_that_are_none(tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in STATE.items()}
    state["conv.weight"][0, 0] = float("nan")
    state["conv.bias"][1] = float("inf")
    save_file(state, tmp_path / "a.safetensors")
    error = refusal(tmp_path / "a.safetensors")
    assert "conv.weight (4)" in error.why
    assert "conv.bias (1)" in error.why


def test_nothing_inside(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "args": [1]}, tmp_path / "a.pt")
    assert "no tensors" in refusal(tmp_path / "a.pt").why
    torch.save(torch.zeros(3), tmp_path / "b.pt")
    assert "not weights by name" in refusal(tmp_path / "b.pt").why


def test_the_walk_calls_nothing_of_the_file() -> None:
    """Known names stand for notes; only a container is ever made."""
    acts = [known.act for known in torchfile._KNOWN.values() if hasattr(known, "act")]
    assert OrderedDict in acts
    for act in acts:
        assert act is OrderedDict or act.__module__ == "dcptool.torchfile"
    assert "dcptool.weights" in sys.modules


@pytest.mark.fuzz
@pytest.mark.parametrize("form", ["safetensors", "zip", "legacy"])
def test_random_damage_is_refused_or_read(form: str) -> None:
    random = Random(0)
    content = io.BytesIO(safetensors.torch.save(STATE))
    if form != "safetensors":
        content = io.BytesIO()
        torch.save({"model": STATE}, content, _use_new_zipfile_serialization=form == "zip")
    end, count = time.monotonic() + 20, 0
    while time.monotonic() < end:
        data = bytearray(content.getvalue())
        for _ in range(random.randint(1, 6)):
            place = random.randrange(len(data))
            choice = random.random()
            if choice < 0.6:
                data[place] = random.randrange(256)
            elif choice < 0.7:
                del data[place : place + random.randint(1, min(30, len(data) - 1))]
            elif choice < 0.8:
                data[place:place] = random.randbytes(random.randint(1, 9))
            else:
                data[place : place + 4] = random.choice(
                    [b"\xff\xff\xff\x7f", b"\xff" * 4, bytes(4)]
                )
        with suppress(InputError):
            weights.parse(
                bytes(data), Path("model.safetensors" if form == "safetensors" else "m.pt")
            )
        count += 1
    assert count > 100
