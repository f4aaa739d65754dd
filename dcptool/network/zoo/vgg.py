"""The VGGNet of the CIFAR experiments: 16 convolutions with norm, one linear layer, 32 px."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Channels of the convolutions; a stage ends with a pooling layer, the last one with the global one.
STAGES = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)


class VGGNet(nn.Module):
    """Convolutions with bias, batch norm and ReLU in five stages, then a linear classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for number, stage in enumerate(STAGES):
            if number:
                layers.append(nn.MaxPool2d(2, 2))
            for outputs in stage:
                layers += [
                    nn.Conv2d(inputs, outputs, 3, padding=1),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(),
                ]
                inputs = outputs
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        x = self.avgpool(self.features(x))
        scores: Tensor = self.classifier(torch.flatten(x, 1))
        return scores
