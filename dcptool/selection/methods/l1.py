"""Weight sum: filters with the largest absolute weights stay; nothing is refitted."""

from __future__ import annotations

from dataclasses import dataclass

from dcptool.selection.gram import Ranking
from dcptool.selection.methods.question import Question, by_value


@dataclass(frozen=True)
class L1:
    """Sum of absolute weights of the producer's filter, largest kept."""

    refits: bool = False
    needs_data: bool = False

    def order(self, question: Question) -> Ranking:
        """Largest filters first."""
        return by_value(question.filters)
