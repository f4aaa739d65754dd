"""How one module loses channels: the table of rows that `surgery` cuts with.

Every row edits its module in place with index_select and keeps the names of its tensors. A type
without a row cannot be cut, which is an error and never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import timm.layers as tl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcptool.network.base import Cut

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def cut_part(owner: nn.Module, leaf: str, kept: Cut) -> bool:
    """Shrink the module or parameter `leaf` of `owner`; False when its type has no row."""
    target = getattr(owner, leaf)
    if isinstance(target, Tensor):
        _set(owner, leaf, _take(target, kept.dim, kept.outputs))
        return True
    if is_standardised(target) and kept.inputs is not None:
        bake(target)
    row = next((row for kind, row in _ROWS if isinstance(target, kind)), None)
    if row is None and isinstance(target, nn.Module) and _channel_tensors(target):
        row = _cut_channels
    if row is not None:
        row(target, kept)
    return row is not None


def _take(tensor: Tensor, dim: int, kept: Sequence[int] | None) -> Tensor:
    if kept is None:
        return tensor.detach()
    index = torch.tensor(kept, dtype=torch.long, device=tensor.device)
    return tensor.detach().index_select(dim, index)


def _set(owner: nn.Module, name: str, tensor: Tensor) -> None:
    old = getattr(owner, name)
    if isinstance(old, nn.Parameter):
        setattr(owner, name, nn.Parameter(tensor.clone(), requires_grad=old.requires_grad))
    else:
        setattr(owner, name, tensor.clone())


_STANDARDISED = (tl.StdConv2d, tl.StdConv2dSame, tl.ScaledStdConv2d, tl.ScaledStdConv2dSame)


def is_standardised(layer: object) -> TypeGuard[nn.Conv2d]:
    """Whether a layer's weights are normalised over its inputs at each call.

    Not so when it is grouped: whole groups go, and the rest keep all their inputs.
    """
    return isinstance(layer, _STANDARDISED) and layer.groups == 1


def bake(conv: nn.Conv2d) -> None:
    """Turn a standardised convolution, in place, into a plain one with the weights that it used.

    Only then is an input gone the same as a weight gone.
    """
    gain = getattr(conv, "gain", None)
    with torch.no_grad():
        weight = F.batch_norm(
            conv.weight.reshape(1, conv.out_channels, -1),
            None,
            None,
            weight=None if gain is None else (gain * conv.scale).view(-1),
            training=True,
            momentum=0.0,
            eps=float(conv.eps),  # type: ignore[arg-type]
        ).reshape_as(conv.weight)
    _set(conv, "weight", weight)
    if gain is not None:
        del conv.gain
    conv.__class__ = tl.Conv2dSame if getattr(conv, "same_pad", False) else nn.Conv2d


def _cut_conv(conv: nn.Module, kept: Cut) -> None:
    assert isinstance(conv, (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED))
    transposed = isinstance(conv, TRANSPOSED)
    outputs, inputs = (1, 0) if transposed else (0, 1)
    weight = conv.weight
    if conv.groups == 1:
        weight = _take(_take(weight, outputs, kept.outputs), inputs, kept.inputs)
    else:
        whole = kept.inputs if transposed else kept.outputs
        weight = _take(weight, 0, whole)
        if kept.inputs is not None:
            conv.groups = conv.groups * len(kept.inputs) // conv.in_channels
    _set(conv, "weight", weight)
    for name, tensor in [*conv.named_parameters(recurse=False), *conv.named_buffers(recurse=False)]:
        if name != "weight" and tensor.dim() and tensor.shape[0] == conv.out_channels:
            _set(conv, name, _take(tensor, 0, kept.outputs))
    if kept.inputs is not None:
        conv.in_channels = len(kept.inputs)
    if kept.outputs is not None:
        conv.out_channels = len(kept.outputs)


def _cut_linear(layer: nn.Module, kept: Cut) -> None:
    assert isinstance(layer, nn.Linear)
    _set(layer, "weight", _take(_take(layer.weight, 0, kept.outputs), 1, kept.inputs))
    if layer.bias is not None:
        _set(layer, "bias", _take(layer.bias, 0, kept.outputs))
    layer.out_features, layer.in_features = layer.weight.shape


def _cut_group_norm(norm: nn.Module, kept: Cut) -> None:
    width = "num_groups" if isinstance(norm, nn.GroupNorm) else "groups"
    if kept.outputs is not None:
        channels = (
            norm.num_channels
            if isinstance(norm, nn.GroupNorm)
            else _channel_tensors(norm)["weight"].shape[0]
        )
        setattr(norm, width, getattr(norm, width) * len(kept.outputs) // channels)
    _cut_channels(norm, kept)


def _channel_tensors(layer: nn.Module) -> dict[str, Tensor]:
    own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    return {name: tensor for name, tensor in own if tensor.dim()}


_WIDTHS = ("num_features", "num_channels", "num_parameters", "channels")


def _cut_channels(layer: nn.Module, kept: Cut) -> None:
    """Norms, slopes, blur filters: the first dimension of every tensor is the channel."""
    if kept.outputs is None:
        return
    for name, tensor in _channel_tensors(layer).items():
        if tensor.shape[0] > max(kept.outputs):
            _set(layer, name, _take(tensor, 0, kept.outputs))
    for name in _WIDTHS:
        if isinstance(getattr(layer, name, None), int):
            setattr(layer, name, len(kept.outputs))


_ROWS: tuple[tuple[type | tuple[type, ...], Callable[[nn.Module, Cut], None]], ...] = (
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED), _cut_conv),
    (nn.Linear, _cut_linear),
    ((nn.GroupNorm, tl.EvoNorm2dS0, tl.EvoNorm2dS1, tl.EvoNorm2dS2), _cut_group_norm),
    # Some have no tensor of their own, and a width all the same.
    (nn.modules.batchnorm._NormBase, _cut_channels),
)
