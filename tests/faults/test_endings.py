"""Signals at the worst instants: in an epoch, in the save that the first one asks for."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import forked
import pytest

OPTIONS = ("--channels-last", "off", "-b", "4", "--steps", "5", "--log-interval", "1")
OPTIONS += ("--save-every", "0", "-o", "run")
# Ends on itself when the fifth row of figures is written: two steps, a validation before, between
# and after them.
IN_EPOCH = """
import os
from dcptool import files
count, append = [0], files.append
def counted(path, text):
    append(path, text)
    count[0] += path.name == "metrics.jsonl"
    if count[0] == 5:
        count[0] += 1
        os.kill(os.getpid(), NUMBER)
files.append = counted
"""
# And once more when the state is being flushed to the disk.
IN_SAVE = """
fsync = os.fsync
def again(handle):
    if count[0] > 5 and os.readlink(f"/proc/self/fd/{handle}").endswith(".tmp"):
        os.kill(os.getpid(), NUMBER)
    fsync(handle)
os.fsync = again
"""
AT_RENAME = """
import os
rename = os.rename
def stopped(old, new, **more):
    if str(new).endswith(NAME):
        os.kill(os.getpid(), 15)
    rename(old, new, **more)
os.rename = stopped
"""


def figures(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "images_per_second")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


def finetune(slim: Path) -> tuple[str, ...]:
    return "finetune", str(slim), "--images", str(slim.parent / "photos"), *OPTIONS


@pytest.fixture(scope="module")
def whole(server: forked.Server, slim: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    done = server.run(*finetune(slim), cwd=place)
    assert done.code == 0, done.err
    return place / "run"


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_in_an_epoch_and_resumed(
    number: int, twice: bool, server: forked.Server, slim: Path, whole: Path, tmp_path: Path
) -> None:
    code = (IN_EPOCH + (IN_SAVE if twice else "")).replace("NUMBER", str(int(number)))
    ended = server.run(*finetune(slim), cwd=tmp_path, code=code)
    assert ended.code == 128 + number, ended.err
    assert ended.seconds < 20
    said = "the state saved before it stays" if twice else "state saved"
    assert said in ended.err
    assert twice or "  try: dcptool finetune --resume run" in ended.err
    assert "Traceback" not in ended.err
    assert not list(tmp_path.rglob(".dcptool-*"))
    assert not (tmp_path / "run" / "manifest.json").exists()
    again = server.run("finetune", "--resume", "run", cwd=tmp_path)
    assert again.code == 0, again.err
    assert "resumed at step" in again.err
    weights = [(f / "model.safetensors").read_bytes() for f in (tmp_path / "run", whole)]
    assert weights[0] == weights[1]
    assert figures(tmp_path / "run") == figures(whole)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("export", "SLIM", "--onnx", "runs/m.onnx", "--force"), "m.onnx"),
        (("report", "runs/old"), "report.html"),
    ],
)
def test_stopped_at_publication(
    words: tuple[str, ...], name: str, server: forked.Server, slim: Path, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(slim, tmp_path / "runs" / "old")
    (tmp_path / "runs" / "m.onnx").write_text("old")
    (tmp_path / "runs" / "old" / "report.html").write_text("old")
    code = AT_RENAME.replace("NAME", repr(name))
    arguments = [str(slim) if word == "SLIM" else word for word in words]
    ended = server.run(*arguments, cwd=tmp_path, code=code)
    assert ended.code == 143, ended.err
    assert "stopped by SIGTERM" in ended.err
    assert not list(tmp_path.rglob(".dcptool-*"))
    for path in (tmp_path / "runs" / "m.onnx", tmp_path / "runs" / "old" / "report.html"):
        assert path.read_text() == "old"
