"""Three residual blocks and noise to run through them, for the tests of selection."""

from __future__ import annotations

import torch
from torch import nn

from dcptool.network.base import Base, Input, Network

SPEC = Input((3, 16, 16), (0.0,) * 3, (1.0,) * 3)


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return self.act(x + self.norm2(self.conv2(inner)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = Block(8, 12)
        self.two = Block(8, 10)
        self.three = Block(8, 6)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = self.three(self.two(self.one(x)))
        return self.head(x.mean((2, 3)))


def blocks(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    module = Small().eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.running_mean, 0, 0.1)
    return Network(module, Base("custom", "Small", 5), SPEC)


def noise(count: int = 24, seed: int = 1) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, 3, 16, 16, generator=draw).split(8))


def loss_at_pivot(value: torch.Tensor) -> torch.Tensor:
    """The summed loss of one batch of noise, from the first channels of whatever is there."""
    scores = value.mean((2, 3))[:, :5] if value.dim() == 4 else value
    labels = torch.arange(len(scores)) % 5
    return nn.functional.cross_entropy(scores, labels, reduction="sum")
