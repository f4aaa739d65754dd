"""Commands over several processes: started here through torchrun, or joined under it.

torchrun answers 1 whatever its children answer, so every rank writes down how it ended, and
the command that started them gives that back as its own.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcptool import child, console, files
from dcptool.cli import app, faults
from dcptool.errors import DcptoolError, EnvironmentFault, Interrupted

if TYPE_CHECKING:
    from dcptool.training.dist import Dist

PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """Whether torchrun, or something that speaks like it, started this process."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def resume_command(command: str, folder: Path) -> str:
    """What to type to go on with a run in as many processes as this program started for it."""
    words = ["dcptool", command, "--resume", str(folder)]
    if app.STATUS_FOLDER in os.environ:
        words += ["--nproc-per-node", os.environ["WORLD_SIZE"]]
    return shlex.join(words)


_folders: list[Path] = []


def record_in(folder: Path) -> None:
    """Let every rank also leave its status in the folder of the run."""
    _folders.append(folder)


@contextmanager
def together(device: str) -> Iterator[Dist]:
    """Join the other processes; on the way out write down how this one ended."""
    from dcptool.training import dist as processes
    from dcptool.training import pulse

    rank = int(os.environ.get("RANK", "0"))
    if is_launched():
        _end_with_parent()
    if is_launched() and rank:
        console.configure(quiet=True)
    try:
        dist = processes.start(device)
        with pulse.watched(dist, lambda why: _end_alone(rank, why)):
            yield dist
    except (Exception, KeyboardInterrupt) as err:
        if not is_launched():
            raise
        # The launcher ends the ranks when one of them has: that must not cut the last word off.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        fault = _fault_of(err)
        _write_status(rank, fault)
        if rank and app.STATUS_FOLDER not in os.environ and fault.code < 128:
            sys.stderr.write(f"rank {rank}: {fault.lines()}\n")
        if rank or app.STATUS_FOLDER in os.environ:
            # Said once, by rank 0 or by the command that started all of them.
            raise click.exceptions.Exit(fault.code) from err
        if fault is err:
            raise
        raise fault from err
    else:
        if is_launched():
            _write_status(rank, None)
    finally:
        _folders.clear()


def _fault_of(err: Exception | KeyboardInterrupt) -> DcptoolError:
    if isinstance(err, KeyboardInterrupt):
        return Interrupted(getattr(err, "number", signal.SIGINT))
    return err if isinstance(err, DcptoolError) else faults.of_anything(err)


def _end_alone(rank: int, why: str) -> None:
    """End this process from beside its main thread, which waits for one that does not answer."""
    fault = EnvironmentFault(
        "another process of this run is gone or hangs",
        why=why,
        try_="look at the messages of the other ranks, then run again with --resume",
    )
    _write_status(rank, fault)
    if app.STATUS_FOLDER not in os.environ:
        sys.stderr.write(f"rank {rank}: {fault.lines()}\n")
        sys.stderr.flush()
    os._exit(fault.code)


