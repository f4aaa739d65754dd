"""Curves of error against width, and the widths that lose least for a budget."""

from __future__ import annotations

import itertools
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from dcptool.network import models
from dcptool.network.graph import build_graph
from dcptool.selection import curves, widths
from dcptool.selection.settings import Selection


def _groups(sizes: dict[str, int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(name=name, units=range(size)) for name, size in sizes.items()]


@pytest.mark.parametrize("budget", [20, 33, 47, 60])
def test_widths_are_near_the_best_of_all(budget: int) -> None:
    sizes = {"a": 6, "b": 5, "c": 4}
    price = {"a": 4, "b": 5, "c": 3}
    errors = {
        "a": (1.0, 0.4, 0.2, 0.1, 0.05, 0.02, 0.0),
        "b": (1.0, 0.8, 0.6, 0.4, 0.2, 0.0),
        "c": (1.0, 0.1, 0.05, 0.02, 0.0),
    }

    def macs(kept: dict[str, int]) -> int:
        return sum(price[name] * width for name, width in kept.items())

    found = widths.spread(_groups(sizes), errors, budget, macs)
    assert macs(found) <= budget

    def total(kept: dict[str, int]) -> float:
        return sum(errors[name][width] for name, width in kept.items())

    every = itertools.product(*[range(1, size + 1) for size in sizes.values()])
    possible = [dict(zip(sizes, kept, strict=True)) for kept in every]
    best = min(total(kept) for kept in possible if macs(kept) <= budget)
    # One price cannot reach points above the lower hull: off by one unit's worth at most.
    assert total(found) <= best + 0.21


def test_curves_of_a_real_network_fall_and_spread_the_rate() -> None:
    network = models.load("zoo:resnet20", pretrained=False)
    torch.manual_seed(0)
    images = [torch.randn(8, 3, 32, 32)]
    settings = Selection(rate=Fraction("0.5"), positions=16, widths="curves")
    found = curves.measure(network, images, settings)
    groups = settings.groups(build_graph(network.module, network.input.size))
    assert set(found) == {group.name for group in groups}
    for group in groups:
        curve = found[group.name]
        assert len(curve) == len(group.units) + 1
        assert list(curve) == sorted(curve, reverse=True)
        assert curve[0] > 0.5
    macs = widths.macs_of(network, build_graph(network.module, network.input.size))
    uniform = macs({group.name: len(group.units) // 2 for group in groups})
    chosen = widths.spread(groups, found, uniform, macs)
    assert 0.98 * uniform <= macs(chosen) <= uniform
    assert set(chosen.values()) - {8, 16, 32}


def test_a_weak_branch_may_err_more() -> None:
    torch.manual_seed(0)
    network = models.load("zoo:resnet20", pretrained=False)
    images = [torch.randn(8, 3, 32, 32)]
    settings = Selection(rate=Fraction("0.5"), positions=16)
    before = curves.measure(network, images, settings)["layer2.1.conv1"]
    with torch.no_grad():
        network.module.layer2[1].bn2.weight *= 0.1
    after = curves.measure(network, images, settings)["layer2.1.conv1"]
    assert after[0] < 0.05 * before[0]
