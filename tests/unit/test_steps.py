"""Steps on the joint loss after a refit: the gradient, and that the loss never rises."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dcptool.network import models
from dcptool.network.surgery import randomise
from dcptool.selection import steps
from dcptool.selection.heads import summed
from dcptool.selection.settings import Selection
from dcptool.selection.stages import select
from dcptool.selection.steps import Steps

READER = "layer3.1.conv2"


@pytest.fixture
def network():
    found = models.load("zoo:resnet20", pretrained=False)
    randomise(found.module)
    found.module.eval()
    return found


def test_the_slope_is_that_of_plain_autograd(network, monkeypatch):
    torch.manual_seed(0)
    images = [torch.randn(16, 3, 32, 32) for _ in range(2)]
    labels = [torch.randint(10, (16,)) for _ in range(2)]
    seen: list[torch.Tensor] = []
    states: list[dict[str, torch.Tensor]] = []
    plain = Steps._slope

    def noted(self: Steps, tail: Any, end: Any, name: str) -> Any:
        found = plain(self, tail, end, name)
        if name == READER:
            seen.append(found[0])
            states.append(copy.deepcopy(self.probe.current.state_dict()))
        return found

    monkeypatch.setattr(Steps, "_slope", noted)
    settings = Selection(rate=Fraction("0.5"), positions=16, loop_epochs=1)
    select(network, images, settings, losses=[summed(None, y) for y in labels])
    module = copy.deepcopy(network.module).eval()
    module.load_state_dict(states[0])
    halves = [(x[:8], y[:8]) for x, y in zip(images, labels, strict=True)]
    loss = sum(F.cross_entropy(module(x), y, reduction="sum") for x, y in halves) / 16
    weight = module.get_submodule(READER).weight
    (by_hand,) = torch.autograd.grad(loss, weight)
    assert by_hand.abs().max() > 1e-4
    torch.testing.assert_close(seen[0][:-1].float(), by_hand.flatten(1).T, rtol=1e-3, atol=1e-6)


def test_a_step_lowers_the_loss_on_the_other_half(network, monkeypatch):
    torch.manual_seed(0)
    images = [torch.randn(32, 3, 32, 32)]
    labels = network.module(images[0]).argmax(1)
    rises: dict[str, list[float]] = {}
    plain = Steps._rise

    def noted(self: Steps, tail: Any, end: Any, name: str, *rest: Any) -> float:
        found = plain(self, tail, end, name, *rest)
        rises.setdefault(name, []).append(found)
        return found

    monkeypatch.setattr(Steps, "_rise", noted)
    given = [summed(None, labels)]
    settings = Selection(rate=Fraction("0.5"), positions=16, discrimination=float("inf"))
    before = select(network, images, settings, losses=given)
    stepped = Selection(**{**settings.__dict__, "loop_epochs": 1})
    after = select(network, images, stepped, losses=given)
    moved = [name for name, tried in rises.items() if min(tried) < 0]
    assert moved
    first = moved[0]
    one, two = (o.network.module.get_submodule(first).weight for o in (before, after))
    assert not torch.equal(one, two)
    assert all(len(tried) == len(steps.LENGTHS) for tried in rises.values())


def test_without_a_gain_the_weights_stay(network, monkeypatch):
    torch.manual_seed(0)
    images = [torch.randn(16, 3, 32, 32)]
    given = [summed(None, torch.randint(10, (16,)))]
    monkeypatch.setattr(Steps, "_rise", lambda *args: 1.0)
    settings = Selection(rate=Fraction("0.5"), positions=16)
    plain = select(network, images, settings, losses=given).network.module.state_dict()
    again = Selection(**{**settings.__dict__, "loop_epochs": 2})
    tried = select(network, images, again, losses=given).network.module.state_dict()
    assert all(torch.equal(plain[key], tried[key]) for key in plain)
