"""How many images are enough: few where few directions matter, more where there are many."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from click.testing import CliRunner

from dcptool.cli.prune_command import command
from dcptool.network import models
from dcptool.selection.enough import PLENTY, enough, useful
from dcptool.selection.probe import ENOUGH_ROWS
from dcptool.selection.settings import Selection


def _blocks(images: torch.Tensor) -> list[list[torch.Tensor]]:
    sizes = [16, 16, 32, 64, 128]
    return [list(part.split(32)) for part in images.split(sizes)]


def test_images_that_repeat_are_enough_sooner() -> None:
    network = models.load("zoo:resnet20", pretrained=False)
    settings = Selection(rate=Fraction("0.5"), positions=8)
    torch.manual_seed(0)
    noise = torch.randn(256, 3, 32, 32)
    plain = noise[:1].repeat(256, 1, 1, 1)
    few = enough(network, _blocks(plain), settings)
    many = enough(network, _blocks(noise), settings)
    assert few < many <= 256
    assert many == 256


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5", "1e99", ""])
def test_samples_is_a_count_or_auto(text: str) -> None:
    done = CliRunner().invoke(command, ["resnet18", "--rate", "0.5", "--samples", text])
    assert done.exit_code == 2
    assert "--samples" in done.output


def test_images_of_use_are_those_that_give_every_reader_its_rows() -> None:
    settings = Selection(rate=Fraction("0.5"), positions=128)
    small = models.load("zoo:resnet20", pretrained=False)
    assert useful(small, settings) == PLENTY
    wide = models.load("timm:resnet18", pretrained=False)
    # The second 3x3 conv of the last blocks: 512 channels and a bias at 49 positions.
    assert useful(wide, settings) == math.ceil(ENOUGH_ROWS * (512 * 9 + 1) / 49)
