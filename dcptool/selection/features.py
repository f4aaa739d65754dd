"""What a layer reads, as rows of a matrix: patches at random positions, and values at the same.

One row is one output position of one image; its columns are the inputs that the layer weighs
there, channel by channel with all taps of a channel together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcptool.network.padding import padded_input


@dataclass(frozen=True)
class Positions:
    """Chosen output positions of each image, as row and column indices (images x count)."""

    rows: Tensor
    columns: Tensor

    def to(self, device: torch.device) -> Positions:
        """The same on another device."""
        return Positions(self.rows.to(device), self.columns.to(device))


def is_readable(layer: nn.Module) -> bool:
    """Whether the inputs of this layer can be written as rows."""
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)


def taps(layer: nn.Module) -> int:
    """Columns of one input channel."""
    return layer.weight[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1


def choose_positions(
    shape: Sequence[int],
    images: int,
    count: int,
    generator: torch.Generator,
    share: slice = slice(None),
    *,
    tokens: bool = False,
) -> Positions:
    """Random positions of a layer's output, as many for each image; all if there are few.

    `shape` is that of the output for any number of images, with channels last for `tokens`. With
    a `share` only the rows of those of the `images` come back, with the positions they have among
    all.
    """
    height, width = grid(shape, tokens=tokens)
    total = height * width
    if total <= count:
        flat = torch.arange(total).expand(images, total)
    else:
        flat = torch.rand((images, total), generator=generator).topk(count, dim=1).indices
    flat = flat[share]
    return Positions(flat // width, flat % width)


def grid(shape: Sequence[int], *, tokens: bool) -> tuple[int, int]:
    """Positions of an output: maps have two dimensions of them, tokens one, vectors none."""
    if len(shape) == 4 and not tokens:
        return shape[2], shape[3]
    return 1, max(1, math.prod(shape[1:-1]))


def values_at(output: Tensor, positions: Positions, *, tokens: bool = False) -> Tensor:
    """Rows (images * count, channels) of an output at the given positions."""
    positions = positions.to(output.device)
    if output.dim() != 4 or tokens:
        rows = output.reshape(output.shape[0], -1, output.shape[-1])
        index = positions.columns.unsqueeze(-1).expand(-1, -1, rows.shape[-1])
        return rows.gather(1, index).flatten(0, 1)
    index = positions.rows * output.shape[3] + positions.columns
    return _taken(output, index).flatten(0, 1)


def rows_at(layer: nn.Module, features: Tensor, positions: Positions) -> Tensor:
    """Rows (images * count, channels * taps) that the layer reads at the given positions."""
    if isinstance(layer, nn.Linear):
        return values_at(features.reshape(features.shape[0], -1, features.shape[-1]), positions)
    assert isinstance(layer, nn.Conv2d)
    positions = positions.to(features.device)
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    padded = padded_input(layer, features)
    images, channels, _, width = padded.shape
    if kh == kw == 1:
        return values_at(padded, Positions(positions.rows * sh, positions.columns * sw))
    rows = (positions.rows * sh).unsqueeze(-1) + torch.arange(kh, device=features.device) * dh
    columns = (positions.columns * sw).unsqueeze(-1) + torch.arange(kw, device=features.device) * dw
    flat = (rows.unsqueeze(-1) * width + columns.unsqueeze(-2)).flatten(1)
    count = positions.rows.shape[1]
    taken = _taken(padded, flat).view(images, count, kh * kw, channels)
    return taken.transpose(2, 3).reshape(images * count, channels * kh * kw)


def _taken(maps: Tensor, index: Tensor) -> Tensor:
    """Values (images x positions x channels) of maps at flat positions, one row for each image.

    With channels last each of them is one piece of memory.
    """
    last = maps.permute(0, 2, 3, 1).flatten(1, 2)
    picture = torch.arange(len(maps), device=maps.device).unsqueeze(1) * last.shape[1]
    return last.flatten(0, 1).index_select(0, (picture + index).flatten()).view(*index.shape, -1)
