"""Whether held-out images are new to a network: it is surer of those that it has learnt from."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from painted import network
from torch import Tensor, nn

from dcptool.training import data as images
from dcptool.training.data import Data, DataSpec
from dcptool.training.familiar import FEWEST, knows_held_out
from dcptool.training.loader import loader
from dcptool.training.sources import Arrays


class ByHeart(nn.Module):
    """Sure of the images that it was shown, and of no others."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known = {self._key(image) for image in known}

    def forward(self, batch: Tensor) -> Tensor:
        sure = torch.tensor([self._key(image) in self.known for image in batch]).float()
        return torch.stack([torch.zeros(len(batch)), 1 + 3 * sure], dim=1)

    @staticmethod
    def _key(image: Tensor) -> float:
        return round(float(image.double().sum()), 3)


@pytest.fixture
def held_out() -> Data:
    """1,200 images of the second of two classes, of which a half is held out."""
    pixels = numpy.random.default_rng(0).integers(0, 256, (1200, 16, 16, 3), dtype=numpy.uint8)
    part = images.Part(Arrays(pixels), (1,) * 1200, ("a", "b"), "")
    parts = images.Parts("made", train=part)
    spec = DataSpec(val_fraction=0.5)
    return images._assemble(spec, parts, network().input, need_train=True)


def _all(data: Data, *names: str) -> Tensor:
    return torch.cat([x for name in names for x, _ in loader(getattr(data, name))])


def test_images_that_were_learnt_from_are_known(held_out: Data) -> None:
    public = ByHeart(_all(held_out, "train", "val"))
    assert knows_held_out(public, held_out)
    honest = ByHeart(_all(held_out, "train"))
    assert not knows_held_out(honest, held_out)


def test_a_split_of_its_own_or_a_few_images_are_taken_as_they_are(held_out: Data) -> None:
    public = ByHeart(_all(held_out, "train", "val"))
    assert not knows_held_out(public, replace(held_out, val_is_held_out=False))
    few = held_out.val.subset(numpy.arange(FEWEST - 1), "val")
    assert not knows_held_out(public, replace(held_out, val=few))
