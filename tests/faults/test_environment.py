"""Data and machines that are not as they should be: photos, names, homes, handles, clocks."""

from __future__ import annotations

import ast
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import forked
import numpy
import pytest
from PIL import Image

import dcptool
from dcptool.network import artifact
from dcptool.training import images, workers
from dcptool.training.images import BadImage

OPTIONS = ("--channels-last", "off", "-b", "4", "--log-interval", "1", "--save-every", "0")
# A worker takes itself out when it has read a few; others live on.
DEADLY = """
import os
from dcptool.training import sources
main, read, count = os.getpid(), sources.Files.read, [0]
def deadly(self, number, mode):
    count[0] += 1
    if os.getpid() != main and count[0] > 3:
        os.kill(os.getpid(), 9)
    return read(self, number, mode)
sources.Files.read = deadly
"""
FEW_HANDLES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
"""
BACK = """
import time
now, count = time.time, [0]
def back():
    count[0] += 1
    return now() - 3600 * count[0]
time.time = back
"""


def paint(path: Path, size: int = 32) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(len(str(path)))
    Image.fromarray(draw.integers(0, 255, (size, size, 3), dtype=numpy.uint8)).save(path)


def finetune(slim: Path, *more: str) -> tuple[str, ...]:
    return "finetune", str(slim), "--images", str(slim.parent / "photos"), *OPTIONS, *more


LITTLE_MEMORY = """
import resource
from dcptool.training import room
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (300 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


@pytest.mark.parametrize("asked", [True, False])
def test_too_little_memory(asked: bool, server: forked.Server, tmp_path: Path) -> None:
    """Estimated before the work begins; and where that is not possible, told when it happens."""
    code = LITTLE_MEMORY + ("" if asked else "room.free_bytes = lambda: None")
    words = ("finetune", "zoo:resnet20", "--no-pretrained", "-b", "512", "--steps", "2")
    done = server.run(*words, "-o", "run", "--channels-last", "off", cwd=tmp_path, code=code)
    assert done.code == 5, done.err
    assert "out of memory" in done.err
    assert ("are needed" in done.err) == asked
    assert "--batch-size" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "run" / "manifest.json").exists()
    if asked:
        fits = int(done.err.split("--batch-size ")[1])
        assert 0 < fits < 512


def test_the_estimate_of_memory_is_near(server: forked.Server, tmp_path: Path) -> None:
    """What a step of training takes, measured in a process of its own."""
    code = """
import torch, torch.nn.functional as F
from pathlib import Path
from dcptool.network import models
from dcptool.training import room
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) << 10 for l in lines if l.startswith(key))
module = models.load("zoo:resnet20", pretrained=False, num_classes=10).module.train()
F.cross_entropy(module(torch.zeros(2, 3, 32, 32)), torch.zeros(2, dtype=torch.long)).backward()
before = status("VmRSS")
loss = F.cross_entropy(module(torch.zeros(256, 3, 32, 32)), torch.zeros(256, dtype=torch.long))
print(room.kept_per_image(module, (3, 32, 32)) * 256 / (status("VmRSS") - before))
"""
    done = server.run(cwd=tmp_path, code=code)
    assert done.code == 0, done.err
    assert 0.5 < float(done.out) < 2.2


