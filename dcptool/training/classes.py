"""Whether the classes of the data are those of the network, and a new classifier if not."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from dcptool.errors import InputError
from dcptool.network.models import Network
from dcptool.training.data import Data


def check_classes(network: Network, data: Data) -> None:
    """Refuse data whose classes are not the network's, in number, names or order."""
    if not data.labelled:
        return
    wanted = network.base.num_classes
    counted = len(data.classes)
    largest = max(
        (int(part.labels.max()) for part in (data.train, data.val, data.test) if part), default=0
    )
    if (counted and counted != wanted) or largest >= wanted:
        found = counted or largest + 1
        raise InputError(
            f"the data has {found} classes, {network.base} has {wanted}",
            why=f"classes of {data.source}: {_some(data.classes)}",
            try_="--data-dir with the network's own classes, or finetune --reset-head first",
        )
    known = network.classes
    if known and data.classes and tuple(known) != data.classes:
        number = next(i for i, (a, b) in enumerate(zip(known, data.classes, strict=True)) if a != b)
        raise InputError(
            "the data has other class names, or another order, than the network",
            why=f"class {number} is {data.classes[number]!r} in the data, "
            f"{known[number]!r} in the network",
            try_="--data-dir with images of the network's own classes"
            if data.builtin
            else "name the class folders as the network does, or finetune --reset-head first",
        )


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def reset_head(network: Network, data: Data, seed: int = 0) -> Network:
    """The same network with a fresh last layer for the classes of the data."""
    count = len(data.classes)
    if not count:
        raise InputError(f"{data.source} has no classes to make a classifier for")
    name, last = find_head(network)
    fresh: nn.Module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(last, nn.Linear):
            fresh = nn.Linear(last.in_features, count, bias=last.bias is not None)
        else:
            fresh = nn.Conv2d(last.in_channels, count, 1, bias=last.bias is not None)
    fresh.to(next(last.parameters()))
    parent, _, leaf = name.rpartition(".")
    setattr(network.module.get_submodule(parent), leaf, fresh)
    for owner in (network.module, network.module.get_submodule(parent)):
        if isinstance(getattr(owner, "num_classes", None), int):
            owner.num_classes = count  # type: ignore[assignment]
    base = dataclasses.replace(network.base, num_classes=count)
    return dataclasses.replace(network, base=base, classes=data.classes)


def find_head(network: Network) -> tuple[str, nn.Linear | nn.Conv2d]:
    """Name and module of the layer that makes the class scores."""
    count = network.base.num_classes
    for name, module in reversed(list(network.module.named_modules())):
        if isinstance(module, nn.Linear) and module.out_features == count:
            return name, module
        if (
            isinstance(module, nn.Conv2d)
            and module.out_channels == count
            and module.kernel_size == (1, 1)
        ):
            return name, module
    raise InputError(
        f"cannot find the classifier of {network.base}",
        why=f"no linear or 1 x 1 convolution gives {count} scores",
        try_="--num-classes when the network is made",
    )
