"""Accuracy against a slow count."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from dcptool.errors import GateFailed
from dcptool.network.models import Input
from dcptool.training.dist import Dist
from dcptool.training.evaluate import Stopped, evaluate, predictor
from dcptool.training.loader import ImageSet, Store, loader
from dcptool.training.sources import Arrays

CLASSES = 7


def images(count: int = 23) -> ImageSet:
    random = numpy.random.default_rng(0)
    pixels = random.integers(0, 256, (count, 4, 4)).astype(numpy.uint8)
    store = Store(Arrays(pixels), Input((3, 4, 4), (0.5,) * 3, (0.5,) * 3, crop_pct=1.0))
    return ImageSet("test", store, numpy.arange(count), random.integers(0, CLASSES, count))


def scores(shown: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return shown.flatten(1) @ torch.randn(48, CLASSES)


def test_counts_are_right() -> None:
    whole = images()
    found = evaluate(scores, loader(whole, 5), CLASSES, per_class=True)
    shown, labels = next(iter(loader(whole, 23)))
    order = scores(shown).argsort(1, descending=True)
    right = [int(label) == int(row[0]) for row, label in zip(order, labels, strict=True)]
    five = [int(label) in row[:5].tolist() for row, label in zip(order, labels, strict=True)]
    assert found.top1 == pytest.approx(100 * sum(right) / 23)
    assert found.top5 == pytest.approx(100 * sum(five) / 23)
    assert found.images == 23
    assert found.images_per_second > 0
    for number, value in enumerate(found.per_class or ()):
        mine = [r for r, label in zip(right, labels, strict=True) if int(label) == number]
        assert value == (pytest.approx(100 * sum(mine) / len(mine)) if mine else None)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_together_count_every_image_once(world: int) -> None:
    whole = images()
    alone = evaluate(scores, loader(whole, 4), CLASSES)
    parts = [evaluate(scores, loader(whole, 4, dist=Dist(r, world)), CLASSES) for r in range(world)]
    assert sum(part.images for part in parts) == 23
    right = sum(part.top1 * part.images for part in parts)
    assert right / 23 == pytest.approx(alone.top1)


def test_fewer_than_five_classes() -> None:
    found = evaluate(lambda shown: torch.zeros(len(shown), 7)[:, :7], loader(images(), 4), CLASSES)
    assert found.top5 <= 100


def test_stop_is_heard() -> None:
    with pytest.raises(Stopped):
        evaluate(scores, loader(images(), 4), CLASSES, stop=lambda: True)


def test_nan_scores_are_no_accuracy() -> None:
    with pytest.raises(GateFailed, match="not finite"):
        evaluate(lambda shown: scores(shown) * math.nan, loader(images(), 4), CLASSES)


def test_the_predictor_leaves_the_mode_alone() -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(48, 7))
    module.train()
    predict = predictor(module)
    shown, _ = next(iter(loader(images(), 4)))
    assert torch.equal(predict(shown), predict(shown))
    assert module.training
