"""Random DCP: channels drawn at random, everything else as in DCP."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcptool.selection.gram import Ranking
from dcptool.selection.methods.question import Question


@dataclass(frozen=True)
class Randomly:
    """A seeded permutation; stages, heads and refit as in DCP."""

    refits: bool = True
    needs_data: bool = True

    def order(self, question: Question) -> Ranking:
        """Any order, the same for the same seed and group."""
        salt = sum(question.group.name.encode()) + 7919 * len(question.group.name)
        draw = torch.Generator().manual_seed(question.seed * 1_000_003 + salt)
        return Ranking(tuple(torch.randperm(question.units, generator=draw).tolist()), ())
