"""Algorithm 2 as the paper has it: add the channel with the largest gradient, then train again.

Every channel costs two walks over the samples: one for the gradient of the joint loss, one epoch
of SGD on the weights chosen so far. The reference that the closed form is measured against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from dcptool.errors import GateFailed
from dcptool.selection.samples import Samples
from dcptool.selection.store import Store
from dcptool.selection.tail import Tail

LossAt = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sgd:
    """How the chosen weights are trained after each channel."""

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    epochs: int = 1


@dataclass
class Joint:
    """`L = L_M + lambda L_S` of some readers on stored features, chunk by chunk.

    `features` holds the tail's frontier and `targets` the dense network's outputs, one for each
    reader call. `heads` gives the summed head loss of each chunk from the value at `end`.
    """

    tail: Tail
    root: nn.Module
    features: Store
    targets: Store
    samples: Samples
    discrimination: float
    end: fx.Node | None = None
    heads: Sequence[LossAt] = ()

    def loss(self, weights: Mapping[str, tuple[Tensor, Tensor | None]], chunk: int) -> Tensor:
        """This process's part of the mean loss over one chunk, differentiable in the weights.

        A discrimination of infinity leaves the head's loss alone.
        """
        features, wanted = self.features.at(chunk), self.targets.at(chunk)
        part = features[0].shape[0] / self.samples.sizes[chunk]
        calls = list(self.tail.readers)
        use_head = self.end is not None and self.discrimination > 0 and bool(self.heads)
        want = [*calls, self.end] if use_head and self.end is not None else calls
        found = self.tail.finish(self.root, features, weights, want)
        total = features[0].new_zeros(())
        is_alone = math.isinf(self.discrimination)
        for node, target in zip(calls, wanted, strict=True) if not is_alone else ():
            total = total + part * (found[node] - target).square().mean() / 2
        if use_head and self.end is not None:
            strength = 1.0 if is_alone else self.discrimination
            size = self.samples.sizes[chunk]
            total = total + strength * self.heads[chunk](found[self.end]) / size
        return total


@dataclass
class Greedy:
    """What the loop found: order, losses at each size, gradient norms, final weights."""

    order: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    dead: int = 0
    stopped: str = "count"


def choose(
    joint: Joint,
    columns: Mapping[str, Tensor],
    units: int,
    *,
    count: int | None,
    epsilon: float | None = None,
    sgd: Sgd | None = None,
    order: Sequence[int] | None = None,
    step: Callable[[int, float, float], None] | None = None,
) -> Greedy:
    """Run Algorithm 2; `columns` names the unit of each input channel of each reader (-1 stays).

    With `order` the channels come in that order instead of by gradient. `step` hears of each
    channel, its loss and its gradient norm.
    """
    sgd = sgd or Sgd()
    dense = {name: _parameters(joint.root.get_submodule(name)) for name in columns}
    result = Greedy(weights={n: _start(w, b, columns[n]) for n, (w, b) in dense.items()})
    limit = units if count is None else min(count, units)
    while True:
        loss, norms = _walk(joint, result.weights, columns, units)
        if not math.isfinite(loss):
            raise GateFailed(f"the loss of {next(iter(columns))} is not finite")
        result.losses.append(loss)
        chosen = len(result.order)
        if chosen and step is not None:
            step(result.order[-1], loss, result.norms[-1])
        if epsilon is not None and chosen and _has_settled(result.losses, epsilon):
            result.stopped = "epsilon"
            return result
        if chosen == limit:
            return result
        unit, norm = _next(norms, result.order, order)
        if norm == 0.0 and order is None:
            result.dead += 1
        result.order.append(unit)
        result.norms.append(norm)
        for name, (weight, _) in dense.items():
            taken = columns[name] == unit
            result.weights[name][0][:, taken] = weight[:, taken]
        _train(joint, result.weights, columns, result.order, sgd)


def _parameters(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    return weight.detach(), bias.detach() if isinstance(bias, Tensor) else None


def _start(weight: Tensor, bias: Tensor | None, column: Tensor) -> tuple[Tensor, Tensor | None]:
    start = weight.clone()
    start[:, column >= 0] = 0.0
    return start, bias.clone() if bias is not None else None


def _has_settled(losses: Sequence[float], epsilon: float) -> bool:
    return abs(losses[-2] - losses[-1]) <= epsilon * losses[0]


def _next(norms: Tensor, taken: Sequence[int], order: Sequence[int] | None) -> tuple[int, float]:
    """The unit with the largest gradient that is not taken; the lowest index of equals."""
    if order is not None:
        return order[len(taken)], float(norms[order[len(taken)]])
    left = norms.clone()
    left[list(taken)] = -1.0
    best = float(left.max())
    unit = int(torch.nonzero(left == best)[0])
    return unit, best


def _walk(
    joint: Joint,
    weights: Mapping[str, tuple[Tensor, Tensor | None]],
    columns: Mapping[str, Tensor],
    units: int,
) -> tuple[float, Tensor]:
    """Loss and gradient norm of each unit over all samples."""
    leaves = {n: (w.clone().requires_grad_(), b) for n, (w, b) in weights.items()}
    images, dist = joint.samples.images, joint.samples.dist
    total = 0.0
    gradients = {n: torch.zeros_like(w) for n, (w, _) in weights.items()}
    for chunk in range(len(joint.features)):
        share = joint.samples.sizes[chunk] / images
        with torch.enable_grad():
            loss = joint.loss(leaves, chunk)
            found = torch.autograd.grad(loss, [w for w, _ in leaves.values()])
        total += share * float(loss.detach())
        for name, gradient in zip(leaves, found, strict=True):
            gradients[name] += share * gradient
    total = float(dist.sum(torch.tensor([total], dtype=torch.float64)).item())
    squares = torch.zeros(units, dtype=torch.float64)
    for name, gradient in gradients.items():
        dist.sum(gradient)
        each = gradient.double().square().sum(dim=[d for d in range(gradient.dim()) if d != 1])
        each = each.cpu()
        unit = columns[name]
        squares.index_add_(0, unit[unit >= 0], each[unit >= 0])
    return total, squares.sqrt()


def _train(
    joint: Joint,
    weights: dict[str, tuple[Tensor, Tensor | None]],
    columns: Mapping[str, Tensor],
    chosen: Sequence[int],
    sgd: Sgd,
) -> None:
    """Epochs of SGD over the samples on the chosen columns and the biases."""
    allowed = torch.tensor(list(chosen))
    masks = {n: (torch.isin(c, allowed) | (c < 0)).float() for n, c in columns.items()}
    leaves = {
        n: (w.requires_grad_(), b.requires_grad_() if b is not None else None)
        for n, (w, b) in weights.items()
    }
    parameters = [p for pair in leaves.values() for p in pair if p is not None]
    optimizer = torch.optim.SGD(
        parameters,
        sgd.lr,
        momentum=sgd.momentum,
        weight_decay=sgd.weight_decay,
        nesterov=sgd.momentum > 0,
    )
    for _ in range(sgd.epochs):
        for chunk in range(len(joint.features)):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = joint.loss(leaves, chunk)
                loss.backward()  # type: ignore[no-untyped-call]
            for name, (weight, _) in leaves.items():
                shape = [1, -1] + [1] * (weight.dim() - 2)
                assert weight.grad is not None
                weight.grad.mul_(masks[name].view(shape).to(weight.device))
            for parameter in parameters:
                if parameter.grad is not None:
                    joint.samples.dist.sum(parameter.grad)
            optimizer.step()
    for name, (weight, bias) in leaves.items():
        weights[name] = weight.detach(), bias.detach() if bias is not None else None
