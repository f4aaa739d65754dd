"""From a name to a network: module, input, classes.

Knows the registries of timm, torchvision and the zoo. Weights come from a checkpoint file,
from the registry's own download, or from a seed; never from code inside a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from dcptool.errors import InputError, UsageError

Scalar = str | int | float | bool
SOURCES = ("timm", "torchvision", "zoo")


@dataclass(frozen=True)
class Base:
    """Which constructor makes the dense network; enough to build it again."""

    source: str
    name: str
    num_classes: int
    arguments: Mapping[str, Scalar] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


@dataclass(frozen=True)
class Input:
    """What the network expects to see."""

    size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    crop_pct: float = 0.875


@dataclass(frozen=True)
class Cut:
    """Kept indices of one site, counted in the dense network; None keeps all."""

    inputs: tuple[int, ...] | None
    outputs: tuple[int, ...] | None
    dim: int = 0


@dataclass
class Network:
    """A module together with all that is needed to store, feed and name it."""

    module: nn.Module
    base: Base
    input: Input
    classes: tuple[str, ...] | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    weights: str = "random"


def resolve(name: str) -> tuple[str, str]:
    """Source and registry name of `resnet50`, `timm:resnet50`, `torchvision:...`, `zoo:...`."""
    source, colon, rest = name.partition(":")
    if colon and source in SOURCES:
        return source, rest
    return "timm", name


def build(base: Base) -> nn.Module:
    """The dense network with fresh weights, on the CPU, in eval mode."""
    if base.source == "timm":
        import timm

        module = timm.create_model(base.name, num_classes=base.num_classes, **base.arguments)
    elif base.source == "torchvision":
        import torchvision

        extra = {"init_weights": False} if base.name in ("googlenet", "inception_v3") else {}
        module = torchvision.models.get_model(
            base.name, weights=None, num_classes=base.num_classes, **base.arguments, **extra
        )
    elif base.source == "zoo":
        from dcptool.network import zoo

        module = zoo.create(base.name, num_classes=base.num_classes)
    else:
        raise InputError(f"unknown model source {base.source!r}")
    return module.eval()


def load(
    name: str,
    *,
    pretrained: bool = True,
    checkpoint: Path | None = None,
    num_classes: int | None = None,
    img_size: int | None = None,
    seed: int = 0,
    offline: bool = False,
) -> Network:
    """Find, build and fill a network by name."""
    source, registry_name = resolve(name)
    torch.manual_seed(seed)
    if source == "timm":
        import timm

        if not timm.is_model(registry_name):
            raise UsageError(f"unknown model {name!r}")
        config = timm.get_pretrained_cfg(registry_name).to_dict()
        size = tuple(config["input_size"])
        spec = Input(
            size,
            tuple(config["mean"]),
            tuple(config["std"]),
            config["interpolation"],
            config["crop_pct"],
        )
        classes = config["num_classes"]
    else:
        spec = Input((3, 224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        classes = 1000
    base = Base(source, registry_name, num_classes or classes)
    return Network(build(base), base, spec)
