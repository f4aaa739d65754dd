"""Every rule of selection against a slow computation of its own, from raw activations."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dcptool.errors import UsageError
from dcptool.network import models
from dcptool.network.base import Base, Input, Network
from dcptool.network.graph import build_graph
from dcptool.pipeline import widths
from dcptool.selection.methods import AT_ONCE, FROM_SCRATCH, METHODS
from dcptool.selection.methods.slimming import global_counts, norm_scales
from dcptool.selection.methods.width import afresh
from dcptool.selection.settings import Selection
from dcptool.selection.stages import select

SIZE = 8


class Plain(nn.Module):
    """Three convolutions with norms, the first two of which can lose channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 9, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(9)
        self.two = nn.Conv2d(9, 7, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(7)
        self.three = nn.Conv2d(7, 6, 3, padding=1, bias=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.one(x)))
        x = torch.relu(self.norm2(self.two(x)))
        return self.head(self.three(x).mean((2, 3)))


def network() -> Network:
    torch.manual_seed(0)
    module = Plain().eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, -1.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.3)
            nn.init.normal_(layer.running_mean, 0, 0.1)
    return Network(
        module, Base("custom", "Plain", 4), Input((3, SIZE, SIZE), (0.0,) * 3, (1.0,) * 3)
    )


def images() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return list(torch.randn(16, 3, SIZE, SIZE, generator=draw).split(8))


def kept(method: str, rate: str = "0.5") -> dict[str, tuple[int, ...]]:
    settings = Selection(
        rate=Fraction(rate), method=method, positions=SIZE * SIZE, target="conv", seed=5
    )
    outcome = select(network(), images(), settings)
    return {choice.group: choice.kept for choice in outcome.choices}


def features() -> Tensor:
    """What the second convolution reads, all images and channels."""
    module = network().module
    with torch.no_grad():
        return torch.relu(module.norm1(module.one(torch.cat(images()))))


def contributions() -> Tensor:
    """What each channel adds to each output of the second convolution: channels x numbers."""
    module, x = network().module, features().double()
    weight = module.two.weight.detach().double()
    parts = [
        nn.functional.conv2d(x[:, c : c + 1], weight[:, c : c + 1], padding=1).flatten()
        for c in range(x.shape[1])
    ]
    return torch.stack(parts)


def largest(values: Tensor, count: int) -> tuple[int, ...]:
    order = sorted(range(len(values)), key=lambda i: (-float(values[i]), i))
    return tuple(sorted(order[:count]))


def test_weight_sum() -> None:
    module = network().module
    sums = torch.stack([filter_.abs().sum() for filter_ in module.one.weight.detach()])
    assert kept("l1")["one"] == largest(sums, 5)


def test_apoz() -> None:
    zeros = (features() == 0).float().mean((0, 2, 3))
    assert kept("apoz")["one"] == largest(-zeros, 5)


def test_thinet() -> None:
    parts = contributions()
    gone: list[int] = []
    while len(gone) < 4:
        left = [c for c in range(9) if c not in gone]
        energy = {c: float(parts[[*gone, c]].sum(0).square().sum()) for c in left}
        gone.append(min(left, key=lambda c: energy[c]))
    assert kept("thinet")["one"] == tuple(c for c in range(9) if c not in gone)


def test_channel_pruning() -> None:
    from sklearn.linear_model import Lasso

    parts = contributions().numpy()
    target = parts.sum(0)
    for penalty in np.geomspace(1e-5, 10, 400):
        lasso = Lasso(alpha=penalty, fit_intercept=False, tol=1e-8, max_iter=100_000)
        alive = tuple(np.flatnonzero(np.abs(lasso.fit(parts.T, target).coef_) > 1e-9))
        if len(alive) <= 5:
            break
    assert len(alive) == 5
    assert kept("cp")["one"] == alive


def test_random_draws_anew_with_another_seed() -> None:
    draws = set()
    for seed in range(6):
        settings = Selection(rate=Fraction("0.5"), method="random", positions=4, seed=seed)
        choice = select(network(), images(), settings).choices[0]
        assert len(choice.kept) == 5
        draws.add(choice.kept)
    assert len(draws) > 3


def by_scale(given: Network, settings: Selection) -> Selection:
    graph = build_graph(given.module, given.input.size)
    return replace(settings, rate=None, plan=widths.by_scale(given, graph, settings))


def test_slimming_has_one_threshold_for_all() -> None:
    settings = by_scale(network(), Selection(rate=Fraction("0.4"), method="slimming"))
    module = network().module
    scales = [
        (abs(value.item()), name, channel)
        for name, norm in (("one", module.norm1), ("two", module.norm2))
        for channel, value in enumerate(norm.weight)
    ]
    stay = sorted(scales)[math.floor(0.4 * 16) :]
    wanted = {
        name: tuple(sorted(channel for _, where, channel in stay if where == name))
        for name in ("one", "two")
    }
    assert settings.plan == {name: len(channels) for name, channels in wanted.items()}
    assert len({len(channels) / 9 for channels in wanted.values()}) == 2
    found = {c.group: c.kept for c in select(network(), images(), settings).choices}
    assert found == wanted


def test_slimming_leaves_one_and_needs_norms() -> None:
    scales = {"a": torch.tensor([0.1, 0.2]), "b": torch.tensor([1.0, 2.0, 3.0])}
    assert global_counts(scales, Fraction("0.5")) == {"a": 1, "b": 3}
    assert global_counts(scales, Fraction("0.8")) == {"a": 1, "b": 1}
    assert global_counts(scales, Fraction(0)) == {"a": 2, "b": 3}
    bare = models.load("zoo:spherenet4", pretrained=False, num_classes=5)
    graph = build_graph(bare.module, bare.input.size)
    assert norm_scales(bare.module, graph, graph.groups[0]) is None
    settings = by_scale(bare, Selection(rate=Fraction("0.5"), method="slimming"))
    with pytest.raises(UsageError, match="slimming cannot rank conv1_1"):
        select(bare, [torch.zeros(2, 3, 112, 96)], settings)


@pytest.mark.parametrize("method", ["wm", "wm+"])
def test_a_width_multiplier_takes_no_weights(method: str) -> None:
    trained = models.load("zoo:resnet20", pretrained=False, seed=3)
    settings = Selection(rate=Fraction("0.5"), method=method)
    slim = select(trained, [torch.zeros(2, 3, 32, 32)], settings).network
    afresh(slim, 7)
    fresh = models.load("zoo:resnet20", pretrained=False, seed=7).module
    inner = slim.module.layer1[0].conv1.weight
    assert inner.shape == (8, 16, 3, 3)
    assert torch.equal(inner, fresh.layer1[0].conv1.weight[:8])
    assert torch.equal(slim.module.linear.weight, fresh.linear.weight)
    assert not torch.equal(slim.module.linear.weight, trained.module.linear.weight)
    assert method in FROM_SCRATCH & AT_ONCE & METHODS.keys()
