"""The small networks of the paper, by name.

A name gives a module with fresh weights and says what input it expects. Names ending in
`_a` have parameter-free shortcuts. Where public weights use other keys for the same
tensors, or another form of them, `translate` maps them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from dcptool.network.zoo import mobilenet
from dcptool.network.zoo.resnet import ResNet
from dcptool.network.zoo.sphere import EMBEDDING, SphereNet
from dcptool.network.zoo.vgg import VGGNet

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Faces are shown as (pixel - 127.5) / 128.
FACE_MEAN = (0.5,) * 3
FACE_STD = (128 / 255,) * 3
FACES = 10_575

_SYNONYMS = (
    (re.compile(r"^module\."), ""),
    (re.compile(r"(^|\.)downsample\."), r"\1shortcut."),
    (re.compile(r"^fc\."), "linear."),
    (re.compile(r"^feature\."), "features."),
)
# One public MobileNet v1 counts everything in one list: its stem is the first, pairs follow.
_LISTED = re.compile(r"^model\.(\d+)\.(\d)\.(\w+)$")
_IN_PAIR = {"0": "conv1", "1": "bn1", "3": "conv2", "4": "bn2"}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Entry:
    """How to make one network, and the pixels that it expects."""

    make: Callable[[int], nn.Module]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    size: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    crop_pct: float = 1.0


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
    one, two = mobilenet.MobileNetV1, mobilenet.mobilenet_v2
    table["mobilenet_v1"] = Entry(partial(one, stem=1, halving=mobilenet.HALVING_PAPER))
    table["mobilenet_v2"] = Entry(partial(two, strides=mobilenet.STRIDES_PAPER))
    # Public weights for CIFAR-10 have the same tensors, and other strides.
    table["mobilenet_v1_public"] = Entry(partial(one, stem=1, halving=mobilenet.HALVING))
    table["mobilenet_v2_public"] = Entry(partial(two, strides=mobilenet.STRIDES_PUBLIC))
    table["mobilenet_v1_224"] = Entry(
        partial(one, stem=2, halving=mobilenet.HALVING),
        size=(3, 224, 224),
        num_classes=1000,
        crop_pct=0.875,
    )
    for depth in (4, 20):
        table[f"spherenet{depth}"] = Entry(
            partial(SphereNet, depth), FACE_MEAN, FACE_STD, (3, 112, 96), FACES
        )
    return table


ENTRIES: Mapping[str, Entry] = _entries()


def names() -> list[str]:
    """All names, without the `zoo:` prefix."""
    return list(ENTRIES)


def create(name: str, num_classes: int) -> nn.Module:
    """A network with fresh weights from torch's random generator."""
    return ENTRIES[name].make(num_classes)


def translate(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Public weights of other implementations as those of the network `name`."""
    found = rename(state)
    if name == "vggnet":
        # Before a norm a bias says nothing, and some leave it out.
        for key, value in list(found.items()):
            if key.startswith("features.") and value.dim() == 4:
                found.setdefault(key.replace(".weight", ".bias"), torch.zeros(len(value)))
    if name.startswith("mobilenet_v1"):
        found = {_unlisted(key): value for key, value in found.items()}
    if name.startswith("spherenet"):
        weight = found.get("fc6.weight")
        if weight is not None and weight.dim() == 2 and weight.shape[1] != EMBEDDING:
            found["fc6.weight"] = weight.T.contiguous()
    return found


def _unlisted(key: str) -> str:
    match = _LISTED.match(key)
    if not match:
        return key
    number, place, leaf = int(match[1]), match[2], match[3]
    if number == 0:
        return f"{'conv1' if place == '0' else 'bn1'}.{leaf}"
    return f"layers.{number - 1}.{_IN_PAIR.get(place, place)}.{leaf}"


def rename(state: Mapping[str, Value]) -> dict[str, Value]:
    """Map keys of other public implementations to those of the zoo."""
    renamed = {}
    for key, value in state.items():
        for pattern, replacement in _SYNONYMS:
            key = pattern.sub(replacement, key)
        renamed[key] = value
    return renamed
