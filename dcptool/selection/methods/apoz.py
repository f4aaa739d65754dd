"""Average percentage of zeros: channels that are seldom zero after their ReLU stay."""

from __future__ import annotations

from dataclasses import dataclass

from dcptool.errors import UsageError
from dcptool.selection.gram import Ranking
from dcptool.selection.methods.question import Question, by_value


@dataclass(frozen=True)
class Apoz:
    """Share of zeros over the samples, lowest kept; needs an activation that gives zeros."""

    refits: bool = False
    needs_data: bool = True

    def order(self, question: Question) -> Ranking:
        """Fewest zeros first."""
        if question.zeros is None:
            raise UsageError(
                f"apoz cannot rank {question.group.name}",
                why="its activation gives no zeros, so that there is nothing to count",
                try_="--method l1, or leave the group whole: --keep " + question.group.name,
            )
        return by_value(-question.zeros)
