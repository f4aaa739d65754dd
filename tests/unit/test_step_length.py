"""The learning rate that is measured: as the curvature has it, never more than it was."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from torch import Tensor, nn

from dcptool.network.models import Input
from dcptool.training.dist import SINGLE
from dcptool.training.loader import Augment, Batches, ImageSet, Store, loader
from dcptool.training.loop import Run, fit
from dcptool.training.losses import Outcome, cross_entropy
from dcptool.training.optimizers import Optimizer
from dcptool.training.schedule import Schedule
from dcptool.training.sources import Arrays
from dcptool.training.step_length import RATIO, best_length, measured

SCHEDULE = Schedule(200, 0.005)


class Bowl(nn.Module):
    """Weights whose distance from one counts `steepness` times, whatever the images are."""

    def __init__(self, steepness: float) -> None:
        super().__init__()
        self.steepness = steepness
        self.weight = nn.Parameter(torch.zeros(4))
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        self.norm(images)
        return self.steepness * (self.weight - 1).square().sum() / 2


def height(model: nn.Module, images: Tensor, _targets: Tensor) -> Outcome:
    return Outcome(model(images))


def batches(count: int = 64) -> Batches:
    random = numpy.random.default_rng(0)
    pixels = random.integers(0, 255, (count, 8, 8), dtype=numpy.uint8)
    store = Store(Arrays(pixels), Input((3, 8, 8), (0.5,) * 3, (0.5,) * 3, crop_pct=1.0))
    labels = random.integers(0, 3, count)
    images = ImageSet("train", store, numpy.arange(count), labels, Augment(pad=1))
    return loader(images, 8, train=True, seed=0, workers=0)


@pytest.mark.parametrize("steepness", [300.0, 3_000.0, 1e5])
def test_the_best_length_is_one_over_the_curvature(steepness: float) -> None:
    found = best_length(Bowl(steepness), batches(), height, SCHEDULE, Run())
    assert RATIO < found * steepness < 1 / RATIO


def test_the_rate_is_never_more_than_it_was() -> None:
    found = measured(Bowl(1.0), batches(), height, SCHEDULE, Run(), SINGLE)
    assert found == SCHEDULE
    assert measured(Bowl(1e5), batches(), height, SCHEDULE, Run(), SINGLE).lr < 1e-5


def test_one_batch_is_enough_to_ask() -> None:
    found = best_length(Bowl(1e5), batches(8), height, Schedule(1, 0.005), Run())
    assert RATIO < found * 1e5 < 1 / RATIO


def test_the_network_is_left_as_it_was() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(), nn.LazyLinear(3)
    )
    model(torch.zeros(2, 3, 8, 8))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    first = best_length(model, batches(), cross_entropy(), SCHEDULE, Run())
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert first == best_length(model, batches(), cross_entropy(), SCHEDULE, Run())


def test_a_steep_network_learns_at_the_measured_rate_and_not_at_the_usual_one() -> None:
    start = height(Bowl(2_000.0), torch.zeros(2, 3, 8, 8), torch.zeros(2)).loss.item()
    ends = []
    for schedule in (
        Schedule(20, 0.005),
        measured(Bowl(2_000.0), batches(), height, Schedule(20, 0.005), Run(), SINGLE),
    ):
        model = Bowl(2_000.0)
        fit(model, batches(), [height], schedule, Run(channels_last="off"))
        ends.append(height(model, torch.zeros(2, 3, 8, 8), torch.zeros(2)).loss.item())
    usual, careful = ends
    assert usual > start > careful


def test_what_scales_each_step_itself_is_measured_along_its_own_way() -> None:
    """Down a steep bowl the gradient is long, and the first step of Adam as long as its rate."""
    model = Bowl(1e5)
    before = copy.deepcopy(model.state_dict())
    found = best_length(model, batches(), height, SCHEDULE, Run(optimizer=Optimizer("adamw")))
    assert found == pytest.approx(2 * SCHEDULE.lr)
    assert best_length(model, batches(), height, SCHEDULE, Run()) < 1e-4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
