"""Training before a stage names the options of prune, not those of finetune."""

from __future__ import annotations

from pathlib import Path

import pytest
from painted import network

from dcptool.errors import GateFailed
from dcptool.pipeline.stage_training import StagePlan, StageTrainer
from dcptool.training.data import DataSpec, open_data
from dcptool.training.settings import Training


def test_a_rate_that_is_too_large_is_called_as_prune_calls_it(folder: Path, tmp_path: Path) -> None:
    small = network()
    plan = StagePlan(
        steps=9,
        epochs=None,
        lr=1e30,
        options=Training(channels_last="off"),
        amp=None,
        batch_size=4,
        seed=0,
        device="cpu",
        workers=None,
        folder=tmp_path / "states",
        fingerprint={},
        resume_command="",
    )
    trainer = StageTrainer(small, open_data(DataSpec(data_dir=folder), small), plan, labels=[])
    with pytest.raises(GateFailed) as caught:
        trainer.fit_stage(small.module, None, 0, is_fitted=False)
    assert "--stage-lr" in caught.value.try_
