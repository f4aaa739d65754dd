"""Loss, accuracy and speed since the last log line, kept on the device until asked for."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


class Meter:
    """Sums that cost no wait for the device while they grow."""

    def __init__(self, device: str) -> None:
        self.loss_sum = torch.zeros((), device=device)
        self.right = torch.zeros((), device=device)
        self.seen = 0
        self.steps = 0
        self.started = time.monotonic()

    def count(self, scores: Tensor, labels: Tensor) -> None:
        """Count right answers."""
        self.right += (scores.detach().argmax(1) == labels).sum()
        self.seen += len(labels)

    def add(self, loss: Tensor) -> None:
        """Add the loss of one step."""
        self.loss_sum += loss
        self.steps += 1

    def loss(self) -> float:
        """The mean loss."""
        return float(self.loss_sum) / self.steps

    def top1(self) -> float | None:
        """The share of right answers in percent, where there were any to count."""
        return 100 * float(self.right) / self.seen if self.seen else None

    def steps_per_second(self) -> float:
        """Speed, with everything between the steps."""
        return self.steps / max(time.monotonic() - self.started, 1e-9)

    def clear(self) -> None:
        """Start again from zero."""
        self.loss_sum.zero_()
        self.right.zero_()
        self.seen = self.steps = 0
        self.started = time.monotonic()

    def state(self) -> list[Any]:
        """What a checkpoint keeps."""
        return [self.loss_sum, self.right, self.seen, self.steps]

    def restore(self, state: list[Any]) -> None:
        """Go on from a checkpoint."""
        self.loss_sum.copy_(state[0])
        self.right.copy_(state[1])
        self.seen, self.steps = state[2], state[3]
