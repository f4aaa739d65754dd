"""The boundary: every way in which a command can end has its code and its three lines."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import click
import pytest

from dcptool import __version__, child
from dcptool.cli import app, requirements
from dcptool.cli.options import output_options
from dcptool.errors import EnvironmentFault, GateFailed, InputError, Interrupted, UsageError

HEAVY = ("torch", "torchvision", "timm", "onnx", "onnxruntime", "matplotlib", "numpy", "PIL")


def ending(monkeypatch, action) -> None:
    """Let `dcptool env` end as `action` does."""

    @click.command("env")
    @output_options
    def command(as_json: bool) -> object:
        return action(as_json)

    monkeypatch.setattr(app.group, "get_command", lambda ctx, name: command)


def raising(err: BaseException):
    def action(as_json: bool) -> None:
        raise err

    return action


@pytest.mark.parametrize(
    ("err", "code"),
    [
        (UsageError("m", why="w", try_="t"), 2),
        (InputError("m", why="w", try_="t"), 3),
        (GateFailed("m", why="w", try_="t"), 4),
        (EnvironmentFault("m", why="w", try_="t"), 5),
        (Interrupted(signal.SIGTERM, message="m", try_="t"), 143),
    ],
)
def test_own_errors_have_their_codes_and_lines(monkeypatch, capsys, err, code):
    ending(monkeypatch, raising(err))
    assert app.run(["env", "--json"]) == code
    seen = capsys.readouterr()
    assert json.loads(seen.out) == {"dcptool": __version__, "error": err.document()}
    assert seen.err == err.lines() + "\n"
    assert app.run(["env"]) == code
    assert capsys.readouterr() == ("", err.lines() + "\n")


@pytest.mark.parametrize(
    ("err", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "SIGINT"),
        (app._Stopped(signal.SIGHUP), 129, "SIGHUP"),
        (MemoryError(), 5, "out of memory"),
        (RuntimeError("[enforce fail] not enough memory: 12"), 5, "out of memory"),
        (OSError(errno.ENOSPC, "x", "/some/file"), 5, "/some/file"),
        (OSError(errno.EMFILE, "x"), 5, "Too many open files"),
        (BrokenPipeError(errno.EPIPE, "x"), 5, "Broken pipe"),
        (EOFError("cut short"), 1, "EOFError"),
        (ZeroDivisionError("by\nzero"), 1, "please report"),
        (FileNotFoundError(errno.ENOENT, "x", "f"), 1, "please report"),
    ],
)
def test_other_errors_are_translated(monkeypatch, capsys, tmp_path, err, code, words):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ending(monkeypatch, raising(err))
    assert app.run(["env"]) == code
    seen = capsys.readouterr()
    assert seen.out == ""
    assert words in seen.err
    assert "Traceback" not in seen.err
    assert len(seen.err.splitlines()) <= 3
    logs = list(tmp_path.glob("dcptool-*.log"))
    assert len(logs) == (1 if code == 1 else 0)
    if logs:
        assert "Traceback" in logs[0].read_text()
        assert str(logs[0]) in seen.err
    assert app.run(["env", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_a_signal_that_a_library_turned_into_an_error_is_still_a_signal(monkeypatch, capsys):
    def action(as_json: bool) -> None:
        with suppress(KeyboardInterrupt):
            app._stop(signal.SIGINT, None)
        raise AttributeError("half imported")

    monkeypatch.setattr(app, "_asked", [])
    ending(monkeypatch, action)
    assert app.run(["env"]) == 130
    assert "SIGINT" in capsys.readouterr().err


def test_a_failed_gate_comes_with_its_document(monkeypatch, capsys):
    failure = GateFailed("too slow", why="1.1 times", try_="t")

    def action(as_json: bool) -> None:
        app.emit("env", {"gates": []}, "a table", as_json=as_json, failure=failure)

    ending(monkeypatch, action)
    assert app.run(["env", "--json"]) == 4
    seen = capsys.readouterr()
    document = json.loads(seen.out)
    assert document["command"] == "env"
    assert document["gates"] == []
    assert document["error"] == failure.document()
    assert seen.err == failure.lines() + "\n"
    assert app.run(["env"]) == 4
    assert capsys.readouterr().out == "a table\n"


def test_an_error_after_the_document_prints_no_second_one(monkeypatch, capsys):
    def action(as_json: bool) -> None:
        app.emit("env", {}, "", as_json=as_json)
        raise GateFailed("later")

    ending(monkeypatch, action)
    assert app.run(["env", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["command"] == "env"


@pytest.mark.parametrize(
    ("command", "as_json", "lost"),
    [("export", False, False), ("export", True, True), ("analyze", False, True)],
)
def test_a_lost_message_does_not_undo_a_file(monkeypatch, capsys, command, as_json, lost):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        if lost:
            with pytest.raises(EnvironmentFault, match="cannot write the result"):
                app.emit(command, {}, "a table", as_json=as_json)
        else:
            app.emit(command, {}, "a table", as_json=as_json)
            assert "No space left on device; the files are written" in capsys.readouterr().err
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


def test_a_returned_number_is_the_code(monkeypatch):
    ending(monkeypatch, lambda as_json: 4)
    assert app.run(["env"]) == 4
    ending(monkeypatch, lambda as_json: None)
    assert app.run(["env"]) == 0


@pytest.mark.parametrize("arguments", [["--json", "env"], ["env", "--json"]])
def test_common_options_stand_before_or_after_the_command(monkeypatch, arguments):
    seen = []
    ending(monkeypatch, seen.append)
    assert app.run(arguments) == 0
    assert seen == [True]
    assert app.run(["env"]) == 0
    assert seen == [True, False]


def test_options_behind_two_dashes_are_arguments(capsys):
    assert app.run(["analyze", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_old_or_missing_dependencies_stop_every_command(monkeypatch, capsys):
    have = {"torch": "2.10.0", "timm": None}
    real = requirements._version
    monkeypatch.setattr(requirements, "_version", lambda name: have.get(name, real(name)))
    worked = []
    ending(monkeypatch, worked.append)
    assert app.run(["env"]) == 5
    text = capsys.readouterr().err
    assert "needs timm>=1.0.30, torch>=2.11" in text
    assert "timm is not installed, torch is 2.10.0" in text
    assert "pip install 'timm>=1.0.30' 'torch>=2.11'" in text
    assert worked == []


@pytest.mark.parametrize("version", ["2.11", "2.15.0+cpu", "3.0rc1"])
def test_new_enough_dependencies_pass(monkeypatch, version):
    real = requirements._version
    monkeypatch.setattr(
        requirements, "_version", lambda name: version if name == "torch" else real(name)
    )
    requirements.check()


def test_sources_without_metadata_have_nothing_to_check(monkeypatch):
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    requirements.check()


def imported(*arguments: str, **env: str) -> tuple[str, set[str]]:
    """What a command line prints, and the heavy libraries it has imported by then."""
    script = (
        "import sys\n"
        "from dcptool.cli.app import run\n"
        "code = run(sys.argv[1:])\n"
        "sys.stdout.flush()\n"
        f"sys.stderr.write('HEAVY ' + ' '.join(set({HEAVY}) & set(sys.modules)))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout, set(done.stderr.rpartition("HEAVY ")[2].split())


@pytest.mark.parametrize("command", ["", *app.COMMANDS])
def test_help_imports_nothing_heavy(command):
    text, heavy = imported(*[command] if command else [], "--help")
    assert text.startswith(f"Usage: dcptool {command}".rstrip())
    assert not heavy


def test_import_of_the_package_imports_nothing_heavy():
    script = f"import dcptool, sys; print(set({HEAVY}) & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("shell", "words", "wanted"),
    [
        ("bash", "dcptool ana", "analyze"),
        ("zsh", "dcptool ana", "analyze"),
        ("fish", "dcptool ana", "analyze"),
        ("bash", "dcptool analyze --sco", "--scope"),
        ("zsh", "dcptool analyze --scope a", "all"),
        ("fish", "dcptool export --int8 --calibration ent", "entropy"),
        ("bash", "dcptool completion fi", "fish"),
    ],
)
def test_completion_imports_nothing_heavy(shell, words, wanted):
    parts = words.split()
    last = str(len(parts) - 1) if shell != "fish" else parts[-1]
    text, heavy = imported(_DCPTOOL_COMPLETE=f"{shell}_complete", COMP_WORDS=words, COMP_CWORD=last)
    assert wanted in re.split("[,\\s]", text)
    assert not heavy


def test_what_lies_in_the_working_folder_is_not_imported(tmp_path: Path) -> None:
    for name in ("click", "json", "dcptool"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('foreign code')")
    words = [*child.command("dcptool.cli.app"), "--version"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert __version__ in ended.stdout