def test_a_data_worker_that_is_killed(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    for number in range(8):
        paint(tmp_path / "photos" / f"{number}.png", 160)
    words = ("finetune", str(slim), "--images", "photos", *OPTIONS, "--img-size", "160")
    words += ("-o", "run", "--workers", "1", "--steps", "6", "--aa", "rand-m9")
    done = server.run(*words, cwd=tmp_path, code=DEADLY)
    assert done.code == 5, done.err
    assert "a data worker died, maybe out of memory" in done.err
    assert "--workers 0" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "run" / "manifest.json").exists()
    again = server.run("finetune", "--resume", "run", "--workers", "0", cwd=tmp_path)
    assert again.code == 0, again.err


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "PNG"])
def test_a_truncated_photo_is_never_padded(form: str) -> None:
    stream = io.BytesIO()
    Image.effect_mandelbrot((64, 64), (-2, -1.5, 1, 1.5), 50).convert("RGB").save(stream, form)
    data = stream.getvalue()
    for part in (20, 60, 90):
        with pytest.raises(BadImage):
            images.decode(data[: len(data) * part // 100], "x")


def test_class_names_of_any_bytes(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    for name in (b"caf\xe9", b"new\nline", b"<script>alert(1)", "\u00fc\u4e2d".encode()):
        for number in range(4):
            folder = Path(os.fsdecode(os.fsencode(tmp_path / "data") + b"/" + name))
            paint(folder / f"{number}.png")
    words = ("finetune", "zoo:resnet20", "--no-pretrained", "--num-classes", "4", *OPTIONS)
    done = server.run(*words, "--data-dir", "data", "--steps", "2", "-o", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(json.loads((tmp_path / "run" / "manifest.json").read_bytes())["classes"]) == 4
    page = (tmp_path / "run" / "report.html").read_bytes().decode("utf-8")
    assert "<script>alert" not in page
    done.out.encode("utf-8")


def test_an_image_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "x.png")

    def closed(path: object, *_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(images.files.os, "open", closed)
    with pytest.raises(BadImage) as caught:
        images.read(tmp_path / "x.png")
    assert caught.value.why == "Permission denied"
    assert caught.value.where == str(tmp_path / "x.png")


def test_the_order_of_listing_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cat/b", "cat/A", "cat/deep/a", "dog/1", "dog/10", "dog/2"):
        paint(tmp_path / f"{name}.png")
    wanted = images.list_classes(tmp_path)
    scan = os.scandir

    class Shuffled(list):  # type: ignore[type-arg]
        def __enter__(self) -> Shuffled:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    for seed in range(5):

        def shuffled(folder: Path, seed: int = seed) -> Shuffled:
            with scan(folder) as entries:
                found = Shuffled(entries)
            random.Random(seed).shuffle(found)
            return found

        monkeypatch.setattr(images.os, "scandir", shuffled)
        listing = images.list_classes(tmp_path)
        assert listing == wanted
        assert listing.digest() == wanted.digest()


def test_a_home_that_cannot_be_written(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    code = "from dcptool.pipeline import baseline; baseline.STEPS = 2"
    words = ("prune", "zoo:resnet20", "--no-pretrained", "--rate", "0.5", "--stage-steps", "1")
    words += ("--samples", "8", "--positions", "4")
    home = {"HOME": "/proc", "XDG_CACHE_HOME": "", "TORCH_HOME": "", "HF_HOME": ""}
    done = server.run(*words, cwd=tmp_path, code=code, timeout=120, **home)
    assert done.code == 0, done.err
    assert artifact.load(tmp_path / "runs" / "latest").cuts


def test_few_handles(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    for number in range(8):
        paint(tmp_path / "photos" / f"{number}.png", 160)
    words = ("finetune", str(slim), "--images", "photos", *OPTIONS, "--img-size", "160")
    words += ("-o", "run", "--workers", "4", "--steps", "2", "--aa", "rand-m9")
    done = server.run(*words, cwd=tmp_path, code=FEW_HANDLES)
    assert done.code == 5, done.err
    assert "ulimit -n" in done.err
    assert "16 are allowed" in done.err
    assert "--workers 0" in done.err
    assert "Traceback" not in done.err
    again = server.run("finetune", "--resume", "run", "--workers", "0", cwd=tmp_path)
    assert again.code == 0, again.err


@pytest.mark.parametrize(
    ("err", "words"),
    [
        (RuntimeError("unable to allocate shared memory(shm) for file"), "/dev/shm is full"),
        (OSError(24, "Too many open files"), "ulimit -n"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "worker died"),
        (ConnectionResetError(104, "Connection reset by peer"), "worker died"),
        (EOFError(), "worker died"),
        (RuntimeError("something else"), "in 4 workers failed"),
    ],
)
def test_what_workers_lack_is_named(err: Exception, words: str) -> None:
    fault = workers.worker_fault(err, 4)
    assert fault.code == 5
    assert words in fault.message
    assert "--workers 0" in fault.try_


def test_threads_are_recorded_and_change_little(
    server: forked.Server, slim: Path, tmp_path: Path
) -> None:
    states = []
    for count in (1, 2):
        code = f"import torch; torch.set_num_threads({count})"
        words = finetune(slim, "--steps", "2", "-o", f"run{count}")
        done = server.run(*words, cwd=tmp_path, code=code)
        assert done.code == 0, done.err
        lineage = artifact.read(tmp_path / f"run{count}").lineage
        assert lineage["finetune"]["threads"] == count
        states.append(artifact.load(tmp_path / f"run{count}").module.state_dict())
    for name, value in states[0].items():
        assert (value - states[1][name]).abs().max() <= 1e-3 * value.abs().max() + 1e-3, name


def test_a_clock_that_goes_back(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    words = finetune(slim, "--steps", "3", "-o", "run", "--json")
    done = server.run(*words, cwd=tmp_path, code=BACK)
    assert done.code == 0, done.err
    assert json.loads(done.out)["seconds"] >= 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [row["seconds"] for row in map(json.loads, lines) if row.get("seconds") is not None]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0


def test_no_one_asks_the_clock_on_the_wall() -> None:
    """Durations come from a clock that only goes forward, and no file holds a date."""
    found = []
    for path in Path(dcptool.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "time.time",
                "datetime.now",
                "datetime.datetime.now",
            ):
                found.append(f"{path.name}:{node.lineno}")
    assert found == []


DETERMINED = """
import sys
from dcptool.cli.app import run
photos, seed = sys.argv[1:3]
words = ["prune", "zoo:resnet20", "--no-pretrained", "--rate", "0.5", "--no-training", "--images"]
code = run([*words, photos, "--samples", "4", "--positions", "4", "-o", "slim", "--seed", seed])
rest = ["--images", photos, "--steps", "3", "-b", "4", "--channels-last", "off", "-o", "tuned"]
sys.exit(code or run(["finetune", "slim", *rest]) or run(["export", "tuned"]))
"""


def test_the_same_seed_gives_the_same_bytes(
    server: forked.Server, slim: Path, tmp_path: Path
) -> None:
    """Across processes and hash seeds; other bytes with another seed."""
    photos = str(slim.parent / "photos")
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DETERMINED, photos, "1"],
            cwd=tmp_path / name,
            env={**os.environ, "PYTHONHASHSEED": hashes},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, hashes in (("one", "0"), ("same", "4242"))
    ]
    for process in processes:
        _, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
    words = ("prune", "zoo:resnet20", "--no-pretrained", "--rate", "0.5", "--no-training")
    words += ("--images", photos, "--samples", "4", "--positions", "4", "-o", "slim")
    assert server.run(*words, "--seed", "2", cwd=tmp_path / "other").code == 0
    names = ("slim/model.safetensors", "slim/manifest.json", "slim/steps.jsonl", "slim/prune.json")
    names += ("tuned/model.safetensors", "tuned/manifest.json", "tuned/model.onnx")
    for name in names:
        one, same = ((tmp_path / run / name).read_bytes() for run in ("one", "same"))
        assert one == same, name
    weights = names[0]
    assert (tmp_path / "one" / weights).read_bytes() != (tmp_path / "other" / weights).read_bytes()
