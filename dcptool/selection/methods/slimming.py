"""Network slimming: the smallest scales of batch norms go, by one threshold for the whole network.

The scales mean something after a training that pulled them towards zero (`finetune --sparsity`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from dcptool.errors import UsageError
from dcptool.network.graph import ChannelGraph, Group
from dcptool.selection.gram import Ranking
from dcptool.selection.methods.question import Question, by_value


@dataclass(frozen=True)
class Slimming:
    """Absolute scale of the norm behind each channel, largest kept; nothing is refitted."""

    refits: bool = False
    needs_data: bool = False

    def order(self, question: Question) -> Ranking:
        """Largest scales first."""
        if question.scales is None:
            raise UsageError(
                f"slimming cannot rank {question.group.name}",
                why="no batch norm follows it, so that there is no scale to look at",
                try_="--method l1, or leave the group whole: --keep " + question.group.name,
            )
        return by_value(question.scales)


def norm_scales(root: nn.Module, graph: ChannelGraph, group: Group) -> Tensor | None:
    """Sum of absolute norm scales of each unit; None where no norm has some."""
    index = {unit: i for i, unit in enumerate(group.units)}
    sums = torch.zeros(len(group.units), dtype=torch.float64)
    found = False
    for site in graph.sites.values():
        if site.kind != "norm" or site.name not in group.carriers:
            continue
        norm: Any = root.get_submodule(site.name)
        scales = getattr(norm, "weight", None)
        if scales is None:
            continue
        found = True
        for unit, scale in zip(site.outputs.tolist(), scales.detach().abs().tolist(), strict=True):
            if unit in index:
                sums[index[unit]] += scale
    return sums if found else None


def global_counts(scales: Mapping[str, Tensor], rate: Fraction) -> dict[str, int]:
    """Units of each group above the threshold that removes `rate` of all; at least one stays."""
    everything = sorted(
        (float(scale), number, unit)
        for number, values in enumerate(scales.values())
        for unit, scale in enumerate(values)
    )
    gone = everything[: math.floor(rate * len(everything))]
    lost = [0] * len(scales)
    for _, number, _ in gone:
        lost[number] += 1
    return {
        name: max(1, len(values) - lost[number])
        for number, (name, values) in enumerate(scales.items())
    }
