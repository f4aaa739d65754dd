"""A small network and painted images for it."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from PIL import Image

from dcptool.network.models import Base, Input, Network


def network(classes: int = 2, size: int = 16, names: tuple[str, ...] | None = None) -> Network:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, classes),
    )
    seen = Input((3, size, size), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    return Network(module, Base("zoo", "tiny", classes), seen, names)


def paint(path: Path, seed: int, size: int = 16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(path)
