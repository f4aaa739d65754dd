"""The data that describes a network: where it comes from, what it sees, what was cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

Scalar = str | int | float | bool


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
