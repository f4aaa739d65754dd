"""Places for names in a chart: near their points, over no other point and no other name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LETTER_WIDTH, LETTER_HEIGHT, LINE_HEIGHT = 6.2, 12, 13
MARK = 6  # half the side of a point
FAR = 40  # nothing at this distance is taken for the owner of a name


@dataclass(frozen=True)
class Box:
    """Where something stands; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether they lie over each other."""
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)

    def holds(self, other: Box) -> bool:
        """Whether the other one is wholly inside."""
        is_between = self.left <= other.left and other.right <= self.right
        return is_between and self.top <= other.top and other.bottom <= self.bottom

    def gap(self, other: Box) -> float:
        """Distance between their edges."""
        across = max(self.left - other.right, other.left - self.right, 0.0)
        return math.hypot(across, max(self.top - other.bottom, other.top - self.bottom, 0.0))

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of this box that is nearest to another point."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)


def mark_at(x: float, y: float) -> Box:
    """What a point of a chart covers."""
    return Box(x - MARK, y - MARK, x + MARK, y + MARK)


def free_place(
    x: float, y: float, wide: float, marks: Sequence[Box], written: Sequence[Box], sheet: Box
) -> Box:
    """A place for the name of a point: near to it, and away from others that may seem meant."""
    places = []
    for line in (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5):
        top = y - LETTER_HEIGHT / 2 + line * LINE_HEIGHT
        for left in (x + 9, x - 9 - wide, x - wide / 2):
            places.append(Box(left, top, left + wide, top + LETTER_HEIGHT))
    inside = [box for box in places if sheet.holds(box)] or places
    free = [box for box in inside if not any(box.meets(other) for other in (*marks, *written))]
    own = mark_at(x, y)
    others = [mark for mark in marks if mark != own]

    def worth(box: Box) -> float:
        alone = min([FAR, *(box.gap(mark) for mark in others)])
        return alone - 2 * box.gap(own)

    return max(free or inside, key=worth)
