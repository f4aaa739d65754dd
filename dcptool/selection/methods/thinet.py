"""ThiNet: drop, one by one, the channels whose summed contributions to the next layer are least."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcptool.selection.gram import Moments, Ranking
from dcptool.selection.methods.question import Question


@dataclass(frozen=True)
class ThiNet:
    """Greedy removal by the energy of the removed channels' sum; least squares afterwards."""

    refits: bool = True
    needs_data: bool = True

    def order(self, question: Question) -> Ranking:
        """The channel that was dropped last comes first."""
        gram = torch.zeros(question.units, question.units, dtype=torch.float64)
        for moments, weights in zip(question.moments, question.weights, strict=True):
            gram += contributions(moments, weights, question.units)[0]
        return drop_least(gram)


def contributions(moments: Moments, weights: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """Inner products of the channels' contributions, with each other and with the target."""
    products = moments.s * (weights @ weights.T)
    member = torch.zeros(len(moments.unit), units, dtype=torch.float64)
    free = moments.unit >= 0
    member[torch.nonzero(free).flatten(), moments.unit[free]] = 1.0
    aim = (moments.c * weights).sum(1) @ member
    return member.T @ products @ member, aim


def drop_least(gram: Tensor) -> Ranking:
    """Greedy removal under a quadratic energy; ties go to the lowest index."""
    units = len(gram)
    energy = torch.zeros((), dtype=torch.float64)
    cross = torch.zeros(units, dtype=torch.float64)
    gone = torch.zeros(units, dtype=torch.bool)
    dropped: list[int] = []
    losses = [0.0]
    for _ in range(units):
        trial = energy + gram.diagonal() + 2 * cross
        trial[gone] = torch.inf
        unit = int(trial.argmin())
        energy = trial[unit]
        cross = cross + gram[unit]
        gone[unit] = True
        dropped.append(unit)
        losses.append(float(energy))
    return Ranking(tuple(dropped[::-1]), tuple(losses[::-1]))
