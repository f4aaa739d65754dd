"""What a fit is told besides network, data, losses and learning rate, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dcptool.training.checkpoint import Checkpoints
from dcptool.training.evaluate import Accuracy
from dcptool.training.metrics import Metrics
from dcptool.training.optimizers import Optimizer

# What a loss of one counts against a percent: less than one image of a million.
TIE = 1e-6

Vary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Validate = Callable[[nn.Module, Callable[[], bool]], Accuracy]


def by_top1(found: Accuracy) -> float:
    """The more right answers, the better; of as many, the surer ones."""
    return found.top1 - TIE * min(found.loss, 100.0)


def by_divergence(found: Accuracy) -> float:
    """The nearer to the teacher's scores, the better; answers alone are often level."""
    return -found.loss


@dataclass(frozen=True)
class Run:
    """Everything about a fit that is neither network, data, loss nor learning rate."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    device: str = "cpu"
    seed: int = 0
    amp: torch.dtype | None = None
    clip_grad: float | None = None
    ema_decay: float | None = None
    channels_last: str = "auto"
    norms: str = "train"
    vary: Vary | None = None
    validate: Validate | None = None
    validate_every: int = 1
    validate_first: bool = False
    prefer: Callable[[Accuracy], float] = by_top1
    keep_best: bool = True
    checkpoints: Checkpoints | None = None
    metrics: Metrics | None = None
    log_every: int = 10
    max_time_s: float | None = None
    title: str = "train"
    lr_option: str = "--lr"
    resume_command: str = ""


@dataclass(frozen=True)
class Fitted:
    """What a fit did."""

    steps: int
    epochs: float
    seconds: float
    images_per_second: float
    last_loss: float
    best_top1: float | None
    channels_last: bool
    lr: float
    ended_by: str
