"""Images that cannot be read: one limit for all splits of a data set on how many are left out."""

from __future__ import annotations

from dcptool.errors import InputError

SHOWN = 10


class Unreadable:
    """Why images could not be read, in a table for each source, and how many there may be."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._tables: list[dict[int, str]] = []

    def new_table(self) -> dict[int, str]:
        """Reasons by number, of the images of one more source."""
        self._tables.append({})
        return self._tables[-1]

    def judge(self) -> None:
        """Raise when more images are bad than may be skipped."""
        lines = [table[number] for table in self._tables for number in sorted(table)]
        if len(lines) <= self.limit:
            return
        shown = lines[:SHOWN]
        if len(lines) > SHOWN:
            shown.append(f"and {len(lines) - SHOWN} more")
        raise InputError(
            f"{len(lines)} image{'s' if len(lines) > 1 else ''} cannot be read",
            why="\n".join(shown),
            try_=f"repair or remove them, or skip up to N of them: --skip-bad {len(lines)}",
        )
