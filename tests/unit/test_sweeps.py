"""Solving the slim network once more, and keeping it only where it helps."""

from __future__ import annotations

import copy
from fractions import Fraction

import torch

from dcptool.network import models
from dcptool.pipeline.agreement import TEMPERATURES, agree, settle
from dcptool.selection.settings import Selection
from dcptool.selection.stages import select, solve_again
from dcptool.training.data import DataSpec, open_data


def _gap(one: torch.nn.Module, other: torch.nn.Module, images: torch.Tensor) -> float:
    with torch.no_grad():
        return float((one.eval()(images) - other.eval()(images)).square().mean())


def test_a_sweep_mends_what_was_disturbed() -> None:
    torch.manual_seed(0)
    network = models.load("zoo:resnet20", pretrained=False)
    images = [torch.randn(16, 3, 32, 32) for _ in range(2)]
    settings = Selection(rate=Fraction("0.3"), positions=32)
    outcome = select(network, images, settings)
    with torch.no_grad():
        for parameter in outcome.network.module.parameters():
            if parameter.dim() == 4:
                parameter += 0.2 * parameter.std() * torch.randn_like(parameter)
    before = copy.deepcopy(outcome.network.module)
    after = solve_again(network, outcome, images, settings)
    assert {k: v.shape for k, v in after.state_dict().items()} == {
        k: v.shape for k, v in before.state_dict().items()
    }
    fresh = torch.randn(16, 3, 32, 32)
    dense = network.module
    assert _gap(dense, after, fresh) < 0.5 * _gap(dense, before, fresh)


def test_only_what_helps_is_kept() -> None:
    network = models.load("zoo:resnet20", pretrained=False, num_classes=10)
    images = open_data(DataSpec(), network).val
    near, far = copy.deepcopy(network.module), copy.deepcopy(network.module)
    with torch.no_grad():
        for parameter in far.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    slim = copy.deepcopy(far)
    assert settle(network.module, slim, near, images, "near")
    assert torch.equal(slim.state_dict()["conv1.weight"], near.state_dict()["conv1.weight"])
    assert not settle(network.module, slim, far, images, "far")
    assert torch.equal(slim.state_dict()["conv1.weight"], near.state_dict()["conv1.weight"])


def test_a_gain_within_the_noise_is_no_gain(monkeypatch) -> None:
    network = models.load("zoo:resnet20", pretrained=False, num_classes=10)
    images = open_data(DataSpec(), network).val
    slim = copy.deepcopy(network.module)
    noise = torch.Generator().manual_seed(0)
    asked: list[int] = []

    def drawn(wanted: torch.Tensor, _given: torch.Tensor) -> torch.Tensor:
        asked.append(1)
        better = 0.001 if len(asked) % 2 else 0.0
        values = torch.rand(len(wanted), 1, generator=noise, dtype=torch.float64)
        return (better + values).expand(-1, len(TEMPERATURES))

    monkeypatch.setattr("dcptool.pipeline.agreement._at_temperatures", drawn)
    assert not settle(network.module, slim, copy.deepcopy(slim), images, "noise")


def test_a_change_that_only_makes_bolder_is_no_gain() -> None:
    torch.manual_seed(0)
    network = models.load("zoo:resnet20", pretrained=False, num_classes=10)
    images = open_data(DataSpec(), network).val
    slim, tried = copy.deepcopy(network.module), copy.deepcopy(network.module)
    with torch.no_grad():
        for parameter in (slim.linear.weight, slim.linear.bias):
            parameter *= 0.6
        noise = torch.randn_like(tried.linear.weight)
        tried.linear.weight += 0.005 * tried.linear.weight.std() * noise
    cautious, bold = (agree(network.module, each, images) for each in (slim, tried))
    assert cautious.top1 == 100 > bold.top1
    assert cautious.kl > bold.kl
    assert not settle(network.module, slim, tried, images, "bolder")
