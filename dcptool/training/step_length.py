"""How long a step a trained network bears: measured, as networks differ by orders of magnitude.

A step along the gradient of some batches, or what the optimizer makes of it, is judged on the same
batches: it is their curvature that is asked for, and that no step of a training may be longer than
it allows. Momentum makes more of each step, so half of the best one is the rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dcptool.training.dist import Dist
from dcptool.training.loader import Batches
from dcptool.training.losses import Loss
from dcptool.training.norms import one_value_explained
from dcptool.training.randomness import kept_random_state, seed_all
from dcptool.training.run import Run
from dcptool.training.schedule import Schedule

MOST_BATCHES = 4
UPDATES_A_BATCH = 10
SHARE = 0.5
# Half a decade from one length to the next, six decades down.
LENGTHS = 13
RATIO = 10**-0.5
# Optimizers whose first step is along the gradient, and a rate to see that of others.
PLAIN = ("sgd", "nesterov", "momentum", "sgdp")
PROBE = 1e-3


def measured(
    model: nn.Module, batches: Batches, loss: Loss, schedule: Schedule, run: Run, dist: Dist
) -> Schedule:
    """The schedule with a learning rate that the network bears, at most the one it has."""
    found = schedule.lr
    if dist.is_writer:
        found = min(schedule.lr, SHARE * best_length(model, batches, loss, schedule, run))
    return dataclasses.replace(schedule, lr=float(dist.broadcast(found) or schedule.lr))


def best_length(
    model: nn.Module, batches: Batches, loss: Loss, schedule: Schedule, run: Run
) -> float:
    """The length of a step down the gradient of some batches that helps most on them.

    Twice the learning rate of the schedule is the longest that is tried. The network is left as it
    was.
    """
    count = min(MOST_BATCHES, max(1, schedule.steps // UPDATES_A_BATCH))
    longest = schedule.lr / SHARE
    if not schedule.steps:
        return longest
    model.to(run.device)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train(run.norms == "train")
    with kept_random_state(), one_value_explained():
        taken = list(itertools.islice(batches.epoch(0, 0), count))
        direction = _way(model, parameters, _gradient(model, parameters, taken, loss, run), run)
        start = [p.detach().clone() for p in parameters]
        best, lowest = longest, math.inf
        length = longest
        for _ in range(LENGTHS):
            with torch.no_grad():
                for parameter, value, way in zip(parameters, start, direction, strict=True):
                    parameter.copy_(value - length * way)
            error = _error(model, taken, loss, run)
            # From the longest down the error falls, then rises towards that of no step at all.
            if math.isfinite(lowest) and error >= lowest:
                break
            if error < lowest:
                best, lowest = length, error
            length *= RATIO
    model.load_state_dict(before)
    return best


def _way(
    model: nn.Module, parameters: Sequence[Tensor], gradient: list[Tensor], run: Run
) -> list[Tensor]:
    """Where the optimizer goes first, as long as it is at a learning rate of 1.

    For SGD that is the gradient; what scales each weight's step by itself goes elsewhere.
    """
    if run.optimizer.name.lower() in PLAIN:
        return gradient
    optimizer = run.optimizer.make(model, PROBE)
    start = [p.detach().clone() for p in parameters]
    for parameter, slope in zip(parameters, gradient, strict=True):
        parameter.grad = slope
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        way = [(old - p) / PROBE for old, p in zip(start, parameters, strict=True)]
        for parameter, old in zip(parameters, start, strict=True):
            parameter.copy_(old)
    return way


def _gradient(
    model: nn.Module,
    parameters: Sequence[Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Loss,
    run: Run,
) -> list[Tensor]:
    total = [torch.zeros_like(p) for p in parameters]
    for number, (images, labels) in enumerate(batches):
        seed_all(run.seed, number, 0)
        found = torch.autograd.grad(loss(model, images, labels).loss, parameters, allow_unused=True)
        for part, gradient in zip(total, found, strict=True):
            if gradient is not None:
                part += gradient / len(batches)
    return total


@torch.no_grad()
def _error(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], loss: Loss, run: Run
) -> float:
    total = 0.0
    for number, (images, labels) in enumerate(batches):
        seed_all(run.seed, number, 0)
        total += float(loss(model, images, labels).loss)
    return total if math.isfinite(total) else math.inf
