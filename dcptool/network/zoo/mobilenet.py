"""MobileNet v1 and v2 for small images, and v1 for 224 px.

Module names are those of the public weights: of v1 `layers.0.conv1` (depthwise) and
`layers.0.conv2` (pointwise), of v2 those of torchvision, whose blocks it uses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.mobilenetv2 import MobileNetV2

# Outputs of the 13 pairs of a depthwise and a pointwise convolution.
WIDTHS = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
# Pairs, counted from one, whose depthwise convolution halves the map: as published, and those
# which come to the operations that the paper reports for 32 px.
HALVING = (2, 4, 6, 12)
HALVING_PAPER = (3, 7, 13)

# Expansion, channels and repeats of the stages of v2, and the stride that each begins with. The
# paper does not tell its strides; ours come to the share of operations that it saves.
STAGES = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))
STRIDES_PUBLIC = (1, 1, 2, 2, 1, 2, 1)
STRIDES_PAPER = (1, 2, 1, 2, 1, 2, 1)


class Separable(nn.Module):
    """A depthwise and a pointwise convolution, each with norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Filter each channel, then mix them."""
        x = self.relu1(self.bn1(self.conv1(x)))
        mixed: Tensor = self.relu2(self.bn2(self.conv2(x)))
        return mixed


class MobileNetV1(nn.Module):
    """A stem, 13 separable convolutions, global average, a linear classifier."""

    def __init__(self, num_classes: int, stem: int, halving: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, stem, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.relu = nn.ReLU()
        inputs = (32, *WIDTHS)
        self.layers = nn.Sequential(
            *(
                Separable(inputs[i], width, 2 if i + 1 in halving else 1)
                for i, width in enumerate(WIDTHS)
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(WIDTHS[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        x = self.layers(self.relu(self.bn1(self.conv1(x))))
        scores: Tensor = self.linear(torch.flatten(self.avgpool(x), 1))
        return scores


def mobilenet_v2(num_classes: int, strides: tuple[int, ...]) -> nn.Module:
    """MobileNet v2 for 32 px: its stem keeps the size."""
    setting = [[*stage, stride] for stage, stride in zip(STAGES, strides, strict=True)]
    network: nn.Module = MobileNetV2(num_classes=num_classes, inverted_residual_setting=setting)
    stem = network.get_submodule("features.0.0")
    assert isinstance(stem, nn.Conv2d)
    stem.stride = (1, 1)
    return network
