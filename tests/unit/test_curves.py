"""Curves of error against width, and the widths that lose least for a budget."""

from __future__ import annotations

import copy
import itertools
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcptool.network import models
from dcptool.network.graph import Group, build_graph
from dcptool.network.surgery import randomise
from dcptool.selection import curves, sensitivity, widths
from dcptool.selection.gram import Ranking
from dcptool.selection.sensitivity import Sensitivity
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
        assert curve[0] > 0.0
    macs = widths.macs_of(network, build_graph(network.module, network.input.size))
    uniform = macs({group.name: len(group.units) // 2 for group in groups})
    chosen = widths.spread(groups, found, uniform, macs)
    assert 0.98 * uniform <= macs(chosen) <= uniform
    assert set(chosen.values()) - {8, 16, 32}


def test_a_curve_is_the_error_of_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by hand: least squares on the first half of the images, scores of the second."""
    monkeypatch.setattr(sensitivity, "best_ridge", lambda *args, **kwargs: 1e-13)
    monkeypatch.setattr(sensitivity, "SHARES", (0.5,))
    rankings: list[Ranking] = []
    plain = Sensitivity.curve

    def noted(self: Sensitivity, group: Group, ranking: Ranking, seen: Any) -> widths.Curve:
        if group.name == "layer3.1.conv1":
            rankings.append(ranking)
        return plain(self, group, ranking, seen)

    monkeypatch.setattr(Sensitivity, "curve", noted)
    network = models.load("zoo:resnet20", pretrained=False)
    torch.manual_seed(0)
    randomise(network.module)
    images = torch.randn(48, 3, 32, 32)
    settings = Selection(rate=Fraction("0.5"), positions=64)
    before = {k: v.clone() for k, v in network.module.state_dict().items()}
    found = curves.measure(network, [images], settings)["layer3.1.conv1"]
    after = network.module.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)

    module = copy.deepcopy(network.module).eval()
    block = module.layer3[1]
    kept = sorted(rankings[0].order[:32])
    given: list[torch.Tensor] = []
    block.conv2.register_forward_hook(lambda _m, args, out: given.extend([args[0], out]))
    with torch.no_grad():
        wanted = module(images)
        read, made = given
        patches = torch.nn.functional.unfold(read[:24, kept], 3, padding=1)
        rows = patches.transpose(1, 2).flatten(0, 1).double()
        rows = torch.cat([rows, torch.ones(len(rows), 1).double()], dim=1)
        target = made[:24].permute(0, 2, 3, 1).flatten(0, 2).double()
        solved = torch.linalg.lstsq(rows, target).solution
        weight = torch.zeros_like(block.conv2.weight)
        weight[:, kept] = solved[:-1].T.reshape(64, 32, 3, 3).float()
        block.conv2.weight.copy_(weight)
        block.bn2.running_mean -= solved[-1].float()
        scores = module(images)
    wanted, scores = (x[24:] - x[24:].mean(1, keepdim=True) for x in (wanted, scores))
    by_hand = float((wanted - scores).square().sum() / wanted.square().sum())
    assert by_hand > 1e-4
    assert found[32] == pytest.approx(by_hand, rel=0.01)


def test_a_branch_that_reaches_no_score_costs_nothing() -> None:
    torch.manual_seed(0)
    network = models.load("zoo:resnet20", pretrained=False)
    randomise(network.module)
    with torch.no_grad():
        network.module.layer2[1].bn2.weight.zero_()
    settings = Selection(rate=Fraction("0.5"), positions=16)
    found = curves.measure(network, [torch.randn(8, 3, 32, 32)], settings)
    assert found["layer2.1.conv1"][4] < 1e-6 < found["layer2.2.conv1"][4]


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


def test_images_that_come_one_by_one_have_curves_too() -> None:
    torch.manual_seed(0)
    network = models.load("zoo:resnet20", pretrained=False)
    randomise(network.module)
    settings = Selection(rate=Fraction("0.5"), positions=64)
    found = curves.measure(network, list(torch.randn(6, 1, 3, 32, 32)), settings)
    assert all(curve[1] > curve[-1] >= 0 for curve in found.values())
