"""Discrimination-aware heads: BN, ReLU, global average pool, linear, on a pivot's output.

A head is attached by a hook for as long as a block runs, and gone afterwards. While only the
head's loss is wanted, the forward stops at the pivot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcptool.training.losses import Outcome


class Head(nn.Module):
    """Class scores from a feature map (or tokens, or a vector)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)
        self.linear = nn.Linear(channels, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Scores (images x classes)."""
        flat = features.flatten(2) if features.dim() > 2 else features.unsqueeze(-1)
        pooled = F.relu(self.norm(flat)).mean(-1)
        scores: Tensor = self.linear(pooled)
        return scores


class _Reached(Exception):
    """The forward pass has come to the pivot."""


class WithHead(nn.Module):
    """A network and a head on one of its modules; `fit` trains both."""

    def __init__(self, network: nn.Module, pivot: str, head: Head) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self._pivot = pivot
        self._seen: Tensor | None = None
        self._stop = False

    def forward(self, images: Tensor) -> Tensor:
        """The network's own scores."""
        scores: Tensor = self.network(images)
        return scores

    def head_scores(self, images: Tensor) -> Tensor:
        """The head's scores; the network runs no further than the pivot."""
        self._stop = True
        try:
            self.network(images)
        except _Reached:
            pass
        finally:
            self._stop = False
        assert self._seen is not None
        seen, self._seen = self._seen, None
        scores: Tensor = self.head(seen)
        return scores

    @contextmanager
    def attached(self) -> Iterator[WithHead]:
        """Hook the pivot while the block runs."""

        def see(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if self._stop:
                self._seen = output
                raise _Reached

        hook = self.network.get_submodule(self._pivot).register_forward_hook(see)
        try:
            yield self
        finally:
            hook.remove()


def head_loss(model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
    """Cross-entropy of the head, for `fit`."""
    assert isinstance(model, WithHead)
    scores = model.head_scores(images)
    return Outcome(F.cross_entropy(scores, targets), scores)


def new_head(channels: int, classes: int, seed: int) -> Head:
    """A head with seeded weights, without moving the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Head(channels, classes)
