"""The residual networks of the CIFAR experiments, 32 px.

With projection shortcuts (a 1x1 convolution and a norm, the count of the paper) or with
parameter-free ones (every second pixel, zero channels added on both sides). Module names
are those of the public weights: `layer1.0.conv1`, `layer2.0.shortcut.0`, `linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class PadShortcut(nn.Module):
    """Every second pixel, with zero channels before and after."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Halve the map and widen it."""
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = (
                nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                )
                if projection
                else PadShortcut(inputs, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut to the second convolution, then rectify."""
        out: Tensor = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        total: Tensor = self.relu2(out + self.shortcut(x))
        return total


class ResNet(nn.Module):
    """Three stages of `blocks` basic blocks with 16, 32 and 64 channels."""

    def __init__(self, blocks: int, num_classes: int, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = _stage(blocks, 16, 16, 1, projection)
        self.layer2 = _stage(blocks, 16, 32, 2, projection)
        self.layer3 = _stage(blocks, 32, 64, 2, projection)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: Tensor = self.linear(torch.flatten(self.avgpool(x), 1))
        return scores


def _stage(blocks: int, inputs: int, outputs: int, stride: int, projection: bool) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride, projection)
    rest = [BasicBlock(outputs, outputs, 1, projection) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)
