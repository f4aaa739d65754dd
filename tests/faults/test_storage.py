"""Disks that are full, closed or gone, and folders that somebody else uses."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest

from dcptool import files
from dcptool.errors import EnvironmentFault, InputError
from dcptool.network import artifact
from dcptool.training import checkpoint

OPTIONS = ("--channels-last", "off", "-b", "4", "--log-interval", "1", "--save-every", "0")
LARGEST_FILE = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
"""
# Goes on when the file `go` appears, after the sixth row of figures: three steps, and a validation
# before each.
WAITS = """
import time
from pathlib import Path
from dcptool import files
count, append = [0], files.append
def waits(path, text):
    append(path, text)
    count[0] += path.name == "metrics.jsonl"
    while count[0] == 6 and not Path("go").exists():
        time.sleep(0.02)
files.append = waits
"""


def finetune(slim: Path, *more: str) -> tuple[str, ...]:
    return "finetune", str(slim), "--images", str(slim.parent / "photos"), *OPTIONS, *more


def has_three_lines(text: str) -> bool:
    return "dcptool: " in text and "\n  why: " in text and "\n  try: " in text


def wait_for(process: forked.Forked, there: Path, text: str = "") -> None:
    until = time.monotonic() + 60
    while not (there.exists() and text in there.read_text()):
        assert process.runs(), process.err()
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_file_size_limit(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    done = server.run(*finetune(slim, "--steps", "2", "-o", "run"), cwd=tmp_path, code=LARGEST_FILE)
    assert done.code == 5, done.err
    assert "ulimit -f unlimited" in done.err
    assert "checkpoints/state-" in done.err
    assert has_three_lines(done.err)
    assert not list(tmp_path.rglob("*.tmp"))
    assert not (tmp_path / "run" / "manifest.json").exists()


@contextmanager
def small_disk(folder: Path, option: str) -> Iterator[None]:
    """A disk of its own at `folder`, where that is allowed."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", option, "none", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


UNASKED = "from dcptool import files; files.require_space = lambda *_: None"


@pytest.mark.parametrize("asked", [True, False])
def test_a_full_disk(asked: bool, server: forked.Server, slim: Path, tmp_path: Path) -> None:
    """Seen before the work begins; and where it fills up only later, as it is written."""
    words = finetune(slim, "--steps", "9", "-o", "disk/run")
    with small_disk(tmp_path / "disk", "size=1m"):
        done = server.run(*words, cwd=tmp_path, code="" if asked else UNASKED)
        assert list(tmp_path.rglob("*.tmp")) == []
        assert not (tmp_path / "disk" / "run" / "manifest.json").exists()
        for _, digest, path in checkpoint.generations(tmp_path / "disk" / "run" / "checkpoints"):
            checkpoint._read(path, digest)
    assert done.code == 5, done.err
    assert "bytes are free" in done.err
    assert ("not enough room in disk/run" in done.err) == asked
    assert has_three_lines(done.err)


def test_a_disk_that_is_read_only(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "closed", "ro"):
        done = server.run(*finetune(slim, "--steps", "9", "-o", "closed/run"), cwd=tmp_path)
    assert done.code == 5, done.err
    assert "cannot write closed/run" in done.err
    assert "choose a writable folder" in done.err
    assert "fine-tuning" not in done.err


def test_a_run_folder_that_vanishes(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    words = finetune(slim, "--steps", "8", "-o", "run")
    process = server.start(*words, cwd=tmp_path, code=WAITS)
    wait_for(process, tmp_path / "run" / "metrics.csv", "\n2,")
    # in one step: a tree taken down file by file gets new files under way
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "go").touch()
    done = process.wait()
    assert done.code == 5, done.err
    assert "cannot write run/" in done.err
    assert "was the folder removed?" in done.err
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_two_runs_in_one_folder(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    words = finetune(slim, "--steps", "5", "-o", "run")
    process = server.start(*words, cwd=tmp_path, code=WAITS)
    wait_for(process, tmp_path / "run" / "metrics.csv", "\n2,")
    second = server.run("finetune", "--resume", "run", cwd=tmp_path)
    assert second.code == 5, second.err
    assert f"process {process.pid} is writing to it" in second.err
    (tmp_path / "go").touch()
    assert process.wait().code == 0
    artifact.load(tmp_path / "run")


ORPHAN = """
import os, sys, time
from pathlib import Path
from dcptool import files
with files.lock_folder(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


def test_a_lock_does_not_live_on_in_an_orphan(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    orphan = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.wait()
        os.kill(orphan, 0)
        with files.lock_folder(tmp_path):
            pass
    finally:
        os.kill(orphan, signal.SIGKILL)
        holder.stdout.close()


def test_a_disk_that_cannot_be_read(slim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, _size: int = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.os, "fdopen", lambda *_, **__: Broken())
    with pytest.raises(EnvironmentFault) as caught:
        artifact.load(slim)
    assert "manifest.json" in caught.value.message
    assert "Input/output error" in caught.value.why


def test_a_manifest_cut_anywhere(slim: Path, tmp_path: Path) -> None:
    data = (slim / "manifest.json").read_bytes()
    for part in range(16):
        (tmp_path / "manifest.json").write_bytes(data[: len(data) * part // 16])
        with pytest.raises(InputError) as caught:
            artifact.read(tmp_path)
        assert "not valid JSON" in caught.value.why


@pytest.mark.parametrize("change", ["truncate", "swap", "remove"])
def test_changed_between_hash_and_use(
    change: str, slim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "slim"
    shutil.copytree(slim, place)
    weights = place / "model.safetensors"
    parse = artifact.weights.parse

    def changed(data: bytes, path: Path) -> object:
        if change == "truncate":
            os.truncate(weights, 100)
        elif change == "swap":
            (tmp_path / "other").write_bytes(b"other")
            (tmp_path / "other").rename(weights)
        else:
            weights.unlink()
        return parse(data, path)

    monkeypatch.setattr(artifact.weights, "parse", changed)
    found = artifact.load(place).module.state_dict()
    monkeypatch.undo()
    wanted = artifact.load(slim).module.state_dict()
    assert all(found[name].equal(wanted[name]) for name in wanted)


def test_a_replaced_artifact_is_old_or_new(slim: Path, tmp_path: Path) -> None:
    """Between its two files, the manifest that is about to come speaks for the new weights."""
    place = tmp_path / "slim"
    shutil.copytree(slim, place)
    network = artifact.load(slim)
    bias = list(network.module.state_dict())[-1]
    network.module.state_dict()[bias].add_(1)
    seen = []
    publish = files.publish

    def watched(path: Path, data: bytes) -> None:
        publish(path, data)
        seen.append((path.name, float(artifact.load(place).module.state_dict()[bias][0])))

    files.publish = watched
    try:
        artifact.save(network, place, cost=artifact.read(slim).cost, metrics={"new": 1})
    finally:
        files.publish = publish
    old = seen[0][1]
    assert [name for name, _ in seen] == [
        ".manifest.next.json",
        "model.safetensors",
        "manifest.json",
    ]
    assert [value - old for _, value in seen] == pytest.approx([0, 1, 1], abs=1e-6)
    assert artifact.read(place).metrics == {"new": 1}
    assert not (place / ".manifest.next.json").exists()


def test_a_forced_run_that_was_stopped_is_not_taken_for_done(
    server: forked.Server, slim: Path, tmp_path: Path
) -> None:
    words = finetune(slim, "--steps", "4", "-o", "run")
    assert server.run(*words, cwd=tmp_path).code == 0
    before = artifact.load(tmp_path / "run").module.state_dict()
    process = server.start(*words, "--force", "--steps", "6", cwd=tmp_path, code=WAITS)
    wait_for(process, tmp_path / "run" / "finetune.json", '"replaces"')
    while process.runs() and len(list(tmp_path.glob("run/checkpoints/state-*"))) < 2:
        time.sleep(0.02)
    process.kill()
    assert process.wait().code == -9
    kept = artifact.load(tmp_path / "run").module.state_dict()
    assert all(kept[name].equal(before[name]) for name in before)
    done = server.run("finetune", "--resume", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "finished already" not in done.err
    assert artifact.read(tmp_path / "run").lineage["finetune"]["steps"] == 6
