"""Commands over several processes: started here through torchrun, or joined under it.

torchrun answers 1 whatever its children answer, so every rank writes down how it ended, and
the command that started them gives that back as its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dcptool import console, files
from dcptool.errors import DcptoolError, EnvironmentFault, InputError, Interrupted

if TYPE_CHECKING:
    from dcptool.training.dist import Dist

STATUS_FOLDER = "DCPTOOL_STATUS_DIR"


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

    rank = int(os.environ.get("RANK", "0"))
    if is_launched() and rank:
        console.configure(quiet=True)
    code, reason, fault = 0, "done", None
    try:
        yield processes.start(device)
    except DcptoolError as err:
        code, reason, fault = err.code, err.message, err
        raise
    except BaseException as err:
        code, reason = 1, f"{type(err).__name__}: {err}"
        raise
    finally:
        if is_launched():
            told = os.environ.get(STATUS_FOLDER)
            for place in [*_folders, *([Path(told)] if told else [])]:
                write_status(place, rank, code, reason, fault)
            _folders.clear()


def write_status(
    folder: Path, rank: int, code: int, reason: str, fault: DcptoolError | None = None
) -> None:
    """Record how one rank ended."""
    if folder.is_dir():
        document: dict[str, object] = {"rank": rank, "code": code, "reason": reason}
        if fault is not None:
            document |= {"why": fault.why, "try": fault.try_}
        files.publish_json(folder / f"status.{rank}.json", document)


def through_torchrun(processes: int) -> int:
    """Run this very command in `processes` processes and return its own exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    arguments = _without_option(sys.argv[1:], "--nproc-per-node")
    with tempfile.TemporaryDirectory(prefix="dcptool-") as status:
        os.environ[STATUS_FOLDER] = status
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="spawn",
        )
        stopped = 0
        import logging

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        try:
            elastic_launch(config, sys.executable)("-m", "dcptool", *arguments)
        except SignalException as err:
            stopped = int(err.sigval)
        except ChildFailedError as err:
            console.detail(str(err).splitlines()[0])
        return _answer(Path(status), processes, stopped)


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


def _answer(folder: Path, processes: int, stopped: int) -> int:
    """The code of the whole: that of the rank which knows best why it ended."""
    found: dict[int, dict[str, object]] = {}
    for rank in range(processes):
        path = folder / f"status.{rank}.json"
        if path.exists():
            try:
                found[rank] = json.loads(path.read_text())
            except ValueError as err:
                raise InputError(f"cannot read {path}", why=str(err)) from err
    codes = {rank: int(str(status["code"])) for rank, status in found.items()}
    if stopped and not any(codes.values()) and len(codes) == processes:
        return 0
    missing = [rank for rank in range(processes) if rank not in codes]
    if stopped or any(code >= 128 for code in codes.values()):
        code = max([c for c in codes.values() if c >= 128], default=128 + stopped)
        if missing and not any(c >= 128 for c in codes.values()):
            raise Interrupted(stopped or signal.SIGTERM)
        return code
    if missing:
        raise EnvironmentFault(
            f"process {missing[0]} of {processes} died",
            why="it left no word: killed, or out of memory",
            try_="the same command with a smaller --batch-size, or fewer processes",
        )
    # A rank that lost its peers says 5; the one that had the reason says something else.
    order = sorted(codes, key=lambda rank: (codes[rank] in (0, 5), codes[rank] == 0, rank))
    return codes[order[0]]
