"""Error classes, exit codes and the three-line message.

DcptoolError
  UsageError         2  wrong flag, value, recipe key or combination; all faults at once
  InputError         3  a model, weight file, artifact or data set cannot be used
  GateFailed         4  accuracy, parity, speed or the proof did not hold
  EnvironmentFault   5  provider, package, disk, memory, permission, network
  Interrupted        128 + signal; state was saved

Raised where the reason is known, caught only in `cli/app.py`.
"""

from __future__ import annotations

import signal


class DcptoolError(Exception):
    """What happened, why, and what to type next."""

    code = 1

    def __init__(self, message: str, *, why: str = "", try_: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.try_ = try_

    def lines(self) -> str:
        """The form that a person reads on stderr."""
        text = f"dcptool: {self.message}"
        if self.why:
            text += "\n  why: " + self.why.replace("\n", "\n       ")
        if self.try_:
            text += "\n  try: " + self.try_.replace("\n", "\n       ")
        return text

    def document(self) -> dict[str, object]:
        """The form that a script reads on stdout with --json."""
        return {"code": self.code, "message": self.message, "why": self.why, "try": self.try_}


class UsageError(DcptoolError):
    """The command line or recipe asks for something that makes no sense.

    `instead` is a word that was typed and the one that was meant: where the first stands on the
    command line, what to type next is that command line with the second.
    """

    code = 2

    def __init__(
        self, message: str, *, why: str = "", try_: str = "", instead: tuple[str, str] | None = None
    ) -> None:
        super().__init__(message, why=why, try_=try_)
        self.instead = instead


class InputError(DcptoolError):
    """A file, model or data set that was named cannot be used."""

    code = 3


class GateFailed(DcptoolError):
    """The work was done, but its result is outside the limits."""

    code = 4


class EnvironmentFault(DcptoolError):
    """The machine lacks something: provider, package, space, memory, right, network."""

    code = 5


class Interrupted(DcptoolError):
    """A signal ended the command after its state was saved."""

    def __init__(self, signum: int, *, message: str = "", try_: str = "") -> None:
        name = signal.Signals(signum).name
        super().__init__(message or f"stopped by {name}", try_=try_)
        self.code = 128 + signum
