"""What a person sees while a command works: notes, warnings, progress, tables.

Everything here goes to stderr, so that stdout carries the result alone. A live display
is drawn only when stderr is a terminal; elsewhere a plain line appears now and then.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

PLAIN_LINE_EVERY_S = 10.0

_settings = {"quiet": False, "verbose": False}


def configure(*, quiet: bool = False, verbose: bool = False) -> None:
    """Set how much is said; called once by the command line."""
    _settings.update(quiet=quiet, verbose=verbose)


def is_live() -> bool:
    """Whether a display that redraws itself makes sense."""
    dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return sys.stderr.isatty() and not dumb and not _settings["quiet"]


def note(text: str) -> None:
    """Say one line, unless quiet."""
    if not _settings["quiet"]:
        _write(text)


def detail(text: str) -> None:
    """Say one line when asked to be verbose."""
    if _settings["verbose"]:
        _write(text)


def warn(text: str) -> None:
    """Say one line that a user must not miss, quiet or not."""
    _write(f"warning: {text}")


def _write(text: str) -> None:
    # Work goes on when nobody listens any more.
    with suppress(OSError):
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()


_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """The text with control characters spelled out: a file name must not drive a terminal."""
    return text.translate(_CONTROL)


@dataclass
class Task:
    """One piece of work under way; `advance` and `say` may be called as often as wanted."""

    title: str
    total: float | None = None
    done: float = 0.0
    status: str = ""

    def advance(self, amount: float = 1.0, status: str | None = None) -> None:
        """Count work as done, and optionally tell what is being done now."""
        self.done += amount
        self.say(status if status is not None else self.status)

    def say(self, status: str) -> None:
        """Change the text behind the bar."""
        self.status = status


@dataclass
class _PlainTask(Task):
    def __post_init__(self) -> None:
        self._started = self._spoken = time.monotonic()

    def say(self, status: str) -> None:
        super().say(status)
        now = time.monotonic()
        if now - self._spoken >= PLAIN_LINE_EVERY_S:
            self._spoken = now
            note(self.line(now - self._started))

    def line(self, elapsed: float) -> str:
        """The progress as one line of text."""
        share = ""
        if self.total:
            share = f" {100 * self.done / self.total:3.0f} %"
            if self.done:
                left = elapsed / self.done * (self.total - self.done)
                share += f", {clock(left)} left"
        return f"{self.title}:{share}{'  ' + self.status if self.status else ''}"


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Task]:
    """Show one task for as long as the block runs."""
    if not is_live():
        yield _PlainTask(title, total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%" if total else ""),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        handle = bar.add_task(title, total=total, status="")

        class _LiveTask(Task):
            def say(self, status: str) -> None:
                super().say(status)
                bar.update(handle, completed=self.done, status=printable(status))

        yield _LiveTask(title, total)


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str = "",
    width: int | None = None,
) -> str:
    """Text table; `align` has one of `<` or `>` for each column, left by default.

    The last column is cut to fit `width` where one is given.
    """
    columns = len(headers)
    align = (align + "<" * columns)[:columns]
    cells = [[_one_line(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(columns)]
    if width is not None:
        widths[-1] = max(
            len(headers[-1]), min(widths[-1], width - sum(widths[:-1]) - 2 * (columns - 1))
        )
    lines = []
    for row in cells:
        parts = [_fit(cell, w, a) for cell, w, a in zip(row, widths, align, strict=True)]
        lines.append("  ".join(parts).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def _one_line(cell: str) -> str:
    return printable(cell).replace("\n", "\\n").replace("\t", "\\t")


def _fit(cell: str, width: int, side: str) -> str:
    if len(cell) > width:
        cell = cell[: max(width - 1, 1)] + "…"
    return f"{cell:{side}{width}}"


def clock(seconds: float) -> str:
    """A duration as people say it: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def quantity(number: float) -> str:
    """A large count with three or four digits: 25.56 M, 4.089 G."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"
