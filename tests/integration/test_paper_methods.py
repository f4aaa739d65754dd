"""Methods that train around a cut, and angular losses, through the commands themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dcptool
from dcptool.cli import app
from dcptool.network import artifact

QUICK = {"samples": 16, "positions": 4, "batch_size": 16, "round_to": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights of a small network."""
    folder = tmp_path_factory.mktemp("methods")
    target = f"--safetensors={folder / 'dense.safetensors'}"
    assert app.run(["export", "zoo:resnet20", "--no-pretrained", "--seed=9", "-q", target]) == 0
    return folder


def prune(place: Path, name: str, **options: object) -> dict:
    return dcptool.prune(
        "zoo:resnet20",
        checkpoint=place / "dense.safetensors",
        output=place / name,
        runs_dir=place / "runs",
        **{**QUICK, "rate": 0.5, **options},
    )


def test_a_width_multiplier_with_extra_losses(place):
    document = prune(place, "wide", method="wm+")
    assert document["slim"]["params"] < document["dense"]["params"]
    assert document["seconds"]["training"] == 0
    slim = artifact.load(place / "wide").module
    again = artifact.load(place / "wide").module
    dense = dcptool.load("zoo:resnet20", checkpoint=place / "dense.safetensors")
    assert not torch.equal(slim.linear.weight, dense.linear.weight)
    tuned = dcptool.finetune(
        place / "wide", output=place / "trained", losses=2, steps=2, batch_size=16, kd=False,
        lr=0.1, runs_dir=place / "runs",
    )  # fmt: skip
    assert tuned["steps"] == 2
    # Heads are gone again, and the network has moved or stayed by its own weights alone.
    trained = artifact.load(place / "trained").module
    assert trained.state_dict().keys() == again.state_dict().keys()


def test_slimming_trains_then_cuts_by_one_threshold(place):
    sparse = dcptool.finetune(
        "zoo:resnet20", checkpoint=place / "dense.safetensors", output=place / "sparse",
        sparsity=0.01, steps=2, batch_size=16, kd=False, runs_dir=place / "runs",
    )  # fmt: skip
    assert sparse["steps"] == 2
    document = dcptool.prune(
        place / "sparse", rate=0.4, method="slimming", output=place / "slim",
        runs_dir=place / "runs", **QUICK,
    )  # fmt: skip
    kept = document["kept"]
    assert len(set(kept.values())) > 1
    widths = {"layer1": 16, "layer2": 32, "layer3": 64}
    total = sum(widths[name.partition(".")[0]] for name in kept)
    assert sum(kept.values()) == total - int(0.4 * total)
    assert json.loads((place / "slim" / "manifest.json").read_text())


def test_angular_losses_in_stages_and_after(place):
    document = prune(place, "angular", losses=1, stage_steps=2, loss="angular", head_loss="angular")
    assert document["seconds"]["training"] > 0
    slim = artifact.load(place / "angular").module
    # Classes are directions: of length one, but for the last update.
    assert slim.linear.weight.norm(dim=1).tolist() == pytest.approx([1.0] * 10, abs=0.1)
    tuned = dcptool.finetune(
        place / "angular", output=place / "faces", loss="angular", losses=1, head_loss="angular",
        steps=2, batch_size=16, kd=False, runs_dir=place / "runs",
    )  # fmt: skip
    assert tuned["steps"] == 2
