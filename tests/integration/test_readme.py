"""What the README shows is what the program prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dcptool.cli import app

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def transcripts() -> list[tuple[str, list[str]]]:
    """Each `$ dcptool analyze ...` of a console block, with the lines shown under it."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", README, re.M | re.S):
        command, *lines = block.splitlines()
        if command.startswith("$ dcptool analyze "):
            found.append((command.removeprefix("$ dcptool "), lines))
    return found


def test_there_are_transcripts():
    assert len(transcripts()) >= 2


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
    assert "\npip install '.[test]' && pytest\n" in README
