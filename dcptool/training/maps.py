"""Learning from a teacher's maps inside the network, beside its scores.

What is left of a pruned network computes the same maps where one tensor carries the whole signal,
only less exactly: there the teacher says far more of an image than its scores do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dcptool.network.graph import build_graph
from dcptool.training.losses import Loss, Outcome, tell_step


@contextmanager
def seen_at(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """What some modules gave when the network ran last, for as long as the block runs."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> RemovableHandle:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            seen[name] = output

        return module.get_submodule(name).register_forward_hook(hook)

    hooks = [keep(name) for name in names]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def shared_pivots(module: nn.Module, teacher: nn.Module, size: tuple[int, ...]) -> tuple[str, ...]:
    """Where losses of the network would go and both networks give maps of one shape."""
    structure = build_graph(module.cpu(), size).structure
    names = structure.pivots(structure.default_losses())
    image = torch.zeros(1, *size)
    with torch.no_grad(), seen_at(module, names) as mine, seen_at(teacher, names) as theirs:
        for network in (module, teacher):
            network.cpu().eval()(image)
    return tuple(name for name in names if mine[name].shape == theirs[name].shape)


def with_maps(
    loss: Loss, given: dict[str, Tensor], wanted: Mapping[str, Tensor], weight: float
) -> Loss:
    """A loss that runs both networks, and the error of the maps as a share of their energy."""

    def taught(model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
        outcome = loss(model, images, targets)
        total = outcome.loss
        for name, goal in wanted.items():
            goal = goal.detach().float()
            error = (given[name].float() - goal).square().mean()
            total = total + weight * error / goal.var().clamp(min=1e-12)
        given.clear()
        return Outcome(total, outcome.scores)

    taught.at_step = lambda step: tell_step(loss, step)  # type: ignore[attr-defined]
    return taught
