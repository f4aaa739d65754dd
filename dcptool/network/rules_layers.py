"""Rules for layers: convolutions, linear layers, norms, activations, pooling.

A dense layer makes fresh labels. A grouped convolution ties inputs and outputs inside each of
its groups, so that whole groups go; depthwise is the case of one channel each. Norms and
parametric activations carry the labels and are cut with them.
"""

from __future__ import annotations

import math

import timm.layers as tl
import torch
import torchvision
from timm.layers import grn, norm_act, pool2d_same
from timm.layers import norm as timm_norm
from torch import Tensor, nn
from torch.nn.modules import activation

from dcptool.network.labels import spread
from dcptool.network.rules import Flow, rule

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, tl.Conv2dSame)
@rule(tl.StdConv2d, tl.StdConv2dSame, tl.ScaledStdConv2d, tl.ScaledStdConv2dSame)
@rule(*TRANSPOSED)
def convolution(flow: Flow, conv: nn.Conv2d, labels: Tensor) -> Tensor:
    """Dense: fresh labels. Grouped: inputs and outputs of a group stay together."""
    shape = flow.shape()
    dim = len(shape) - len(conv.kernel_size) - 1
    inputs = flow.per_channel(labels, dim, f"{flow.place} convolves over more than positions")
    # A transposed convolution multiplies once for each position of its input.
    counted = labels.shape if isinstance(conv, TRANSPOSED) else shape
    # The trace runs on one image: what stands before the channels may be windows of it.
    positions = math.prod(counted) // counted[dim]
    outputs = flow.site("conv", inputs, conv.out_channels, positions=positions, groups=conv.groups)
    if conv.groups > 1:
        bundle = torch.cat([inputs.view(conv.groups, -1), outputs.view(conv.groups, -1)], dim=1)
        flow.ties.join(bundle, bundle[:, :1].expand_as(bundle))
    return spread(outputs, shape, dim)


@rule(nn.Linear, tl.Linear)
def linear(flow: Flow, layer: nn.Linear, labels: Tensor) -> Tensor:
    """Reads the last dimension; after a flatten one channel is several columns."""
    shape = flow.shape()
    inputs = flow.per_channel(labels, -1, f"{flow.place} reads tokens of different origin")
    positions = flow.value.numel() // shape[-1]
    outputs = flow.site("linear", inputs, layer.out_features, positions=positions)
    return spread(outputs, shape, len(shape) - 1)


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
@rule(norm_act.BatchNormAct2d, norm_act.SyncBatchNormAct, norm_act.FrozenBatchNormAct2d)
@rule(torchvision.ops.FrozenBatchNorm2d, tl.EvoNorm2dB0, tl.EvoNorm2dB1, tl.EvoNorm2dB2)
@rule(tl.FilterResponseNormTlu2d, tl.FilterResponseNormAct2d)
def channel_norm(flow: Flow, norm: nn.Module, labels: Tensor) -> Tensor:
    """Works on each channel alone and is cut with it."""
    vector = flow.per_channel(labels, 1, f"{flow.place} norms over mixed channels")
    return spread(flow.site("norm", vector, vector), flow.shape(), 1)


@rule(nn.GroupNorm, tl.GroupNorm, tl.GroupNorm1, norm_act.GroupNormAct, norm_act.GroupNorm1Act)
@rule(tl.EvoNorm2dS0, tl.EvoNorm2dS0a, tl.EvoNorm2dS1, tl.EvoNorm2dS1a, tl.EvoNorm2dS2)
@rule(tl.EvoNorm2dS2a)
def group_norm(flow: Flow, norm: nn.GroupNorm, labels: Tensor) -> Tensor:
    """Channels of one norm group share their statistics: whole groups go."""
    vector = flow.per_channel(labels, 1, f"{flow.place} norms over mixed channels")
    groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else norm.groups
    if groups == 1:
        flow.ties.freeze(vector, f"{flow.place} normalises over all its channels")
    bundle = vector.view(groups, -1)
    flow.ties.join(bundle, bundle[:, :1].expand_as(bundle))
    return spread(flow.site("group_norm", vector, vector), flow.shape(), 1)


