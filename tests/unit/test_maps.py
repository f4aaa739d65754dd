"""Learning from maps: what they add to a loss, and where two networks have the same ones."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from dcptool.network import models
from dcptool.network.graph import build_graph
from dcptool.network.surgery import cut, plan_cuts
from dcptool.training.losses import Outcome, distill
from dcptool.training.maps import seen_at, shared_pivots, with_maps

SIZE = (3, 32, 32)


def _plain(model: nn.Module, images: Tensor, _targets: Tensor) -> Outcome:
    return Outcome(model(images).sum() * 0 + 1.0)


def test_the_error_of_maps_counts_as_a_share_of_their_energy() -> None:
    one, other = nn.Sequential(nn.Conv2d(1, 2, 1)), nn.Sequential(nn.Conv2d(1, 2, 1))
    images = torch.randn(4, 1, 5, 5)
    with seen_at(one, ["0"]) as given, seen_at(other, ["0"]) as wanted:
        other(images)
        goal = wanted["0"].detach()
        found = with_maps(_plain, given, wanted, 3.0)(one, images, torch.zeros(4)).loss
    expected = 1 + 3 * (one(images) - goal).square().mean() / goal.var()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert not one[0]._forward_hooks


def test_a_slim_network_learns_the_maps_of_the_dense_one() -> None:
    torch.manual_seed(0)
    dense = models.load("zoo:resnet20", pretrained=False).module.eval()
    slim = models.load("zoo:resnet20", pretrained=False, seed=1).module
    names = shared_pivots(slim, dense, SIZE)
    assert len(names) == 3
    images = torch.randn(8, *SIZE)
    optimizer = torch.optim.SGD(slim.parameters(), 0.01)
    losses = []
    with seen_at(slim, names) as given, seen_at(dense, names) as wanted:
        loss = with_maps(distill(dense), given, wanted, 1.0)
        for _ in range(6):
            optimizer.zero_grad()
            found = loss(slim.train(), images, torch.zeros(8, dtype=torch.long)).loss
            found.backward()
            optimizer.step()
            losses.append(found.item())
    assert losses[-1] < 0.8 * losses[0]


def test_maps_of_another_width_are_left_out() -> None:
    dense = models.load("zoo:resnet20", pretrained=False).module.eval()
    slim = models.load("zoo:resnet20", pretrained=False).module.eval()
    graph = build_graph(slim, SIZE)
    everywhere = shared_pivots(slim, dense, SIZE)
    coupled = next(group for group in graph.groups if group.status == "coupled")
    gone = set(coupled.units[: int(len(coupled.units) * Fraction(1, 2))])
    cut(slim, plan_cuts(graph, gone))
    left = shared_pivots(slim, dense, SIZE)
    assert set(left) < set(everywhere)
