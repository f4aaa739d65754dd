"""Two processes of one run: when one dies, hangs or is stopped, all end, with a word."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import forked
import pytest

from dcptool.training import checkpoint

STEPS = ("--channels-last", "off", "-b", "4", "--steps", "100000", "--log-interval", "1")
STEPS += ("--save-every", "0.5", "-o", "run", "--nproc-per-node", "2")


def workers(launcher: int) -> dict[int, int]:
    """Process numbers by rank."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks = [one for one in variables if one.startswith(b"RANK=")]
        if ranks:
            found[int(ranks[0][5:])] = int(pid)
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < until, f"{pids} are still there"
        time.sleep(0.05)


def started(server: forked.Server, slim: Path, folder: Path) -> tuple[forked.Forked, list[int]]:
    """A run of two ranks that trains and has saved its state."""
    words = ("finetune", str(slim), "--images", str(slim.parent / "photos"), *STEPS)
    process = server.start(*words, cwd=folder)
    until = time.monotonic() + 150
    while not list((folder / "run").glob("checkpoints/state-*")):
        assert process.runs(), process.err()
        assert time.monotonic() < until, process.err()
        time.sleep(0.1)
    found = workers(process.pid)
    assert sorted(found) == [0, 1]
    return process, [found[0], found[1]]


def check_state(folder: Path) -> None:
    """The newest generation is whole, and nothing was published."""
    found = checkpoint.generations(folder / "run" / "checkpoints")
    assert found
    for _, digest, path in found:
        checkpoint._read(path, digest)
    assert not (folder / "run" / "manifest.json").exists()


def test_a_rank_that_is_killed_ends_all(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    process, ranks = started(server, slim, tmp_path)
    os.kill(ranks[1], signal.SIGKILL)
    done = process.wait(60)
    assert done.code == 5, done.err
    assert "process 1 of 2 died or hangs" in done.err
    assert "killed, or out of memory" in done.err
    assert "Traceback" not in done.err
    wait_until_gone(ranks, 1)
    check_state(tmp_path)


def test_a_rank_that_hangs_ends_all(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    process, ranks = started(server, slim, tmp_path)
    os.kill(ranks[1], signal.SIGSTOP)
    done = process.wait(120)
    assert done.code == 5, done.err
    assert "process 1 of 2 died or hangs" in done.err
    wait_until_gone(ranks, 1)
    check_state(tmp_path)
    status = json.loads((tmp_path / "run" / "status.0.json").read_text())
    assert status["code"] == 5
    assert "gone or hangs" in status["reason"]
    assert "process 1 of 2 gave no sign of life" in status["why"]


def test_a_signal_to_the_launcher_saves(server: forked.Server, slim: Path, tmp_path: Path) -> None:
    process, ranks = started(server, slim, tmp_path)
    process.kill(signal.SIGTERM)
    done = process.wait(60)
    assert done.code == 143, done.err
    assert done.err.count("state saved") == 1
    assert "  try: dcptool finetune --resume run --nproc-per-node 2\n" in done.err
    wait_until_gone(ranks, 1)
    check_state(tmp_path)
    for rank in (0, 1):
        status = json.loads((tmp_path / "run" / f"status.{rank}.json").read_text())
        assert status["code"] == 143


def test_a_gate_that_fails_after_the_ranks_parted_is_said_once(
    server: forked.Server, slim: Path, tmp_path: Path
) -> None:
    # Handed on, an artifact does not say which images it was made with: the digits are taken.
    for name in ("manifest.json", "model.safetensors"):
        shutil.copy(slim / name, tmp_path)
    words = ("evaluate", ".", "--min-top1", "100", "--nproc-per-node", "2", "--json")
    done = server.run(*words, cwd=tmp_path)
    assert done.code == 4, done.err
    assert json.loads(done.out)["error"]["code"] == 4
    assert done.err.count("below 100 %") == 1


def test_options_that_do_not_fit_are_said_once(
    server: forked.Server, slim: Path, tmp_path: Path
) -> None:
    words = ("finetune", str(slim), "--epochs", "1", "--steps", "1", "--nproc-per-node", "2")
    done = server.run(*words, cwd=tmp_path)
    assert done.code == 2, done.err
    assert done.err.count("say the same thing twice") == 1


@pytest.mark.parametrize("hanging", [False, True])
def test_ranks_do_not_outlive_their_launcher(
    hanging: bool, server: forked.Server, slim: Path, tmp_path: Path
) -> None:
    process, ranks = started(server, slim, tmp_path)
    if hanging:
        os.kill(ranks[0], signal.SIGSTOP)
    process.kill(signal.SIGKILL)
    assert process.wait(10).code == -9
    wait_until_gone(ranks, 5)
    check_state(tmp_path)
