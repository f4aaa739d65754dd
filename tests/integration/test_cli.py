"""The command line from outside: codes, messages, streams, signals, shells."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from dcptool import __version__
from dcptool.cli import app

TOY = "zoo:resnet20"


def in_shell(line: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which $DCPTOOL is the command."""
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env={**os.environ, "DCPTOOL": f"{sys.executable} -m dcptool", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def dcptool(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `dcptool ARGUMENTS` as a shell does, in an empty folder."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dcptool", *arguments],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def is_three_lines(text: str) -> bool:
    return bool(re.fullmatch(r"dcptool: .+\n  why: .+(\n       .+)*\n  try: .+\n", text))


def test_version_and_help(dcptool):
    assert dcptool("--version").stdout == f"dcptool {__version__}\n"
    seen = dcptool("-h")
    assert seen.returncode == 0
    assert all(re.search(rf"^  {name} ", seen.stdout, re.M) for name in app.COMMANDS)
    assert seen.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["analyse", "resnet18"], 2, "try: dcptool analyze resnet18"),
        (["frobnicate"], 2, "try: dcptool --help"),
        (["analyze", "resnet18", "--rat=0.3"], 2, "try: dcptool analyze resnet18 --rate=0.3"),
        (["analyze", "resnet18", "--zzz"], 2, "analyze has no option --zzz"),
        (["--rate", "0.3", "analyze"], 2, "stand after its name"),
        (["analyze"], 2, "MODEL is missing"),
        (["analyze", TOY, "extra"], 2, "extra"),
        (["completion", "csh"], 2, "'bash', 'zsh', 'fish'"),
    ],
)
def test_mistakes_on_the_command_line(dcptool, arguments, code, words):
    seen = dcptool(*arguments)
    assert seen.returncode == code
    assert seen.stdout == ""
    assert words in seen.stderr
    assert is_three_lines(seen.stderr), seen.stderr


def test_all_wrong_values_are_told_at_once(dcptool):
    seen = dcptool("analyze", TOY, "--losses", "99", "--seed", "x", "--scope", "none")
    assert seen.returncode == 2
    assert "analyze cannot use 3 values" in seen.stderr
    for name in ("--losses", "--seed", "--scope"):
        assert f"{name}: " in seen.stderr
    assert is_three_lines(seen.stderr), seen.stderr


def test_no_arguments_show_the_help_as_a_mistake(dcptool):
    seen = dcptool()
    assert seen.returncode == 2
    assert seen.stdout == ""
    assert seen.stderr.startswith("Usage: dcptool")


def test_json_error_is_alone_on_stdout(dcptool, tmp_path):
    (tmp_path / "weights.pt").write_text("<html>Not found</html>")
    arguments = ["evaluate", TOY, "--checkpoint", "weights.pt"]
    seen = dcptool(*arguments, "--json")
    assert seen.returncode == 3
    document = json.loads(seen.stdout)
    assert document["dcptool"] == __version__
    assert document["error"]["code"] == 3
    assert set(document["error"]) == {"code", "message", "why", "try"}
    assert "weights.pt" in document["error"]["message"]
    assert document["error"]["message"] in seen.stderr
    assert "Traceback" not in seen.stderr


def test_traceback_only_with_debug(dcptool):
    seen = dcptool("frobnicate", "--debug")
    assert seen.returncode == 2
    assert "Traceback" in seen.stderr
    assert "Traceback" not in dcptool("frobnicate").stderr


