"""Width multiplier: a slim network from scratch, no weight of the dense one taken.

Which channels stay means nothing here; the first ones do. `wm+` differs in its training alone,
which has the extra losses on (`finetune --losses`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcptool.network import models
from dcptool.network.base import Network
from dcptool.network.surgery import cut
from dcptool.selection.gram import Ranking
from dcptool.selection.methods.question import Question


@dataclass(frozen=True)
class Width:
    """The first units of every group."""

    refits: bool = False
    needs_data: bool = False

    def order(self, question: Question) -> Ranking:
        """As they stand."""
        return Ranking(tuple(range(question.units)), ())


def afresh(network: Network, seed: int) -> None:
    """Give a cut network fresh weights, drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = models.build(network.base)
    cut(module, network.cuts)
    network.module.load_state_dict(module.state_dict())
    network.weights = f"random, seed {seed}"
