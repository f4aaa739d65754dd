"""DCP in closed form: the order in which channels lower the joint loss most."""

from __future__ import annotations

from dataclasses import dataclass

from dcptool.selection.gram import Ranking, backward_order, forward_order
from dcptool.selection.methods.question import Question


@dataclass(frozen=True)
class Dcp:
    """Greedy on reconstruction and discrimination together; the readers are solved anew."""

    refits: bool = True
    needs_data: bool = True

    def order(self, question: Question) -> Ranking:
        """Forward by gradient (the paper's rule) or drop, or backward by the rise of the loss."""
        if question.score == "rise":
            return backward_order(question.moments, question.units, count=question.count or 0)
        return forward_order(
            question.moments, question.units, score=question.score, count=question.count
        )
