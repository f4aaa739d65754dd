"""What is decided for a group, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dcptool.errors import InputError
from dcptool.network.graph import Group


@dataclass(frozen=True)
class Choice:
    """What was decided for one group; `losses` begin with `smallest` units kept."""

    group: str
    units: int
    kept: tuple[int, ...]
    losses: tuple[float, ...]
    why_stopped: str
    dead: int = 0
    order: tuple[int, ...] = ()
    norms: tuple[float, ...] = ()
    smallest: int = 0


Report = Callable[[Choice], None]
# Hears of the segment and the layer in it that come next; may raise to end the work.
Edge = Callable[[int, int], None]


def whole(group: Group) -> Choice:
    """The choice for a group of which nothing is to go: no order, nothing touched."""
    return Choice(group.name, len(group.units), tuple(range(len(group.units))), (), "count")


def unsolvable(group: Group) -> InputError:
    """The error for a group that no layer can be solved for."""
    return InputError(
        f"cannot choose channels of {group.name}",
        why="no layer that reads it can be solved for",
        try_=f"--keep {group.name}",
    )
