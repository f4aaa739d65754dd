"""Refits seen through a ReLU, against a slow descent on the same loss; where they apply."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dcptool.network.graph import build_graph
from dcptool.selection import gram
from dcptool.selection.chain import build_chain
from dcptool.selection.gathering import Gathering, of_sample
from dcptool.selection.rectify import Sample, rectified
from dcptool.selection.targets import RELU, RELU6, Bounds, find_target

ROWS, COLUMNS, OUTPUTS = 4000, 6, 3


def nothing(*_tensors: Tensor) -> None:
    """One process has nothing to add up."""


def loss(sample: Sample, weights: Tensor) -> Tensor:
    """Squared error of what counts: all of it inside the bounds, what sticks out beyond them."""
    low, high = sample.bounds
    wanted = sample.scale * (sample.targets - sample.zeros)
    given = sample.scale * (sample.rows @ weights[:-1] + weights[-1] - sample.zeros)
    inside = (wanted > low) & (wanted < high)
    below, above = (given - low).clamp_min(0), (given - high).clamp_max(0)
    error = torch.where(inside, given - wanted, torch.where(wanted <= low, below, above))
    return (error / sample.scale).square().sum() / len(sample.rows)


@pytest.mark.parametrize("bounds", [RELU, RELU6])
@pytest.mark.parametrize("keep", [4, 8])
def test_steps_go_where_a_slow_descent_goes(bounds: Bounds, keep: int, monkeypatch) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, COLUMNS, generator=draw)
    truth = torch.randn(COLUMNS, OUTPUTS, generator=draw)
    targets = (rows @ truth).tanh() * 4 + torch.randn(ROWS, OUTPUTS, generator=draw)
    zeros = torch.randn(ROWS, OUTPUTS, generator=draw)
    scale = torch.tensor([1.0, -0.5, 2.0])
    gathering = Gathering(torch.arange(COLUMNS), OUTPUTS, keep, ROWS // 8)
    for begin in (0, ROWS // 2):
        part = slice(begin, begin + ROWS // 2)
        gathering.add(rows[part], targets[part], zeros[part], ROWS // 16, ROWS // 4)
    moments = gathering.finish(nothing)
    sample = gathering.sample(scale, bounds, nothing)
    assert sample.count == ROWS * keep // 8
    start = gram.refit(moments, torch.ones(COLUMNS + 1, dtype=torch.bool), ridge=0.0)
    seen = of_sample(moments, sample, nothing)
    assert seen.rows == sample.count
    solve = gram.solver(seen, torch.ones(COLUMNS + 1, dtype=torch.bool), ridge=0.0)
    few = rectified(sample, start, solve, nothing)
    assert loss(sample, few.float()) < 0.9 * loss(sample, start.float())
    if keep < 8:
        return  # with part of the rows the start is not their own minimum, and stays in the sum
    monkeypatch.setattr("dcptool.selection.rectify.STEPS", 300)
    found = rectified(sample, start, solve, nothing).float()
    slow = start.float().clone().requires_grad_()
    optimizer = torch.optim.LBFGS([slow], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(sample, slow)
        value.backward()
        return value

    optimizer.step(closure)
    assert torch.allclose(found, slow.detach(), atol=2e-3)


class Seen(nn.Module):
    """Convs whose outputs are seen through this and that."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.relu6 = nn.ReLU(), nn.ReLU6()
        self.plain, self.normed, self.summed, self.twice, self.smooth = (
            nn.Conv2d(4, 4, 1) for _ in range(5)
        )
        self.norm = nn.BatchNorm2d(4)
        self.stem, self.act = nn.Conv2d(3, 4, 1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        x = self.relu(self.plain(self.stem(x)))
        x = self.relu6(self.norm(self.normed(x)))
        x = torch.relu(self.summed(x) + x)
        y = self.twice(x)
        x = torch.relu(y) + y
        return self.act(self.smooth(x)).mean((2, 3))


def test_bounds_are_those_of_the_only_activation_that_reads() -> None:
    module = Seen().eval()
    graph = build_graph(module, (3, 8, 8))
    names = [site.name for site in graph.sites.values() if site.is_dense]
    chain = build_chain(module, (3, 8, 8), names)
    found = {
        name: find_target(
            chain.segments[chain.place_of(name)], chain.calls[name][0], module, "block"
        ).bounds
        for name in names
    }
    assert found["plain"] == (0.0, math.inf)
    assert found["normed"] == (0.0, 6.0)
    assert found["summed"] == (0.0, math.inf)
    assert found["stem"] is None
    assert found["twice"] is None
    assert found["smooth"] is None
