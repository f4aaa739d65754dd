"""Figures of a run: after a stop no step appears twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcptool.training.metrics import Metrics

ROWS = (
    {"step": 0, "val_top1": 10.0},
    {"step": 3, "loss": 1.0},
    {"step": 3, "val_top1": 20.0},
    {"step": 6, "loss": 0.5},
)


@pytest.mark.parametrize(
    ("step", "logged", "validated", "left"),
    [
        (6, True, True, [0, 3, 3, 6]),
        (5, True, True, [0, 3, 3]),
        (3, True, True, [0, 3, 3]),
        (3, True, False, [0, 3]),  # saved before it was validated: that comes again
        (3, False, True, [0, 3]),
        (0, True, False, []),
        (-1, True, True, []),  # killed before there was a state
    ],
)
def test_rewind(tmp_path: Path, step: int, logged: bool, validated: bool, left: list[int]) -> None:
    metrics = Metrics(tmp_path)
    for row in ROWS:
        metrics.write(row)
    metrics.rewind(step, logged=logged, validated=validated)
    assert [row["step"] for row in metrics.rows()] == left
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + len(left)


def test_nothing_to_rewind_leaves_nothing(tmp_path: Path) -> None:
    Metrics(tmp_path).rewind(-1)
    assert not list(tmp_path.iterdir())
