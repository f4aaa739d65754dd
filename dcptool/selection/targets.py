"""What a layer's output should be: the dense network's own, or what mends the next residual sum.

In a pruned network the shortcut already carries the error of earlier cuts. Where a layer's output
reaches a residual sum through a norm alone, its target is the value that makes the sum equal to
the dense network's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from dcptool.network.structure import is_residual
from dcptool.selection.chain import Segment

SMALLEST_SCALE = 1e-3
RELU, RELU6 = (0.0, math.inf), (0.0, 6.0)


# Below the first and above the second an activation gives the same for all values.
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Target:
    """Where the target of one layer is read: at the layer, or at the sum it reaches.

    `bounds` are those of the activation through which alone the normed value, or the sum, is seen.
    """

    node: fx.Node
    other: fx.Node | None = None
    norm: str | None = None
    bounds: Bounds | None = None

    @property
    def is_block(self) -> bool:
        """Whether a residual sum is to be mended."""
        return self.other is not None


def find_target(segment: Segment, node: fx.Node, root: nn.Module, kind: str) -> Target:
    """The target of the layer called at `node`; `kind` is conv or block."""
    norm: str | None = None
    here = node
    while True:
        bounds = _bounds_after(here, root)
        users = list(here.users)
        if len(users) != 1:
            return Target(node, None, norm, bounds)
        user = users[0]
        if user.op == "call_module":
            layer = root.get_submodule(str(user.target))
            if norm is None and here is node and _has_statistics(layer):
                norm = str(user.target)
                if not _is_linear_norm(layer):
                    return Target(node, None, norm, _bounds_inside(layer))
                here = user
                continue
            if type(layer) is nn.Identity:
                here = user
                continue
        elif kind == "block" and is_residual(user) and user in segment.nodes:
            others = [n for n in user.all_input_nodes if n is not here]
            if len(others) == 1:
                return Target(user, others[0], norm, _bounds_after(user, root))
        return Target(node, None, norm, bounds)


def _bounds_after(node: fx.Node, root: nn.Module) -> Bounds | None:
    """Bounds of the activation that is the only one to read a value."""
    users = list(node.users)
    if len(users) != 1:
        return None
    (user,) = users
    if user.op == "call_module":
        layer = root.get_submodule(str(user.target))
        return _bounds_after(user, root) if type(layer) is nn.Identity else _bounds_of(layer)
    name = user.target if user.op == "call_method" else getattr(user.target, "__name__", "")
    return {"relu": RELU, "relu_": RELU, "relu6": RELU6}.get(str(name))


def _bounds_inside(norm: nn.Module) -> Bounds | None:
    """Bounds of the activation that a norm carries."""
    parts = [part for part in norm.children() if type(part) is not nn.Identity]
    return _bounds_of(parts[0]) if len(parts) == 1 else None


def _bounds_of(layer: nn.Module) -> Bounds | None:
    return {nn.ReLU: RELU, nn.ReLU6: RELU6}.get(type(layer))


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


def is_erased(scale: Tensor) -> Tensor:
    """Which outputs a norm hardly lets through."""
    return scale.abs() <= SMALLEST_SCALE * scale.abs().max()


def invert(values: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The layer output that a norm would turn into `values`; 0 where the norm erases it."""
    erased = is_erased(scale)
    safe = torch.where(erased, torch.ones_like(scale), scale)
    return torch.where(erased, torch.zeros_like(values), (values - shift) / safe)
