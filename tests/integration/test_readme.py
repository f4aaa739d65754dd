"""What the README shows is what the program prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dcptool.cli import app

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def transcripts() -> list[tuple[str, list[str]]]:
    """Each quick `$ dcptool ...` of a console block, with the lines shown under it."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", README, re.M | re.S):
        command, *lines = block.splitlines()
        if command.startswith(("$ dcptool analyze ", "$ dcptool recipe ")):
            found.append((command.removeprefix("$ dcptool "), lines))
    return found


def test_there_are_transcripts():
    assert len(transcripts()) >= 3


@pytest.mark.parametrize(("command", "shown"), transcripts())
def test_transcript(capsys, command, shown):
    app.run(shlex.split(command))
    seen = capsys.readouterr()
    printed = (seen.out or seen.err).splitlines()
    place = 0
    for line in shown:
        if line == "...":
            continue  # lines left out, here or nowhere
        assert line in printed[place:], f"not printed, or not in this order: {line}"
        place = printed.index(line, place) + 1
    if "..." not in shown:
        assert printed == shown


def test_exactly_two_commands_for_a_fresh_machine():
    assert len(re.findall(r"^pip install ", README, re.M)) == 2
    assert "\npip install '.[test]' && pytest -n 2\n" in README


def shell_example() -> str:
    """The deployment that stops when a limit does not hold."""
    blocks = re.findall(r"^```sh\n(set -e\n.*?)^```", README, re.M | re.S)
    assert len(blocks) == 1
    return blocks[0]


def as_user(place: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run lines of the README in a shell where `dcptool` is this one."""
    define = f'dcptool() {{ {shlex.quote(sys.executable)} -m dcptool "$@"; }}\n'
    return subprocess.run(
        ["sh", "-c", define + script],
        cwd=place,
        env={**os.environ, "XDG_CACHE_HOME": str(place / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_quickstart_then_the_deployment_example(tmp_path):
    """What the README shows of a run is what comes out, but for times; then its gates hold."""
    done = as_user(tmp_path, "dcptool run quickstart")
    assert done.returncode == 0, done.stderr
    shown = README.partition("$ dcptool run quickstart\n")[2].partition("```")[0]
    for line in shown.splitlines():
        if line.startswith(("params", "MACs", "gate")):
            assert line.partition(":")[0] in done.stdout
    assert shown.splitlines()[0] in done.stdout
    assert (tmp_path / "runs/quickstart-001/finetune/model.onnx").is_file()
    done = as_user(tmp_path, shell_example())
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "bench.json").read_text())["gates"][0]["ok"]
    # The same example stops at a limit that cannot hold.
    strict = shell_example().replace("--min-top1 90", "--min-top1 100", 1)
    assert as_user(tmp_path, strict).returncode == 4
