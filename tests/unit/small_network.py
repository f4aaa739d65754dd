"""A small network for the tests of export: convolutions, norms, a residual addition."""

from __future__ import annotations

import torch
from torch import nn

from dcptool.network.models import Base, Input, Network

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


class Small(nn.Module):
    """Two convolutions with norms, a residual addition, a classifier."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.BatchNorm2d(8) if norm_first else nn.Identity()
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        x = torch.relu(self.bn1(self.stem(x)))
        x = self.last(x + self.block(x))
        return self.fc(x.mean((2, 3)))


def network(module: nn.Module | None = None) -> Network:
    torch.manual_seed(0)
    module = (module or Small()).eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias)
            nn.init.normal_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    classes = ("ant", "bee", "cat", "dog", "line\nbreak")
    return Network(module, Base("zoo", "small", 5), Input((3, 32, 32), MEAN, STD), classes)
