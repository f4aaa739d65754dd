"""What people see: nothing but stderr, no escape codes off a terminal, no driven terminals."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from dcptool import console


@pytest.fixture(autouse=True)
def plain_settings():
    console.configure()
    yield
    console.configure()


def test_notes_warnings_details_go_to_stderr(capsys):
    console.note("a note")
    console.warn("a warning")
    console.detail("a detail")
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err == "a note\nwarning: a warning\n"
    console.configure(quiet=True, verbose=True)
    console.note("a note")
    console.warn("a warning")
    console.detail("a detail")
    assert capsys.readouterr().err == "warning: a warning\na detail\n"


def test_a_broken_stderr_stops_no_work(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Broken())
    console.warn("nobody hears this")


def test_control_characters_are_spelled_out(capsys):
    console.note("class \x1b[2J\x07 \x9b31m ok\ttab")
    assert capsys.readouterr().err == "class \\x1b[2J\\x07 \\x9b31m ok\ttab\n"
    text = console.table(["name"], [["a\nb\x1b"]])
    assert text == "name\n--------\na\\nb\\x1b"


def test_plain_progress_speaks_now_and_then(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress("pruning", total=10) as task:
        task.advance(1, status="layer1")
        assert capsys.readouterr().err == ""
        now[0] += console.PLAIN_LINE_EVERY_S
        task.advance(1, status="layer2")
        assert capsys.readouterr().err == "pruning:  20 %, 40 s left  layer2\n"
        task.advance(1)
        assert capsys.readouterr().err == ""


def test_plain_progress_is_silent_when_quiet(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    console.configure(quiet=True)
    with console.progress("pruning") as task:
        now[0] += 100
        task.advance()
    assert capsys.readouterr().err == ""


LIVE = """
import time
from dcptool import console
with console.progress("pruning", total=2) as task:
    task.advance(status="layer[0] of [bold]two[/bold]")
    time.sleep(0.4)
    console.note("a note between")
    with console.progress("inner", total=1) as inner:
        inner.advance()
    task.advance(status="done")
"""


def on_a_terminal(**env: str) -> str:
    parent, child = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", LIVE],
        stderr=child,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **env},
    ) as process:
        os.close(child)
        text = b""
        try:
            while piece := os.read(parent, 4096):
                text += piece
        except OSError:
            pass  # how a terminal says that the other side is closed
    os.close(parent)
    assert process.returncode == 0, text
    return text.decode()


def test_live_progress_on_a_terminal_only():
    text = on_a_terminal()
    assert "\x1b[" in text
    assert "[bold]" in text  # shown, not obeyed
    assert "a note between" in text
    assert "\x1b" not in on_a_terminal(TERM="dumb")


def test_no_color():
    colours = [f"\x1b[{code}" for code in ("31", "32", "33", "35", "36", "38;")]
    assert any(colour in on_a_terminal(NO_COLOR="", COLORTERM="truecolor") for colour in colours)
    assert not any(colour in on_a_terminal(NO_COLOR="1") for colour in colours)


def test_table():
    rows = [["conv", "64"], ["a longer name", "7"]]
    assert console.table(["layer", "in"], rows, align="<>").splitlines() == [
        "layer          in",
        "-------------  --",
        "conv           64",
        "a longer name   7",
    ]
    cut = console.table(["n", "reason"], [["1", "x" * 50]], width=20)
    assert max(len(line) for line in cut.splitlines()) == 20
    assert cut.endswith("…")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (-3, "0 s")],
)
def test_clock(seconds, text):
    assert console.clock(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(25557032, "25.56 M"), (4089184256, "4.089 G"), (1500, "1.5 k"), (7, "7")],
)
def test_quantity(number, text):
    assert console.quantity(number) == text
