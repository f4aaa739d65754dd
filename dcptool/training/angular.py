"""Angular softmax (SphereFace): classes are directions, and the right one must win by a margin.

The score of the right class falls from |x| cos(a) to |x| psi(a), psi(a) = (-1)^k cos(m a) - 2k for
a in [k pi/m, (k+1) pi/m]. Training starts from the plain score and approaches the margin: both are
blended by a weight that falls with the step. Weights of classes are kept at length one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dcptool.errors import UsageError
from dcptool.training.losses import Outcome

MARGIN = 4
NAMES = ("cross-entropy", "angular")


@dataclass(frozen=True)
class Annealing:
    """The weight of the plain score against the margin's: large at first, never below `least`."""

    base: float = 1000.0
    gamma: float = 0.12
    power: float = 1.0
    least: float = 5.0

    def at(self, step: int) -> float:
        """The weight at an update."""
        return max(self.least, self.base / math.pow(1 + self.gamma * step, self.power))


ANNEALING = Annealing()


def margin_cosine(cosine: Tensor, margin: int = MARGIN) -> Tensor:
    """psi of the angle whose cosine is given: falls monotonically from 1 to 1 - 2 * margin."""
    angle = torch.acos(cosine.clamp(-1, 1))
    sector = torch.floor(margin * angle / math.pi).clamp(max=margin - 1).detach()
    sign = 1 - 2 * torch.remainder(sector, 2)
    return sign * _multiple(cosine, margin) - 2 * sector


def _multiple(cosine: Tensor, margin: int) -> Tensor:
    """cos(margin * angle) as a polynomial, whose slope is finite at every angle."""
    before, now = torch.ones_like(cosine), cosine
    for _ in range(margin - 1):
        before, now = now, 2 * cosine * now - before
    return now


def angular_logits(
    features: Tensor, weight: Tensor, targets: Tensor, blend: float, margin: int = MARGIN
) -> Tensor:
    """Class scores with the margin on the right class; `blend` is the plain score's weight."""
    features = features.float()
    length = features.norm(dim=1, keepdim=True)
    cosine = functional.linear(
        functional.normalize(features), functional.normalize(weight.float())
    ).clamp(-1, 1)
    right = cosine.gather(1, targets[:, None])
    wanted = (blend * right + margin_cosine(right, margin)) / (1 + blend)
    logits: Tensor = length * cosine.scatter(1, targets[:, None], wanted)
    return logits


def classifier_of(model: nn.Module) -> nn.Linear:
    """The last linear layer of a network, or of the one inside a wrapper with heads."""
    network = getattr(model, "network", model)
    layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UsageError("--loss angular needs a linear classifier, and there is none")
    return layers[-1]


@contextmanager
def seen_by(layer: nn.Module) -> Iterator[list[Tensor]]:
    """What a layer reads while the block runs."""
    found: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _module, inputs: found.append(inputs[0]))
    try:
        yield found
    finally:
        hook.remove()


def settle(layer: nn.Linear) -> None:
    """Classes of length one and without bias: then its plain scores are |x| cos(angle)."""
    with torch.no_grad():
        layer.weight.div_(layer.weight.norm(dim=1, keepdim=True).clamp_min(1e-12))
        if layer.bias is not None:
            layer.bias.zero_()


def check_targets(targets: Tensor) -> None:
    """Refuse mixed labels, which have no right class."""
    if targets.is_floating_point():
        raise UsageError("--loss angular needs one label for each image: no --mixup, no --cutmix")


class AngularSoftmax:
    """The loss of a network's own classifier, for `fit`, which tells it the step."""

    def __init__(self, annealing: Annealing = ANNEALING, margin: int = MARGIN) -> None:
        self.annealing, self.margin, self.step = annealing, margin, 0

    def at_step(self, step: int) -> None:
        """Where the training stands."""
        self.step = step

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
        """Loss and plain scores of a batch."""
        check_targets(targets)
        layer = classifier_of(model)
        settle(layer)
        with seen_by(layer) as found:
            scores = model(images)
        blend = self.annealing.at(self.step)
        logits = angular_logits(found[-1], layer.weight, targets, blend, self.margin)
        return Outcome(functional.cross_entropy(logits, targets), scores)
