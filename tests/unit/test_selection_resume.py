"""Selection that was stopped at any edge goes on to the same network."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from three_blocks import SPEC, blocks, loss_at_pivot, noise
from torch import nn

from dcptool.network.base import Base, Network
from dcptool.selection.settings import Selection
from dcptool.selection.stages import Progress, select


@pytest.mark.parametrize("stop_at", [1, 3, 5])
@pytest.mark.parametrize("solver", ["gram", "sgd"])
@pytest.mark.parametrize("residual", [False, True])
def test_going_on_from_any_edge_gives_the_same_network(
    stop_at: int, solver: str, residual: bool
) -> None:
    network, images = blocks(), noise()
    target = "conv" if solver == "sgd" else "block"
    settings = Selection(
        rate=Fraction("0.5"),
        positions=16,
        losses=1,
        solver=solver,
        target=target,
        prune_residual=residual,
    )
    fitted: list[int] = []

    def fit_stage(module: nn.Module, pivot: str | None, number: int, is_fitted: bool):
        if not is_fitted:
            fitted.append(number)
            with torch.no_grad():
                module.one.conv1.weight.mul_(1.01)
        return [loss_at_pivot] * len(images)

    whole = select(network, images, settings, fit_stage=fit_stage)
    seen: list[Progress] = []

    class Enough(Exception):
        pass

    def edge(progress: Progress) -> None:
        weights = {k: v.clone() for k, v in progress.weights.items()}
        seen.append(replace(progress, weights=weights))
        if len(seen) == stop_at:
            raise Enough

    def goes_on_from(start: Progress) -> None:
        rest = select(network, images, settings, fit_stage=fit_stage, start=start)
        assert fitted == [0, 1]
        assert rest.choices == whole.choices
        wanted = whole.network.module.state_dict()
        got = rest.network.module.state_dict()
        assert all(torch.equal(wanted[k], got[k]) for k in wanted)
        assert rest.network.cuts == whole.network.cuts

    fitted.clear()
    with pytest.raises(Enough):
        select(network, images, settings, fit_stage=fit_stage, edge=edge)
    goes_on_from(seen[-1])

    # Stopped in the middle of a layer: the last edge still holds, without a copy of its weights.
    seen.clear()
    fitted.clear()
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(0)
        if len(ticks) == 2 * stop_at:
            raise Enough

    with pytest.raises(Enough):
        select(network, images, settings, fit_stage=fit_stage, edge=seen.append, tick=tick)
    goes_on_from(seen[-1])


class Gated(nn.Module):
    """A gate on the inner channels (two readers, one after the other), and no norms."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.expand = nn.Conv2d(8, 12, 1)
        self.reduce = nn.Conv2d(12, 4, 1)
        self.restore = nn.Conv2d(4, 12, 1)
        self.project = nn.Conv2d(12, 8, 1)
        self.act = nn.SiLU(inplace=in_place)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.stem(x))
        inner = self.act(self.expand(x))
        gate = self.restore(self.act(self.reduce(inner.mean((2, 3), keepdim=True))))
        y = self.project(inner * torch.sigmoid(gate))
        y = y.add_(x) if self.act.inplace else y + x
        return self.head(self.act(y).mean((2, 3)))


def _gated(*, in_place: bool = False) -> Network:
    torch.manual_seed(0)
    return Network(Gated(in_place=in_place).eval(), Base("custom", "Gated", 5), SPEC)


@pytest.mark.parametrize("solver", ["gram", "sgd"])
def test_layers_that_work_in_place_change_nothing(solver: str) -> None:
    """What is kept of a tensor is what it was when it was computed."""
    target = "conv" if solver == "sgd" else "block"
    settings = Selection(
        rate=Fraction("0.5"), positions=16, solver=solver, target=target, prune_residual=True
    )
    plain = select(_gated(), noise(), settings)
    same = select(_gated(in_place=True), noise(), settings)
    assert plain.choices == same.choices
    wanted, got = plain.network.module.state_dict(), same.network.module.state_dict()
    assert all(torch.equal(wanted[k], got[k]) for k in wanted)


def test_stopped_at_any_batch_of_a_second_walk_it_goes_on_to_the_same_network() -> None:
    """The residual group is decided last, and the walk goes back over layers that have decided."""
    network, images = blocks(), noise()
    settings = Selection(rate=Fraction("0.5"), positions=16, losses=1, prune_residual=True)

    def fit_stage(_module: nn.Module, _pivot: str | None, _number: int, _is_fitted: bool):
        return [loss_at_pivot] * len(images)

    ticks: list[int] = []
    tick = partial(ticks.append, 0)
    whole = select(network, images, settings, fit_stage=fit_stage, tick=tick)
    wanted = whole.network.module.state_dict()

    class Enough(Exception):
        pass

    for stop_at in range(1, len(ticks) + 1):
        seen: list[Progress] = []
        left = iter([*[None] * (stop_at - 1), Enough])

        def stop(left: Iterator[type[Enough] | None] = left) -> None:
            fault = next(left)
            if fault is not None:
                raise fault

        with pytest.raises(Enough):
            select(network, images, settings, fit_stage=fit_stage, edge=seen.append, tick=stop)
        rest = select(network, images, settings, fit_stage=fit_stage, start=seen[-1])
        got = rest.network.module.state_dict()
        assert all(torch.equal(wanted[k], got[k]) for k in wanted), stop_at


def test_stopped_between_two_readers_of_a_gate_it_goes_on_from_before_both() -> None:
    network, images = _gated(), noise()
    settings = Selection(rate=Fraction("0.5"), positions=16, ridge=0.1)
    whole = select(network, images, settings)
    ticks: list[int] = []
    select(network, images, settings, tick=lambda: ticks.append(0))

    class Enough(Exception):
        pass

    for stop_at in range(1, len(ticks) + 1):
        seen: list[Progress] = []
        left = [stop_at]

        def tick(left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise Enough

        with pytest.raises(Enough):
            select(network, images, settings, edge=seen.append, tick=tick)
        rest = select(network, images, settings, start=seen[-1])
        assert rest.choices == whole.choices
        wanted, got = whole.network.module.state_dict(), rest.network.module.state_dict()
        assert all(torch.equal(wanted[k], got[k]) for k in wanted), stop_at


def test_going_on_after_a_group_that_stays_whole_gives_the_same_network() -> None:
    network, images = blocks(), noise()
    settings = Selection(rate=Fraction("0.5"), rates={"one.*": Fraction(0)}, positions=16)
    whole = select(network, images, settings)
    seen: list[Progress] = []

    def edge(progress: Progress) -> None:
        seen.append(replace(progress, weights=copy.deepcopy(dict(progress.weights))))

    select(network, images, settings, edge=edge)
    for progress in seen:
        rest = select(network, images, settings, start=progress)
        wanted, got = whole.network.module.state_dict(), rest.network.module.state_dict()
        assert all(torch.equal(wanted[k], got[k]) for k in wanted)
