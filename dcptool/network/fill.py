"""Pouring weights into a network: every key must fit, or all that does not is told.

A classifier of another size is the one exception, and only when the size was asked for.
Copies tensor by tensor: modules that convert old weights inside `load_state_dict` want
version notes that weight files do not carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcptool.errors import InputError

_SHOWN = 5
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Misfit:
    """What keeps weights from fitting a network."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]
    head: tuple[str, ...]
    head_size: int | None

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.head)

    @property
    def only_head(self) -> bool:
        """Whether nothing but the number of classes differs."""
        return bool(self.head) and not (self.missing or self.unexpected or self.shapes)


def compare(module: nn.Module, state: Mapping[str, Tensor], num_classes: int) -> Misfit:
    """Set the keys and shapes of `state` against those of `module`."""
    own = module.state_dict()
    # Counters of batches steer nothing in evaluation, and old files lack them.
    missing = [key for key in own if key not in state and not key.endswith(_COUNTER)]
    unexpected = [key for key in state if key not in own]
    shapes, head, sizes = [], [], set()
    for key, value in state.items():
        if key not in own or value.shape == own[key].shape:
            continue
        mine = own[key].shape
        if mine[:1] == (num_classes,) and len(value.shape) and value.shape[1:] == mine[1:]:
            head.append(key)
            sizes.add(value.shape[0])
        else:
            shapes.append(f"{key} {_shape(value)} (network: {_shape(own[key])})")
    size = sizes.pop() if len(sizes) == 1 else None
    return Misfit(tuple(missing), tuple(unexpected), tuple(shapes), tuple(head), size)


def pour(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `state` over the one of that name in `module`, where shapes agree."""
    own = module.state_dict()
    with torch.no_grad():
        for key, value in state.items():
            if key in own and own[key].shape == value.shape:
                own[key].copy_(value)


def fill(module: nn.Module, state: Mapping[str, Tensor], *, where: str, network: str) -> None:
    """Copy all of `state` into `module`, or raise with everything that does not fit."""
    misfit = compare(module, state, num_classes=-1)
    if misfit:
        raise misfit_error(misfit, where=where, network=network)
    pour(module, state)


def misfit_error(misfit: Misfit, *, where: str, network: str, classes: int = 0) -> InputError:
    """The error that lists what does not fit."""
    message = f"the weights in {where} do not fit {network}"
    if misfit.only_head and misfit.head_size:
        return InputError(
            message,
            why=f"its classifier has {misfit.head_size} classes, the network's {classes}: "
            + _some(misfit.head),
            try_=f"--num-classes {misfit.head_size}",
        )
    lines = []
    for label, keys in (
        ("missing", misfit.missing),
        ("unexpected", misfit.unexpected),
        ("of another shape", misfit.shapes + misfit.head),
    ):
        if keys:
            lines.append(f"{len(keys)} {label}: {_some(keys)}")
    return InputError(
        message, why="\n".join(lines), try_=f"dcptool analyze {network}, to see its layers"
    )


def _some(keys: tuple[str, ...]) -> str:
    rest = len(keys) - _SHOWN
    return ", ".join(keys[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "scalar"