def _end_with_parent() -> None:
    """Let the system end this process with its launcher, which SIGKILL gives no time to do it."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_word(fault: DcptoolError, *, printed: bool) -> None:
    """Let the command that started this rank say what went wrong before or after the ranks met.

    `printed` tells it that the document, with the same fault in it, is on stdout already.
    """
    _write_status(int(os.environ.get("RANK", "0")), fault, printed=printed)


def _write_status(rank: int, fault: DcptoolError | None, *, printed: bool = False) -> None:
    """Record how one rank ended, for the command that started it and beside the run."""
    document: dict[str, object] = {"rank": rank, "code": 0, "reason": "done", "printed": printed}
    if fault is not None:
        document |= {"code": fault.code, "reason": fault.message}
        document |= {"why": fault.why, "try": fault.try_}
    told = os.environ.get(app.STATUS_FOLDER)
    for folder in [*_folders, *([Path(told)] if told else [])]:
        if folder.is_dir():
            files.publish_json(folder / f"status.{rank}.json", document)


def through_torchrun(processes: int) -> int:
    """Run this very command in `processes` processes and return its own exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    called = app.called()
    arguments = _without_option(called or sys.argv[1:], "--nproc-per-node")
    with tempfile.TemporaryDirectory(prefix="dcptool-") as status, _environment() as environ:
        environ[app.STATUS_FOLDER] = status
        document = Path(status) / "document.json"
        if called is not None:
            environ[app.DOCUMENT_FILE] = str(document)
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
        config = LaunchConfig(
            run_id="dcptool",
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="spawn",
        )
        stopped, failed = 0, None
        # Its warnings repeat, at length, what is said below in three lines.
        logging.disable(logging.CRITICAL)
        try:
            python, *words = child.command("dcptool.cli.app")
            elastic_launch(config, python)(*words, *arguments)
        except SignalException as err:
            stopped = int(err.sigval)
        except ChildFailedError as err:
            rank, failure = err.get_first_failure()
            failed = (rank, failure.exitcode)
            console.detail(str(err).splitlines()[0])
        finally:
            logging.disable(logging.NOTSET)
        if document.exists():
            app.hand_over(files.read_json(document, what="the document of a process"))
        return _answer(Path(status), processes, stopped, failed)


@contextmanager
def _environment() -> Iterator[os._Environ[str]]:
    """Let variables be set for children; all is as before after, as more commands may follow."""
    before = dict(os.environ)
    # torch's launcher leaves its own handlers behind.
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in watched}
    try:
        yield os.environ
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:
                    signal.signal(number, handler)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _without_option(arguments: list[str], name: str) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == name:
            skip = True
        elif not argument.startswith(f"{name}="):
            kept.append(argument)
    return kept


def _answer(
    folder: Path, processes: int, stopped: int, failed: tuple[int, int] | None = None
) -> int:
    """The code of the whole: that of the rank which knows best why it ended.

    `stopped` is the signal that this process got; `failed` the rank that the launcher saw fail
    first, with its exit code.
    """
    found: dict[int, dict[str, Any]] = {}
    for rank in range(processes):
        path = folder / f"status.{rank}.json"
        if path.exists():
            found[rank] = files.read_json(path, what="the status of a process")
    missing = [rank for rank in range(processes) if rank not in found]
    first, code = failed or (0, 0)
    if missing and stopped:
        raise Interrupted(stopped)
    if missing and not code:
        return 0  # there was nothing to do together
    if first in missing and code > 0:
        return code  # it could not leave its word, so it has spoken for itself
    if missing and found.get(first, {}).get("code", 0) in (0, EnvironmentFault.code):
        seen = [status["why"] for status in found.values() if status.get("why")]
        raise _died(first if first in missing else missing[0], processes, seen[:1])

    def ignorance(rank: int) -> tuple[bool, bool, bool, int]:
        # A rank that lost its peers says 5, or was ended by the launcher for that reason; the one
        # that had the reason says something else.
        code = found[rank]["code"]
        ended = code > 128 and not stopped
        return code == 0, ended, code == EnvironmentFault.code, rank

    status = found[min(found, key=ignorance)]
    if status["code"] == 0 and stopped:
        raise Interrupted(stopped)
    if status["code"] == 0 and code < 0:
        raise _died(first, processes)
    if status["code"] == 0:
        return code
    app.mark_printed(any(one["printed"] for one in found.values()))
    err = DcptoolError(status["reason"], why=status.get("why", ""), try_=status.get("try", ""))
    err.code = status["code"]
    raise err


def _died(rank: int, processes: int, seen: Sequence[str] = ()) -> EnvironmentFault:
    return EnvironmentFault(
        f"process {rank} of {processes} died or hangs",
        why="\n".join(["it left no word: killed, or out of memory", *seen]),
        try_="the same command with a smaller --batch-size, or fewer processes",
    )