def test_env(dcptool, tmp_path):
    secrets = {"HF_TOKEN": "hf_secret", "http_proxy": "http://u:pw@h:1"}
    (tmp_path / "home").mkdir()
    bare = {"HOME": str(tmp_path / "home"), "CI": "", "XDG_CACHE_HOME": ""}
    seen = dcptool("env", "--json", "-v", env={**secrets, **bare})
    # No device number, no database of a library that reports to its makers.
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []
    assert seen.returncode == 0
    document = json.loads(seen.stdout)
    assert document["command"] == "env"
    assert {"python", "dcptool", "torch", "timm", "onnxruntime"} <= set(document["versions"])
    assert document["devices"][0]["name"] == "cpu"
    assert document["devices"][0]["cores"] >= 1
    assert "cpu" in document["providers"]
    assert document["round_to"]["cpu"] in (8, 16)
    assert "secret" not in seen.stdout + seen.stderr
    assert "pw@" not in seen.stdout + seen.stderr
    assert seen.stderr == "env done\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals(tmp_path, number, code):
    with subprocess.Popen(
        [sys.executable, "-m", "dcptool", "analyze", "resnet50", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # In the middle of its imports: long after the start, long before the end.
        maps = Path(f"/proc/{process.pid}/maps")
        until = time.monotonic() + 60
        while "libtorch" not in maps.read_text() and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert json.loads(out)["error"]["code"] == code
    assert f"stopped by {number.name}" in err
    assert "Traceback" not in err


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    line = "trap '' HUP; $DCPTOOL env >out & pid=$!; sleep 1; kill -HUP $pid; wait $pid"
    seen = in_shell(line, tmp_path)
    assert seen.returncode == 0, seen.stderr
    text = (tmp_path / "out").read_text()
    assert re.search(r"^torch +[0-9]", text, re.M)
    assert re.search(r"^cpu: .+ cores$", text, re.M)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("$DCPTOOL completion bash >&-", 5, "Bad file descriptor"),
        ("$DCPTOOL completion zsh --json >/dev/full", 5, "No space left"),
        ("$DCPTOOL completion fish | true; exit ${PIPESTATUS[0]}", 5, "Broken pipe"),
        ("$DCPTOOL --help >/dev/full", 5, "No space left"),
        ("$DCPTOOL --help >&-", 5, "Bad file descriptor"),
        ("$DCPTOOL --help | true; exit $((PIPESTATUS[0] % 5))", 0, ""),
        ("$DCPTOOL --version <&-", 0, ""),
        ("$DCPTOOL --version 2>&-", 0, ""),
        ("$DCPTOOL frobnicate 2>&-", 2, ""),
        ("$DCPTOOL frobnicate --json >/dev/full", 2, "no command"),
        ("$DCPTOOL frobnicate 2>/dev/full", 2, ""),
        ("$DCPTOOL --version <&- >&- 2>&-", 5, ""),
    ],
)
def test_streams_in_any_state(tmp_path, line, code, words):
    seen = in_shell(line, tmp_path)
    assert seen.returncode == code, seen.stderr
    assert words in seen.stderr
    assert "Traceback" not in seen.stderr
    assert "Exception ignored" not in seen.stderr


def test_closed_streams_neither_stop_the_work_nor_leak_into_files(tmp_path):
    line = f"$DCPTOOL export {TOY} --no-pretrained --onnx a.onnx <&- >&- 2>&-"
    assert in_shell(line, tmp_path).returncode == 0
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".onnx"] == ["a.onnx"]
    onnx.checker.check_model(onnx.load(tmp_path / "a.onnx"))


def test_closed_descriptors_are_not_given_to_files(tmp_path):
    script = (
        "import os; from dcptool.cli import streams; streams.mend(); "
        "os.write(os.open('seen', os.O_CREAT | os.O_WRONLY), b'x'); "
        "os._exit(os.open('seen', os.O_RDONLY))"
    )
    seen = in_shell(f'{sys.executable} -c "{script}" <&- >&- 2>&-', tmp_path)
    assert seen.returncode > 3
    assert (tmp_path / "seen").read_bytes() == b"x"


def test_bare_environment_without_home_terminal_or_unicode():
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    seen = subprocess.run(
        [sys.executable, "-m", "dcptool", "analyze", TOY, "-q"],
        cwd="/",
        env={**plain, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "FORCE_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert seen.returncode == 0, seen.stderr
    assert seen.stderr == b""
    assert b"\x1b" not in seen.stdout
    assert b"params" in seen.stdout
    seen.stdout.decode("ascii")


def test_names_that_the_locale_cannot_print(dcptool, tmp_path):
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    seen = dcptool("fr\u00f6bnicate\x1b[2J", env=plain)
    assert seen.returncode == 2
    assert "there is no command" in seen.stderr
    assert "\x1b" not in seen.stderr
    assert is_three_lines(seen.stderr)
    script = "from dcptool.cli import streams as s; s.mend(); s.print_result(chr(228) + chr(56575))"
    seen = in_shell(f"{sys.executable} -c '{script}'", tmp_path, **plain)
    assert seen.stdout == "\\xe4\\udcff\n", seen.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(dcptool, tmp_path, shell):
    script = dcptool("completion", shell)
    assert script.returncode == 0
    assert "_DCPTOOL_COMPLETE" in script.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here to try the script in")
    (tmp_path / "script").write_text(script.stdout)
    subprocess.run([shell, "-n", "script"], cwd=tmp_path, check=True)


def test_completion_inside_bash(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "dcptool").write_text(f'#!/bin/sh\nexec {sys.executable} -m dcptool "$@"\n')
    (folder / "dcptool").chmod(0o755)
    line = (
        f'PATH={folder}:$PATH; eval "$(dcptool completion bash)"; '
        'COMP_WORDS=(dcptool analyze --scope ""); COMP_CWORD=3; _dcptool_completion dcptool; '
        'echo "${COMPREPLY[@]}"'
    )
    assert in_shell(line, tmp_path).stdout.split() == ["paper", "all"]
