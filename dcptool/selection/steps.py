"""True steps on the joint loss, from where the closed form has ended.

The refit minimises the reconstruction alone: a metric on errors cancels out of least squares. Here
the head's loss moves the weights as well. Its gradient is taken through the network to the pivot on
one half of the images; the step is the one that least squares would take for targets moved against
it, tried at several lengths, and the length is kept whose joint loss is least on the other half.
Where none is below the present one, the weights stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dcptool.selection.chain import frozen
from dcptool.selection.gram import Moments, error, solver
from dcptool.selection.greedy import LossAt
from dcptool.selection.probe import Probe
from dcptool.selection.slopes import asked
from dcptool.selection.tail import Tail, build_tail

# Lengths that are tried, as shares of the step to the least of the joint loss if the head's were
# as flat as it looks from here; it is curved, so that the whole of it is too far.
LENGTHS = (0.3, 0.1, 0.03, 0.01)


@dataclass(frozen=True)
class Steps:
    """`count` steps for each layer; `losses` gives the head's of each batch at the pivot."""

    probe: Probe
    pivot: str | None
    losses: Sequence[LossAt]
    strength: float
    count: int

    def take(
        self, name: str, moments: Moments, kept: Tensor, ridge: float, weights: Tensor
    ) -> None:
        """Move the weights of a layer of the present segment that has just been solved for."""
        probe = self.probe
        end, last = probe.chain.end_of(self.pivot)
        tail = build_tail(probe.chain, [name], probe.place, max(last, probe.place))
        columns = kept.clone()
        columns[-1] = False
        solve = solver(moments, columns, ridge=ridge)
        scale = probe.output_weights(name)
        way = torch.where(scale > 0, len(scale) / scale.square().clamp_min(1e-30), 0.0)
        alone = math.isinf(self.strength)
        head, own = (1.0, 0.0) if alone else (self.strength, 1.0 / (2 * len(scale)))
        unseen = moments.other_half() if moments.half is not None else moments
        for _ in range(self.count):
            slope, before = self._slope(tail, end, name)
            step = solve(-head * slope) * way
            now = own * error(unseen, weights, scale)
            tried = {}
            for length in LENGTHS:
                moved = weights + length * step
                rise = own * error(unseen, moved, scale) - now
                tried[length] = rise + head * self._rise(tail, end, name, moved, before)
            best = min(tried, key=tried.__getitem__)
            if not tried[best] < 0:
                return
            weights = weights + best * step
            layer: Any = probe.current.get_submodule(name)
            layer.weight.data.copy_(_shaped(weights, layer.weight))
            probe.samples.dist.broadcast_tensors([layer.weight.data])
            probe.changed(name)

    def _slope(self, tail: Tail, end: fx.Node, name: str) -> tuple[Tensor, list[Tensor]]:
        """Gradient of the head's mean loss on the first halves, and all values at the pivot."""
        probe = self.probe
        layer: Any = probe.current.get_submodule(name)
        weight = layer.weight.detach().clone().requires_grad_()
        total, values = torch.zeros_like(weight), []
        for number in asked(probe):
            (start,) = probe.current_features.at(number)
            with torch.enable_grad(), frozen(probe.current):
                features = tail.features(probe.current, start)
                given = {name: (weight, layer.bias)}
                value = tail.finish(probe.current, features, given, [end])[end]
                half = probe.first_half(number)
                mixed = torch.cat([value[:half], value[half:].detach()])
                (found,) = torch.autograd.grad(self.losses[number](mixed), weight)
            total += found
            values.append(value.detach())
        count = torch.tensor([float(sum(probe.first_half(b) for b in asked(probe)))])
        probe.add_up(total, count)
        slope = torch.zeros(weight[0].numel() + 1, len(weight), dtype=torch.float64)
        slope[:-1] = total.flatten(1).T.double().cpu() / float(count.clamp_min(1))
        return slope, values

    def _rise(
        self, tail: Tail, end: fx.Node, name: str, weights: Tensor, before: Sequence[Tensor]
    ) -> float:
        """By how much other weights raise the head's mean loss on the second halves."""
        probe = self.probe
        layer: Any = probe.current.get_submodule(name)
        weight = _shaped(weights, layer.weight)
        found = torch.zeros(2, dtype=torch.float64)
        for number, value in zip(asked(probe), before, strict=True):
            half = probe.first_half(number)
            (start,) = probe.current_features.at(number)
            if half == len(start):
                continue
            features = tail.features(probe.current, start[half:])
            given = {name: (weight, layer.bias)}
            moved = tail.finish(probe.current, features, given, [end])[end]
            loss = self.losses[number]
            found[0] += float(loss(torch.cat([value[:half], moved])) - loss(value))
            found[1] += len(moved)
        probe.add_up(found)
        return float(found[0] / found[1].clamp_min(1))


def _shaped(weights: Tensor, like: Tensor) -> Tensor:
    """Columns x outputs with the constant last, as a layer has its weights."""
    return weights[:-1].T.reshape(like.shape).to(like)