@rule(nn.LayerNorm, tl.LayerNorm, tl.LayerNormFp32, tl.LayerNorm2d, tl.LayerNorm2dFp32)
@rule(timm_norm.LayerNormExp2d, tl.LayerNormAct, tl.LayerNormAct2d, norm_act.LayerNormAct2dFp32)
@rule(norm_act.LayerNormActFp32, nn.LocalResponseNorm, tl.RmsNorm, tl.RmsNorm2d, tl.SimpleNorm)
@rule(tl.SimpleNorm2d, torchvision.models.convnext.LayerNorm2d)
@rule(norm_act.RmsNormAct, norm_act.RmsNormAct2d, tl.RmsNormFp32, tl.RmsNorm2dFp32)
def norm_over_channels(flow: Flow, norm: nn.Module, labels: Tensor) -> Tensor:
    """Every channel changes every other one."""
    flow.ties.freeze(labels, f"{flow.place} normalises over the channels")
    return labels


@rule(grn.GlobalResponseNorm)
def response_norm(flow: Flow, norm: grn.GlobalResponseNorm, labels: Tensor) -> Tensor:
    """Divides by the mean response of its channels, which is taken over those that live."""
    vector = flow.per_channel(labels, norm.channel_dim, f"{flow.place} norms over mixed channels")
    outputs = flow.site("response_norm", vector, vector)
    return spread(outputs, flow.shape(), norm.channel_dim % labels.dim())


@rule(activation.PReLU, tl.PReLU)
def parametric_activation(flow: Flow, layer: nn.PReLU, labels: Tensor) -> Tensor:
    """One slope for all channels, or one for each, which is cut with it."""
    if layer.num_parameters > 1:
        vector = flow.per_channel(labels, 1, f"{flow.place} reads mixed channels")
        flow.site("prelu", vector, vector)
    return labels


ELEMENTWISE = [
    kind
    for kind in vars(activation).values()
    if isinstance(kind, type)
    and issubclass(kind, nn.Module)
    and kind.__module__ == activation.__name__
    and kind.__name__
    not in ("PReLU", "MultiheadAttention", "GLU", "Softmax", "Softmax2d", "LogSoftmax", "Softmin")
]


@rule(*ELEMENTWISE)
@rule(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
@rule(tl.DropPath, tl.DropBlock2d, tl.Swish, tl.Mish, tl.Sigmoid, tl.Tanh, tl.HardSwish)
@rule(tl.HardSigmoid, tl.HardMish, tl.GELU, tl.GELUTanh, tl.QuickGELU)
@rule(torchvision.ops.StochasticDepth)
def elementwise(flow: Flow, layer: nn.Module, labels: Tensor) -> Tensor:
    """Changes values, not channels."""
    return labels


@rule(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
@rule(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d)
@rule(nn.LPPool2d, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
@rule(nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d)
@rule(pool2d_same.AvgPool2dSame, pool2d_same.MaxPool2dSame)
def over_positions(flow: Flow, layer: nn.Module, labels: Tensor) -> Tensor:
    """Mixes positions inside each channel."""
    return flow.over_space(labels)


@rule(tl.BlurPool2d)
def blur(flow: Flow, layer: nn.Module, labels: Tensor) -> Tensor:
    """A fixed filter for each channel."""
    vector = flow.per_channel(labels, 1, f"{flow.place} reads mixed channels")
    return spread(flow.site("blur", vector, vector), flow.shape(), 1)


@rule(nn.Flatten)
def flatten(flow: Flow, layer: nn.Flatten, labels: Tensor) -> Tensor:
    """The labels go where the values go."""
    return labels.flatten(layer.start_dim, layer.end_dim)


@rule(nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
def rearranged(flow: Flow, layer: nn.Module, labels: Tensor) -> Tensor:
    """Fixed rearrangement by a literal factor: the widths before it cannot change."""
    flow.ties.freeze(labels, f"{flow.place} rearranges channels by a fixed factor")
    result: Tensor = layer(labels.double()).long()
    return result
