"""What a layer's output should be: the dense network's own, or what mends the next residual sum.

In a pruned network the shortcut already carries the error of earlier cuts. Where a layer's output
reaches a residual sum through a norm alone, its target is the value that makes the sum equal to
the dense network's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from dcptool.network.structure import is_residual
from dcptool.selection.chain import Segment

SMALLEST_SCALE = 1e-3


@dataclass(frozen=True)
class Target:
    """Where the target of one layer is read: at the layer, or at the sum it reaches."""

    node: fx.Node
    other: fx.Node | None = None
    norm: str | None = None

    @property
    def is_block(self) -> bool:
        """Whether a residual sum is to be mended."""
        return self.other is not None


def find_target(segment: Segment, node: fx.Node, root: nn.Module, kind: str) -> Target:
    """The target of the layer called at `node`; `kind` is conv or block."""
    norm: str | None = None
    here = node
    while True:
        users = list(here.users)
        if len(users) != 1:
            return Target(node, None, norm)
        user = users[0]
        if user.op == "call_module":
            layer = root.get_submodule(str(user.target))
            if norm is None and here is node and _has_statistics(layer):
                norm = str(user.target)
                if not _is_linear_norm(layer):
                    return Target(node, None, norm)
                here = user
                continue
            if type(layer) is nn.Identity:
                here = user
                continue
        elif kind == "block" and is_residual(user) and user in segment.nodes:
            others = [n for n in user.all_input_nodes if n is not here]
            if len(others) == 1:
                return Target(user, others[0], norm)
        return Target(node, None, norm)


def _has_statistics(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "running_mean", None), Tensor) and layer.weight is not None


def _is_linear_norm(layer: nn.Module) -> bool:
    """A norm in eval mode is a scale and a shift, unless it carries an activation."""
    return all(type(part) is nn.Identity for part in layer.children())


def norm_scale(root: nn.Module, name: str | None, channels: int) -> tuple[Tensor, Tensor]:
    """Scale and shift that the norm after a layer applies in eval mode."""
    if name is None:
        return torch.ones(channels), torch.zeros(channels)
    norm: Any = root.get_submodule(name)
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale.detach(), (norm.bias - norm.running_mean * scale).detach()


def invert(values: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The layer output that a norm would turn into `values`; 0 where the norm erases it."""
    erased = scale.abs() <= SMALLEST_SCALE * scale.abs().max()
    safe = torch.where(erased, torch.ones_like(scale), scale)
    return torch.where(erased, torch.zeros_like(values), (values - shift) / safe)
