"""Training before a stage names the options of prune, not those of finetune."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from painted import network

from dcptool.errors import GateFailed
from dcptool.pipeline.stage_training import StagePlan, StageTrainer
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
