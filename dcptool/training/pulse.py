"""Signs of life between the processes of one run.

A collective waits long for its peers, as one of them may rightly be busy with work of its own.
A peer that was stopped or whose machine is gone is told from a busy one by its pulse: a thread
beats into the store that all share, and watches the beats of the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dcptool.training.dist import Dist

BEAT_S = 1.0
# Counted in beats of the one who watches: after a pause of the whole machine nobody is behind.
# torchrun gives a stopped process 30 seconds more; all of it shall fit into a minute.
SILENT_BEATS = 15
LEFT = "left"


@contextmanager
def watched(dist: Dist, on_silence: Callable[[str], None]) -> Iterator[None]:
    """Beat and watch while the block runs; `on_silence` is called, from a thread, with why."""
    if dist.world == 1:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(dist, ended, on_silence), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(BEAT_S * SILENT_BEATS)


def _beat(dist: Dist, ended: threading.Event, on_silence: Callable[[str], None]) -> None:
    try:
        silent = _first_silent(dist, _connect(), ended)
    except (RuntimeError, torch.distributed.DistError):
        # The store ends with its owner, also when all is well and this process is a bit late.
        if ended.wait(BEAT_S * SILENT_BEATS):
            return
        silent = "the process that keeps them together"
    if silent is not None:
        on_silence(f"{silent} gave no sign of life for {BEAT_S * SILENT_BEATS:.0f} seconds")


def _connect() -> TCPStore:
    """Open a line to the store for this thread alone: a collective may hold the other one."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=BEAT_S * SILENT_BEATS),
    )


def _first_silent(dist: Dist, store: TCPStore, ended: threading.Event) -> str | None:
    """Beat until the block ends (None) or a peer has stood still for too long (its name)."""
    others = [rank for rank in range(dist.world) if rank != dist.rank]
    seen = dict.fromkeys(others, b"")
    behind = dict.fromkeys(others, 0)
    while not ended.wait(BEAT_S):
        store.set(_key(dist.rank), str(time.monotonic_ns()))
        for rank in others:
            now = store.get(_key(rank)) if store.check([_key(rank)]) else b""
            behind[rank] = behind[rank] + 1 if now == seen[rank] != LEFT.encode() else 0
            seen[rank] = now
            if behind[rank] >= SILENT_BEATS:
                return f"process {rank} of {dist.world}"
    store.set(_key(dist.rank), LEFT)
    return None


def _key(rank: int) -> str:
    return f"dcptool/pulse/{rank}"
