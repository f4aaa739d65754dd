"""Channel pruning by LASSO: a coefficient for each channel, ordered by the penalty's path."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcptool.selection.gram import Ranking
from dcptool.selection.methods.question import Question
from dcptool.selection.methods.thinet import contributions


@dataclass(frozen=True)
class ChannelPruning:
    """The channel that the rising penalty lets go last comes first; least squares afterwards."""

    refits: bool = True
    needs_data: bool = True

    def order(self, question: Question) -> Ranking:
        """Order of the LASSO path over the channels' contributions."""
        from sklearn.linear_model import lars_path_gram

        gram = torch.zeros(question.units, question.units, dtype=torch.float64)
        aim = torch.zeros(question.units, dtype=torch.float64)
        for moments, weights in zip(question.moments, question.weights, strict=True):
            products, towards = contributions(moments, weights, question.units)
            gram += products
            aim += towards
        # Penalties are relative to the scale of the problem; numbers near one keep LARS stable.
        size = float(gram.diagonal().mean().clamp_min(1e-300))
        jitter = 1e-8 * torch.eye(question.units, dtype=torch.float64)
        _, _, path = lars_path_gram(
            (aim / size).numpy(), (gram / size + jitter).numpy(), n_samples=1, method="lasso"
        )
        alive = torch.from_numpy(path != 0)
        # The first step of the path from which on a channel never leaves again.
        last_zero = [int(torch.nonzero(~row).max()) if bool((~row).any()) else -1 for row in alive]
        final = torch.from_numpy(path[:, -1]).abs()
        order = sorted(range(question.units), key=lambda j: (last_zero[j], -float(final[j]), j))
        return Ranking(tuple(order), ())
