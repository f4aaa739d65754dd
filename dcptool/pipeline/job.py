"""What surrounds selection in a prune, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dcptool.selection.settings import Selection
from dcptool.selection.widths import Curve
from dcptool.training.settings import Training


@dataclass(frozen=True)
class Job:
    """What surrounds selection: training in stages, machine, gates, names.

    `curves` were measured before, on the same network. `ancestor` holds the weights of the dense
    network that an artifact was made from, when it is pruned again.
    """

    selection: Selection
    training: bool = True
    stage_steps: int | None = None
    stage_epochs: float | None = None
    stage_lr: float = 0.005
    sweeps: int = 0
    options: Training = field(default_factory=Training)
    amp: torch.dtype | None = None
    batch_size: int = 64
    device: str = "cpu"
    workers: int | None = None
    min_agreement: float | None = None
    curves: Mapping[str, Curve] | None = None
    lineage: dict[str, object] | None = None
    ancestor: Path | None = None
    resume_command: str = ""
