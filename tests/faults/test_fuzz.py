"""Files as nobody writes them: what reads them takes them or refuses them, and nothing else.

One target for each kind of file that may come from a stranger. A few hundred inputs in the
default run; `pytest -m fuzz tests/faults` tries each target for a minute. DCPTOOL_FUZZ_SECONDS
makes it longer, DCPTOOL_FUZZ_LOG names a file to which the counts are added. A seed that
fails is told, and makes the same input again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from PIL import Image
from safetensors.torch import save as safetensors_bytes

from dcptool import files, weights
from dcptool.cli import app, run_command, sections, selection_options
from dcptool.deploy import onnx_scan
from dcptool.errors import InputError, UsageError
from dcptool.network import artifact
from dcptool.pipeline import recipe
from dcptool.training import checkpoint, images
from dcptool.training.images import BadImage

MOST_S, MOST_BYTES = 10.0, 1 << 30
ODD = (None, True, -1, 0, 1 << 70, 1e308, "", "x" * 300, "../x", "\0", [], {}, [[]], {"": {}})
NUMBERS = (b"\xff\xff\xff\x7f", b"\xff" * 8, bytes(8), b"\x00\x00\x00\x80")


class Touches:
    """What runs code when a pickle of it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def damaged(data: bytes, random: Random) -> bytes:
    """Bytes changed, taken out, put in, moved about."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        place = random.randrange(len(found) + 1)
        kind = random.random()
        if kind < 0.5 and place < len(found):
            found[place] = random.randrange(256)
        elif kind < 0.6:
            del found[place : place + random.randint(1, 64)]
        elif kind < 0.7:
            found[place:place] = random.randbytes(random.randint(1, 16))
        elif kind < 0.8:
            found[place : place + 8] = random.choice(NUMBERS)
        elif kind < 0.9:
            other = random.randrange(len(found) + 1)
            found[place:place] = found[other : other + random.randint(1, 200)]
        else:
            del found[place:]
    return bytes(found)


def odd_tree(tree: object, random: Random) -> object:
    """One value somewhere in a document replaced by something else."""
    if isinstance(tree, dict) and tree and random.random() < 0.9:
        key = random.choice(list(tree))
        chance = random.random()
        if chance < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        if chance < 0.15:
            return {**tree, random.choice(("forward", "../a", "__class__", "0")): tree[key]}
        return {**tree, key: odd_tree(tree[key], random)}
    if isinstance(tree, list) and tree and random.random() < 0.8:
        place = random.randrange(len(tree))
        return [*tree[:place], odd_tree(tree[place], random), *tree[place + 1 :]]
    if isinstance(tree, str) and tree and random.random() < 0.5:
        return damaged(tree.encode(), random).decode("utf-8", "replace")
    if isinstance(tree, int) and random.random() < 0.5:
        return tree + random.choice((-1, 1, 7, 1000))
    return random.choice(ODD)


Try = Callable[[Random], None]


def of_artifact(folder: Path, slim: Path) -> Try:
    """Manifest or weights changed; half of the time the manifest vouches for the weights."""
    place = folder / "slim"
    shutil.copytree(slim, place)
    document = json.loads((slim / "manifest.json").read_text())
    good = (slim / "model.safetensors").read_bytes()

    def attempt(random: Random) -> None:
        changed, data = document, good
        if random.random() < 0.5:
            size = int.from_bytes(good[:8], "little") + 8
            # The header is where the sense is.
            head = damaged(good[:size], random) if random.random() < 0.7 else good[:size]
            data = head + (good[size:] if random.random() < 0.7 else damaged(good[size:], random))
            entry = {"bytes": len(data), "sha256": files.sha256(data)}
            if random.random() < 0.8:
                changed = {**document, "files": {"model.safetensors": entry}}
        if data is good or random.random() < 0.2:
            for _ in range(random.choice((1, 1, 3))):
                changed = odd_tree(changed, random)
        text = json.dumps(changed).encode()
        (place / "manifest.json").write_bytes(
            damaged(text, random) if random.random() < 0.2 else text
        )
        (place / "model.safetensors").write_bytes(data)
        if random.random() < 0.02:
            through_the_command(["analyze", str(place)])
        else:
            artifact.load(place)

    return attempt


def through_the_command(words: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run(words)
    assert code in (0, 2, 3), err.getvalue()
    assert "Traceback" not in err.getvalue()
    if code:
        raise InputError("refused")


def of_manifest(folder: Path, slim: Path) -> Try:
    document = json.loads((slim / "manifest.json").read_text())

    def attempt(random: Random) -> None:
        text = json.dumps(odd_tree(document, random)).encode()
        if random.random() < 0.5:
            text = damaged(text, random)
        (folder / "manifest.json").write_bytes(text)
        artifact.read(folder)

    return attempt


def of_plan(folder: Path, slim: Path) -> Try:
    groups = {f"layer{n}.0.conv1": {"units": 16, "keep": 8} for n in range(1, 4)}
    document = {"dcptool_plan": 1, "model": "zoo:resnet20", "groups": groups}

    def attempt(random: Random) -> None:
        text = json.dumps(odd_tree(document, random)).encode()
        if random.random() < 0.5:
            text = damaged(text, random)
        (folder / "plan.json").write_bytes(text)
        selection_options._plan(folder / "plan.json")

    return attempt


def of_recipe(folder: Path, slim: Path) -> Try:
    texts = [path.read_bytes() for path in recipe.shipped().values()]
    schema = sections.schema()
    words = [b"[prune]", b"rate = 1e999", b"a.b.c = 1", b'x = """', b"= 7", b"[[gates]]", b"[" * 99]

    def attempt(random: Random) -> None:
        text = damaged(random.choice(texts), random)
        if random.random() < 0.5:
            lines = text.split(b"\n")
            lines.insert(random.randrange(len(lines)), random.choice(words))
            text = b"\n".join(lines)
        (folder / "fuzz.toml").write_bytes(text)
        run_command.check(recipe.read(str(folder / "fuzz.toml"), schema))

    return attempt


