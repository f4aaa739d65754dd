"""What a convolution puts around its input before it slides over it."""

from __future__ import annotations

import torch.nn.functional as F
from timm.layers import Conv2dSame, pad_same
from torch import Tensor, nn


def padded_input(layer: nn.Conv2d, features: Tensor) -> Tensor:
    """The features as the kernel meets them, padding included."""
    if isinstance(layer, Conv2dSame):
        kernel, stride, dilation = (
            list(n) for n in (layer.kernel_size, layer.stride, layer.dilation)
        )
        padded: Tensor = pad_same(features, kernel, stride, dilation)
        return padded
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(features, layer._reversed_padding_repeated_twice, mode=mode)
