"""What a method is asked, and the form of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dcptool.network.graph import Group
from dcptool.network.module_cuts import TRANSPOSED
from dcptool.selection.gram import Moments, Ranking


@dataclass(frozen=True)
class Question:
    """All that is known of a group when its channels are chosen.

    `moments` belong to its readers, one each, with errors weighed as they count; `weights` are
    the readers' present ones (columns x outputs). `filters` holds the absolute weight sum and
    `zeros` the share of zero activations of each unit (None where the activation has no zeros).
    `scales` are those of the norms behind each unit, where a method asks for them.
    `count` is how many will stay, where that is known: no need to rank further.
    """

    group: Group
    moments: Sequence[Moments]
    weights: Sequence[Tensor]
    filters: Tensor
    zeros: Tensor | None
    seed: int = 0
    score: str = "rise"
    count: int | None = None
    scales: Tensor | None = None

    @property
    def units(self) -> int:
        """Number of units to order."""
        return len(self.group.units)


class Method(Protocol):
    """Orders the units of a group; `refits` says whether its readers are solved anew."""

    @property
    def refits(self) -> bool:
        """Whether readers are solved anew."""
        ...

    @property
    def needs_data(self) -> bool:
        """Whether samples are needed to order."""
        ...

    def order(self, question: Question) -> Ranking:
        """Units from first kept to last."""
        ...


def by_value(values: Tensor) -> Ranking:
    """Largest first; ties go to the lowest index."""
    order = torch.argsort(values, descending=True, stable=True)
    return Ranking(tuple(order.tolist()), ())


def filter_sums(root: nn.Module, group: Group, outputs: Mapping[str, Sequence[int]]) -> Tensor:
    """Sum of absolute weights with which the producers make each unit."""
    index = {unit: i for i, unit in enumerate(group.units)}
    sums = torch.zeros(len(group.units), dtype=torch.float64)
    for name in group.producers:
        producer: Any = root.get_submodule(name)
        weight = producer.weight.detach()
        if isinstance(producer, TRANSPOSED):  # inputs first, and outputs of each group apart
            parts = weight.view(producer.groups, -1, *weight.shape[1:])
            weight = parts.transpose(1, 2).reshape(producer.out_channels, -1)
        each = weight.flatten(1).abs().sum(1).double()
        for channel, unit in enumerate(outputs[name]):
            if unit in index:
                sums[index[unit]] += each[channel]
    return sums