def of_torch_file(folder: Path, slim: Path) -> Try:
    state = {"a.weight": torch.rand(4, 3), "a.bias": torch.zeros(4), "n": torch.tensor(3)}
    hostile = {**state, "code": Touches(folder / "canary")}
    seeds = [pickle.dumps(hostile, protocol=number) for number in range(5)]
    for content in (state, {"state_dict": state, "epoch": 3}, hostile):
        for zipped in (True, False):
            stream = io.BytesIO()
            torch.save(content, stream, _use_new_zipfile_serialization=zipped)
            seeds.append(stream.getvalue())

    def attempt(random: Random) -> None:
        weights.parse(damaged(random.choice(seeds), random), folder / "x.pt")

    return attempt


def of_safetensors(folder: Path, slim: Path) -> Try:
    state = {"a.weight": torch.rand(4, 3), "b": torch.zeros(2, dtype=torch.int64)}
    plain = safetensors_bytes(state)
    saved = checkpoint.encode({"fingerprint": {}, "state": {"step": 3, "model": state}})

    def attempt(random: Random) -> None:
        if random.random() < 0.5:
            weights.parse(damaged(plain, random), folder / "x.safetensors")
        else:
            checkpoint.decode(damaged(saved, random), folder / "state")

    return attempt


def of_onnx(folder: Path, slim: Path) -> Try:
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [2, 3], bytes(24), raw=True)
    outside = helper.make_tensor("v", TensorProto.FLOAT, [2, 3], bytes(24), raw=True)
    outside.ClearField("raw_data")
    outside.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "model.data"), ("length", "24")):
        outside.external_data.add(key=key, value=value)
    (folder / "model.data").write_bytes(bytes(24))
    value = helper.make_tensor_value_info
    seeds = []
    for initial in ([tensor], [tensor, outside]):
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Relu", ["y"], ["z"]),
        ]
        graph = helper.make_graph(
            nodes,
            "g",
            [value("x", TensorProto.FLOAT, [1, 2])],
            [value("z", TensorProto.FLOAT, [1, 3])],
            initial,
        )
        opset = [helper.make_opsetid("", 18)]
        seeds.append(
            helper.make_model(graph, opset_imports=opset, ir_version=9).SerializeToString()
        )

    def attempt(random: Random) -> None:
        path = folder / "fuzz.onnx"
        path.write_bytes(damaged(random.choice(seeds), random))
        onnx_scan.scan(path)

    return attempt


