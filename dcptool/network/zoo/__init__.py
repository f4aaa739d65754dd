"""The small networks of the paper, by name.

A name gives a module with fresh weights and says what input it expects. Names ending in
`_a` have parameter-free shortcuts. Where public weights use other keys for the same
tensors, `rename` maps them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import nn

from dcptool.network.zoo.resnet import ResNet
from dcptool.network.zoo.vgg import VGGNet

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_SYNONYMS = (
    (re.compile(r"(^|\.)downsample\."), r"\1shortcut."),
    (re.compile(r"^fc\."), "linear."),
)

Value = TypeVar("Value")


@dataclass(frozen=True)
class Entry:
    """How to make one network, and the pixels that it expects."""

    make: Callable[[int], nn.Module]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    size: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10


def _entries() -> dict[str, Entry]:
    table: dict[str, Entry] = {}
    for depth in (20, 32, 44, 56, 110):
        blocks = (depth - 2) // 6
        # The public weights with projections were trained on plain x / 255.
        table[f"resnet{depth}"] = Entry(
            partial(ResNet, blocks, projection=True), mean=(0.0,) * 3, std=(1.0,) * 3
        )
        table[f"resnet{depth}_a"] = Entry(partial(ResNet, blocks, projection=False))
    table["vggnet"] = Entry(VGGNet)
    return table


ENTRIES: Mapping[str, Entry] = _entries()


def names() -> list[str]:
    """All names, without the `zoo:` prefix."""
    return list(ENTRIES)


def create(name: str, num_classes: int) -> nn.Module:
    """A network with fresh weights from torch's random generator."""
    return ENTRIES[name].make(num_classes)


def rename(state: Mapping[str, Value]) -> dict[str, Value]:
    """Map keys of other public implementations to those of the zoo."""
    renamed = {}
    for key, value in state.items():
        for pattern, replacement in _SYNONYMS:
            key = pattern.sub(replacement, key)
        renamed[key] = value
    return renamed
