"""stdin, stdout and stderr in whatever state the caller left them: open, closed, full, ASCII.

A descriptor that is closed would be given to the next file that is opened, and what a library
prints would end up inside it; so all three are made to exist before anything else happens.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


def mend() -> None:
    """Give closed streams a place, and let no character be unprintable."""
    # Writing to a descriptor that was opened for reading fails as on a closed one: the
    # command that prints its result notices, instead of succeeding into nothing.
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, mode)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_result(text: str) -> None:
    """Put `text` on stdout at once; raises OSError when nobody can read it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def close() -> None:
    """Flush what is left, so that the interpreter cannot fail at it with a code of its own."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                handle = os.open(os.devnull, os.O_WRONLY)
                os.dup2(handle, number)
                os.close(handle)