def of_image(folder: Path, slim: Path) -> Try:
    seeds = []
    for form in images.FORMATS:
        for mode in ("RGB", "L", "P", "RGBA", "CMYK", "I;16", "1"):
            stream = io.BytesIO()
            image = Image.effect_mandelbrot((24, 24), (-2, -1.5, 1, 1.5), 50).convert(
                "L" if mode == "I;16" else mode if mode != "CMYK" else "RGB"
            )
            with contextlib.suppress(OSError, ValueError, KeyError):
                image.convert(mode).save(stream, form)
                seeds.append(stream.getvalue())

    def attempt(random: Random) -> None:
        images.decode(damaged(random.choice(seeds), random), "x.jpg")

    return attempt


TARGETS = {
    "artifact": of_artifact,
    "manifest": of_manifest,
    "plan": of_plan,
    "recipe": of_recipe,
    "torch-file": of_torch_file,
    "safetensors": of_safetensors,
    "onnx": of_onnx,
    "image": of_image,
}


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


class Watched:
    """Counts what was tried, and sees that time, memory and the disk stay as they should."""

    def __init__(self, name: str, folder: Path, slim: Path) -> None:
        self.folder, self.name = folder, name
        self.attempt = TARGETS[name](folder, slim)
        self.tried = self.refused = 0
        self.slowest = 0.0
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.before = status("VmRSS")
        self.names = {path.name for path in folder.rglob("*")}

    def once(self, random: Random) -> None:
        began = time.process_time()  # other programs may have the machine
        self.tried += 1
        try:
            self.attempt(random)
        except BadImage:
            self.refused += 1
        except (UsageError, InputError):
            self.refused += 1
        self.slowest = max(self.slowest, time.process_time() - began)
        assert self.slowest < MOST_S
        assert not (self.folder / "canary").exists()

    def document(self) -> dict[str, object]:
        """The counts; fails when memory ran away or a file appeared."""
        peak = status("VmHWM") - self.before
        assert peak < MOST_BYTES
        new = {path.name for path in self.folder.rglob("*")} - self.names
        assert new <= {"manifest.json", "plan.json", "fuzz.toml", "fuzz.onnx"}
        return {
            "target": self.name,
            "inputs": self.tried,
            "refused": self.refused,
            "slowest_s": round(self.slowest, 3),
            "peak_bytes": peak,
        }


# As the program itself has it.
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", TARGETS)
def test_hundreds(name: str, slim: Path, tmp_path: Path) -> None:
    watched = Watched(name, tmp_path, slim)

    @settings(
        max_examples=60 if name == "artifact" else 200,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 1 << 60))
    def attempt(seed: int) -> None:
        watched.once(Random(seed))

    attempt()
    document = watched.document()
    # All refused, or none, would mean that the target is not reached.
    assert 0 < watched.refused < watched.tried, document


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", TARGETS)
def test_for_a_minute(name: str, slim: Path, tmp_path: Path) -> None:
    watched = Watched(name, tmp_path, slim)
    first = time.time_ns() // 1_000_000_000
    end = time.monotonic() + float(os.environ.get("DCPTOOL_FUZZ_SECONDS", "60"))
    while time.monotonic() < end:
        seed = first * 1_000_000 + watched.tried
        try:
            watched.once(Random(seed))
        except Exception as err:
            raise AssertionError(f"{name}, seed {seed}") from err
    document = watched.document()
    if log := os.environ.get("DCPTOOL_FUZZ_LOG"):
        with Path(log).open("a") as stream:
            stream.write(json.dumps(document) + "\n")
    assert watched.tried > 100
