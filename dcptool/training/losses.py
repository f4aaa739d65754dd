"""What is minimised. A loss runs the forward pass it needs and returns loss and scores.

`fit` makes one update for each loss in its list, so a stage with two losses has two forwards,
the second one at the weights after the first update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dcptool.errors import UsageError


class Outcome(NamedTuple):
    """A scalar loss, and class scores where there are some, for the running accuracy."""

    loss: Tensor
    scores: Tensor | None = None


Loss = Callable[[nn.Module, Tensor, Tensor], Outcome]


def tell_step(loss: Loss, step: int) -> None:
    """Tell a loss that changes with time where the training stands."""
    at_step = getattr(loss, "at_step", None)
    if at_step is not None:
        at_step(step)


def with_sparsity(loss: Loss, strength: float) -> Loss:
    """A loss and an L1 pull on the scales of batch norms, as network slimming trains."""

    def sparse(model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
        outcome = loss(model, images, targets)
        scales = [
            module.weight.abs().sum()
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.weight is not None
        ]
        if not scales:
            raise UsageError("--sparsity needs batch norms, and there are none")
        return Outcome(outcome.loss + strength * torch.stack(scales).sum(), outcome.scores)

    sparse.at_step = lambda step: tell_step(loss, step)  # type: ignore[attr-defined]
    return sparse


def cross_entropy(smoothing: float = 0.0) -> Loss:
    """Against class numbers, or against the soft targets of mixup."""

    def loss(model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
        scores = model(images)
        return Outcome(functional.cross_entropy(scores, targets, label_smoothing=smoothing), scores)

    return loss


def distill(
    teacher: nn.Module,
    *,
    weight: float = 0.5,
    temperature: float = 2.0,
    smoothing: float = 0.0,
    labelled: bool = True,
) -> Loss:
    """Cross-entropy mixed with the divergence from the teacher's scores.

    `weight` is the teacher's share. Without labels the teacher is all there is.
    """
    if not 0 <= weight <= 1 or temperature <= 0:
        raise UsageError("--kd-weight lies between 0 and 1, --kd-temperature above 0")
    teacher.eval()
    share = weight if labelled else 1.0

    def loss(model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
        scores = model(images)
        with torch.no_grad():
            wanted = teacher(images)
        divergence = functional.kl_div(
            functional.log_softmax(scores.float() / temperature, dim=1),
            functional.log_softmax(wanted.float() / temperature, dim=1),
            reduction="batchmean",
            log_target=True,
        )
        total = share * temperature**2 * divergence
        if share < 1:
            plain = functional.cross_entropy(scores, targets, label_smoothing=smoothing)
            total = total + (1 - share) * plain
        return Outcome(total, scores)

    return loss
