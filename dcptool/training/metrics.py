"""Figures of a run as they come: metrics.jsonl and metrics.csv, and trackers by option.

The files are appended to and may lose their last line when the power fails; a resume cuts
them back to the step it starts from, so that no step appears twice.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcptool import files
from dcptool.errors import EnvironmentFault, UsageError

COLUMNS = (
    "step",
    "epoch",
    "lr",
    "loss",
    "train_top1",
    "val_top1",
    "val_top5",
    "val_loss",
    "images_per_second",
    "seconds",
)
TRACKERS = ("tensorboard", "wandb", "mlflow")

Row = Mapping[str, float | None]


@dataclass
class Metrics:
    """The files in one folder, and whoever else wants to know."""

    folder: Path
    trackers: Sequence[Any] = field(default_factory=tuple)

    def write(self, row: Row) -> None:
        """Add one row."""
        files.append(
            self.folder / "metrics.jsonl", json.dumps(_rounded(row), allow_nan=False) + "\n"
        )
        head = "" if (self.folder / "metrics.csv").exists() else ",".join(COLUMNS) + "\n"
        files.append(self.folder / "metrics.csv", head + _csv_line(row))
        for tracker in self.trackers:
            tracker(row)

    def rows(self) -> list[dict[str, float | None]]:
        """What was written so far, without a torn last line."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        found = []
        for line in (
            files.read_bytes(path, what="the metrics").decode(errors="replace").splitlines()
        ):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                found.append(row)
        return found

    def rewind(self, step: int, *, logged: bool = True, validated: bool = True) -> None:
        """Drop what was written after `step`, and at it what will be written again."""
        kept = []
        for row in self.rows():
            at = row.get("step") or 0
            again = not (validated if row.get("val_top1") is not None else logged)
            if at < step or (at == step and not again):
                kept.append(row)
        if not kept and not (self.folder / "metrics.jsonl").exists():
            return
        text = "".join(json.dumps(row) + "\n" for row in kept)
        files.publish(self.folder / "metrics.jsonl", text.encode())
        table = ",".join(COLUMNS) + "\n" + "".join(_csv_line(row) for row in kept)
        files.publish(self.folder / "metrics.csv", table.encode())


def _rounded(row: Row) -> dict[str, float | None]:
    return {key: round(value, 6) if value is not None else None for key, value in row.items()}


def _csv_line(row: Row) -> str:
    text = io.StringIO()
    rounded = _rounded(row)
    values = [rounded.get(name) for name in COLUMNS]
    csv.writer(text, lineterminator="\n").writerow(["" if v is None else v for v in values])
    return text.getvalue()


def check_trackers(text: str) -> list[str]:
    """The trackers that `--report-to` names, known and installed, before any work is done."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise UsageError(
                f"unknown tracker {name!r}", why="--report-to knows " + ", ".join(TRACKERS)
            )
        if importlib.util.find_spec(name) is None:
            raise EnvironmentFault(
                f"--report-to {name} needs a package that is not installed",
                why=f"no module named {name}",
                try_=f"pip install {name}",
            )
    return names


def open_trackers(text: str, folder: Path, run_name: str) -> list[Any]:
    """One callable for each tracker that `--report-to` names."""
    return [_open_tracker(name, folder, run_name) for name in check_trackers(text)]


def _open_tracker(name: str, folder: Path, run_name: str) -> Any:
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(str(folder / "tensorboard"))

        def to_board(row: Row) -> None:
            for key, value in row.items():
                if value is not None and key != "step":
                    writer.add_scalar(key, value, int(row["step"] or 0))

        return to_board
    if name == "wandb":
        import wandb  # type: ignore[import-not-found, unused-ignore]

        wandb.init(dir=str(folder), name=run_name)
        return lambda row: wandb.log(dict(row), step=int(row["step"] or 0))
    import mlflow  # type: ignore[import-not-found, unused-ignore]

    mlflow.start_run(run_name=run_name)
    return lambda row: mlflow.log_metrics(
        {k: v for k, v in row.items() if v is not None}, step=int(row["step"] or 0)
    )
