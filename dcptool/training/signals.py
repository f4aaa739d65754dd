"""Signals that ask a run to end: the first sets a flag, a second one ends at once.

The loop looks at the flag at the edge of a step, where its state can be saved. torchrun passes
signals on, so under it a repetition within seconds is the same request.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dcptool.errors import Interrupted

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_REQUEST_S = 5.0


class Stopped(KeyboardInterrupt):
    """A signal where no state is under way; no `except Exception` in foreign code may take it."""


class Flag:
    """Which signal came, 0 for none."""

    def __init__(self) -> None:
        self.number = 0
        self._came_at = 0.0

    def set(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        if self.number and not (launched and now - self._came_at < SAME_REQUEST_S):
            raise Interrupted(
                number,
                message="stopped at once by a second signal; the state saved before it stays",
            )
        if not self.number:
            self.number, self._came_at = number, now


@contextmanager
def watch() -> Iterator[Flag]:
    """Catch signals for as long as the block runs; outside the main thread this does nothing."""
    flag = Flag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    # A signal that is ignored, as under nohup, stays so.
    watched = [number for number in WATCHED if signal.getsignal(number) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, flag.set) for number in watched}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending(try_: str = "") -> Iterator[None]:
    """Outside the loop, where there is nothing to save: a signal ends the command in order."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watched = [number for number in WATCHED if signal.getsignal(number) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, end) for number in watched}
    try:
        yield
    except Stopped as err:
        raise Interrupted(err.args[0], try_=try_) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
