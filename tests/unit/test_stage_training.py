"""Training before a stage names the options of prune, not those of finetune."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from painted import network
from torch import Tensor, nn

from dcptool.errors import GateFailed
from dcptool.network import models
from dcptool.pipeline.stage_training import StagePlan, StageTrainer
from dcptool.selection.heads import new_head, width_at
from dcptool.training.data import DataSpec, open_data
from dcptool.training.settings import Training


def _plan(place: Path, steps: int | None = None, lr: float = 0.1) -> StagePlan:
    return StagePlan(
        steps=steps,
        epochs=None,
        lr=lr,
        options=Training(channels_last="off"),
        amp=None,
        batch_size=4,
        seed=0,
        device="cpu",
        workers=None,
        folder=place / "states",
        fingerprint={},
        resume_command="",
    )


def test_a_rate_that_is_too_large_is_called_as_prune_calls_it(folder: Path, tmp_path: Path) -> None:
    small = network()
    plan = _plan(tmp_path, steps=9, lr=1e30)
    trainer = StageTrainer(small, open_data(DataSpec(data_dir=folder), small), plan, [], [])
    with pytest.raises(GateFailed) as caught:
        trainer.fit_stage(small.module, None, 0, is_fitted=False)
    assert "--stage-lr" in caught.value.try_


def test_in_closed_form_the_head_is_fitted_and_the_network_left_alone(
    folder: Path, tmp_path: Path
) -> None:
    small = network()
    plan = _plan(tmp_path)
    torch.manual_seed(0)
    labels = torch.arange(40) % 2
    images = torch.randn(40, 3, 16, 16) + 2 * labels.view(-1, 1, 1, 1)
    before = {key: value.clone() for key, value in small.module.state_dict().items()}
    data = open_data(DataSpec(data_dir=folder), small)
    trainer = StageTrainer(small, data, plan, images.split(20), labels.split(20))
    losses = trainer.fit_stage(small.module, "0", 0, is_fitted=False)
    with torch.no_grad():
        found = [
            float(loss(small.module[0](batch))) / 20
            for loss, batch in zip(losses, images.split(20), strict=True)
        ]
    assert max(found) < 0.35  # a head that knows nothing has log 2 = 0.69
    assert all(torch.equal(value, before[key]) for key, value in small.module.state_dict().items())
    assert plan.updates(1000) == 0
    assert replace(plan, solver="sgd").updates(1000) == 100
    assert replace(plan, steps=7).updates(1000) == 7


class Shaped(nn.Module):
    """Returns zeros of a shape, whatever it is given."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), *self.shape)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((512, 32, 32), 512),
        ((32, 32, 32), 32),
        ((7, 7, 96), 96),
        ((64, 7, 5), 64),
        ((5, 192), 192),
        ((64, 64), 64),
        ((10,), 10),
    ],
)
def test_channels_come_first_or_last(shape: tuple[int, ...], channels: int) -> None:
    assert width_at(nn.Sequential(Shaped(*shape)), "0", (3, 8, 8)) == channels
    assert new_head(channels, 2, 0)(torch.zeros(4, *shape)).shape == (4, 2)


def test_a_head_reads_tokens_and_maps_with_channels_last() -> None:
    torch.manual_seed(0)
    maps = torch.randn(4, 6, 5, 5)
    head = new_head(6, 2, 0).eval()
    assert torch.allclose(head(maps.permute(0, 2, 3, 1)), head(maps), atol=1e-6)
    assert torch.allclose(head(maps.flatten(2).transpose(1, 2)), head(maps), atol=1e-6)


def test_heads_are_fitted_to_tokens(folder: Path, tmp_path: Path) -> None:
    small = models.load("timm:test_vit", pretrained=False, num_classes=2, img_size=160)
    data = open_data(DataSpec(data_dir=folder), small)
    labels = torch.arange(12) % 2
    images = torch.randn(12, 3, 160, 160) + 2 * labels.view(-1, 1, 1, 1)
    trainer = StageTrainer(small, data, _plan(tmp_path), [images], [labels])
    trainer.fit_stage(small.module, "blocks.0", 0, is_fitted=False)
    assert trainer.head is not None
    assert trainer.head.norm.running_mean.shape == (64,)
    assert trainer.head.norm.running_var.min() > 0
