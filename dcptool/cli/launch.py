"""Commands over several processes: started here through torchrun, or joined under it.

torchrun answers 1 whatever its children answer, so every rank writes down how it ended, and
the command that started them gives that back as its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcptool import console, files
from dcptool.cli import app, faults
from dcptool.errors import DcptoolError, EnvironmentFault, Interrupted

if TYPE_CHECKING:
    from dcptool.training.dist import Dist

STATUS_FOLDER = "DCPTOOL_STATUS_DIR"
PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """Whether torchrun, or something that speaks like it, started this process."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


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
        if rank and STATUS_FOLDER not in os.environ and fault.code < 128:
            sys.stderr.write(f"rank {rank}: {fault.lines()}\n")
        if rank or STATUS_FOLDER in os.environ:
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
    if STATUS_FOLDER not in os.environ:
        sys.stderr.write(f"rank {rank}: {fault.lines()}\n")
        sys.stderr.flush()
    os._exit(fault.code)


def _end_with_parent() -> None:
    """Let the system end this process with its launcher, which SIGKILL gives no time to do it."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_status(rank: int, fault: DcptoolError | None) -> None:
    """Record how one rank ended, for the command that started it and beside the run."""
    document: dict[str, object] = {"rank": rank, "code": 0, "reason": "done"}
    if fault is not None:
        document |= {"code": fault.code, "reason": fault.message}
        document |= {"why": fault.why, "try": fault.try_}
    told = os.environ.get(STATUS_FOLDER)
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
        environ[STATUS_FOLDER] = status
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
        stopped, first = 0, 0
        # Its warnings repeat, at length, what is said below in three lines.
        logging.disable(logging.CRITICAL)
        try:
            elastic_launch(config, sys.executable)("-m", "dcptool", *arguments)
        except SignalException as err:
            stopped = int(err.sigval)
        except ChildFailedError as err:
            first = err.get_first_failure()[0]
            console.detail(str(err).splitlines()[0])
        finally:
            logging.disable(logging.NOTSET)
        if document.exists():
            app.hand_over(files.read_json(document, what="the document of a process"))
        return _answer(Path(status), processes, stopped, first)


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


def _answer(folder: Path, processes: int, stopped: int, first: int = 0) -> int:
    """The code of the whole: that of the rank which knows best why it ended.

    `stopped` is the signal that this process got; `first` the rank that the launcher saw end first.
    """
    found: dict[int, dict[str, Any]] = {}
    for rank in range(processes):
        path = folder / f"status.{rank}.json"
        if path.exists():
            found[rank] = files.read_json(path, what="the status of a process")
    missing = [rank for rank in range(processes) if rank not in found]
    if missing and stopped:
        raise Interrupted(stopped)
    if missing:
        seen = [status["why"] for status in found.values() if status.get("why")]
        raise EnvironmentFault(
            f"process {first if first in missing else missing[0]} of {processes} died or hangs",
            why="\n".join(["it left no word: killed, or out of memory", *seen[:1]]),
            try_="the same command with a smaller --batch-size, or fewer processes",
        )

    def ignorance(rank: int) -> tuple[bool, bool, bool, int]:
        # A rank that lost its peers says 5, or was ended by the launcher for that reason; the one
        # that had the reason says something else.
        code = found[rank]["code"]
        ended = code > 128 and not stopped
        return code == 0, ended, code == EnvironmentFault.code, rank

    status = found[min(found, key=ignorance)]
    if status["code"] == 0:
        return 0
    err = DcptoolError(status["reason"], why=status.get("why", ""), try_=status.get("try", ""))
    err.code = status["code"]
    raise err
