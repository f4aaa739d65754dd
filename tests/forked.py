"""Commands started many times at the price of one: a server that has all libraries forks.

A forked command is the real one from `main` on, in a process of its own: signals, limits,
exit codes and files are those of a user's command, only its seconds of imports are saved.
`code` is run before it, in its process, to put a fault in its way.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM = """
import dcptool.cli.app, dcptool.deploy.bench, dcptool.deploy.export, dcptool.deploy.samples
import dcptool.deploy.targets, dcptool.deploy.int8, dcptool.pipeline.finetune
import dcptool.pipeline.baseline, dcptool.pipeline.estimate, dcptool.pipeline.prune
import dcptool.pipeline.run, dcptool.pipeline.runstate, dcptool.report.page
import dcptool.training.classes, dcptool.training.workers, dcptool.report.plots
import onnxruntime, safetensors.torch, sklearn.datasets, timm, torch.distributed
from dcptool.cli import app
for name in app.COMMANDS:
    app.group.get_command(None, name)
"""


@dataclass
class Ended:
    """How a command ended: like `subprocess`, a negative code is a signal."""

    code: int
    out: str
    err: str
    seconds: float
    peak_bytes: int


@dataclass
class Forked:
    """A command that runs."""

    server: Server
    pid: int
    folder: Path
    began: float = field(default_factory=time.monotonic)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to it alone."""
        os.kill(self.pid, number)

    def runs(self) -> bool:
        """Whether it has not ended yet; an ended one stays known until `wait`."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    def err(self) -> str:
        """What it said so far."""
        return self._said("err")

    def _said(self, stream: str) -> str:
        path = self.folder / f"{self.pid}.{stream}"
        # One that is killed in its first moment has not opened its streams yet.
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, timeout: float = 120) -> Ended:
        """Wait for its end; one that takes longer is killed, and that is a failure."""
        answer = self.server.ask({"wait": self.pid, "timeout": timeout})
        seconds = time.monotonic() - self.began
        if answer["late"]:
            raise AssertionError(f"still there after {timeout} s: {self.err()[-2000:]}")
        return Ended(
            answer["code"], self._said("out"), self.err(), seconds, answer["peak_kib"] << 10
        )


class Server:
    """The process that forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.ask({})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise AssertionError(f"the server has ended: {self.process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def start(self, *argv: str, cwd: Path, code: str = "", **env: str) -> Forked:
        """Start `dcptool ARGV` in `cwd`; without arguments `code` alone is run."""
        request = {"argv": argv, "cwd": str(cwd), "code": code, "env": env}
        answer = self.ask({**request, "folder": str(self.folder)})
        return Forked(self, answer["pid"], self.folder)

    def run(self, *argv: str, cwd: Path, code: str = "", timeout: float = 120, **env: str) -> Ended:
        """Start a command and wait for its end."""
        return self.start(*argv, cwd=cwd, code=code, **env).wait(timeout)

    def close(self) -> None:
        """End the server; what it started has been waited for."""
        with self.process:
            pass


@functools.cache
def shared() -> Server:
    """The one server of this process, which ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="dcptool-forked-"))
    server = Server(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.close)
    return server


def command(
    *argv: str, cwd: Path, timeout: float = 600, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `dcptool ARGV` to its end, told as `subprocess.run` tells it."""
    ended = shared().run(*argv, cwd=cwd, timeout=timeout, **(env or {}))
    return subprocess.CompletedProcess(argv, ended.code, ended.out, ended.err)


def serve() -> None:
    """Answer requests, one a line, until there are no more."""
    exec(WARM)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "argv" in request:
            answer = {"pid": _fork(request)}
        elif "wait" in request:
            answer = _wait(request["wait"], request["timeout"])
        else:
            answer = {"ready": True}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _wait(pid: int, timeout: float) -> dict[str, Any]:
    until = time.monotonic() + timeout
    late = False
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return {"code": code, "late": late, "peak_kib": usage.ru_maxrss}
        if time.monotonic() > until and not late:
            late = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        for number, name in ((1, "out"), (2, "err")):
            path = f"{request['folder']}/{os.getpid()}.{name}"
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
            os.dup2(handle, number)
            os.close(handle)
        handle = os.open(os.devnull, os.O_RDONLY)
        os.dup2(handle, 0)
        os.close(handle)
        sys.argv = ["dcptool", *request["argv"]]
        scope: dict[str, Any] = {"__name__": "__forked__"}
        exec(compile(request["code"], "fault", "exec"), scope)
        if request["argv"]:
            from dcptool.cli import app

            app.main(list(request["argv"]))
        code = 0
    except SystemExit as err:
        code = err.code if isinstance(err.code, int) else 0 if err.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
