"""How many channels stay: rates to counts.

Counts are exact: a rate is a decimal text, never a binary float. Which channels stay is the
method's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from dcptool.errors import UsageError
from dcptool.network.graph import Group


def parse_rate(text: str) -> Fraction:
    """The share to remove, exactly as written; 0 <= rate < 1."""
    try:
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError) as err:
        raise UsageError(f"{text!r} is no rate", why="a rate is a number such as 0.3") from err
    if not 0 <= rate < 1:
        raise UsageError(
            f"the rate {text} is out of range",
            why="a rate is the share of channels to remove: 0 <= rate < 1",
            try_="--rate 0.3 removes three channels in ten",
        )
    return rate


def kept_count(units: int, rate: Fraction) -> int:
    """How many of `units` stay: units - floor(rate * units), at least one."""
    return max(1, units - math.floor(rate * units))


def first_units(groups: Iterable[Group], rate: Fraction) -> dict[str, range]:
    """A plan that keeps the first units of each group: what a rate costs, before any choice."""
    return {group.name: range(kept_count(len(group.units), rate)) for group in groups}
