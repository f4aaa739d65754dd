"""The training options of a command line or recipe, and what follows from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dcptool.errors import UsageError
from dcptool.training.loader import Augment
from dcptool.training.loop import Vary
from dcptool.training.optimizers import Optimizer
from dcptool.training.schedule import Schedule

BATCH_SIZE = 128
EPOCHS = 10.0
# A network that was solved for is undone by the usual 0.1; fresh weights need more.
LR_TRAINED = 0.005
LR_FRESH = 0.05
WARMUP_SHARE = 0.05


@dataclass(frozen=True)
class Training:
    """What the options say; None leaves the choice to the defaults above."""

    batch_size: int | None = None
    epochs: float | None = None
    steps: int | None = None
    max_time: str | None = None
    opt: str = "sgd"
    lr: float | None = None
    sched: str = "cosine"
    warmup_epochs: float | None = None
    decay_milestones: str | None = None
    decay_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    no_decay_norms: bool = False
    clip_grad: float | None = None
    smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    model_ema_decay: float | None = None
    norms: str = "train"
    channels_last: str = "auto"
    log_interval: int = 10
    save_every: float = 60.0
    report_to: str = ""
    loss: str = "cross-entropy"
    head_loss: str = "cross-entropy"
    sparsity: float = 0.0
    extra_losses: int = 0

    def check(self) -> None:
        """Refuse combinations that make no sense, all at once."""
        faults = []
        if self.epochs is not None and self.steps is not None:
            faults.append("--epochs and --steps say the same thing twice")
        if (self.mixup or self.cutmix) and self.images_per_step % 2:
            faults.append("--mixup and --cutmix need an even --batch-size")
        mixes = self.mixup or self.cutmix or self.smoothing
        if mixes and "angular" in (self.loss, self.head_loss):
            faults.append("an angular loss needs one label: no --mixup, --cutmix, --smoothing")
        if self.decay_milestones and self.sched != "step":
            faults.append("--decay-milestones belongs to --sched step")
        if faults:
            raise UsageError("the training options do not fit", why="\n".join(faults))
        self.optimizer.check()
        _ = self.max_time_s, self.milestones

    @property
    def images_per_step(self) -> int:
        """Images of one process in one step."""
        return self.batch_size or BATCH_SIZE

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that is asked for."""
        return Optimizer(self.opt, self.momentum, self.weight_decay, not self.no_decay_norms)

    @property
    def max_time_s(self) -> float | None:
        """`90`, `90s`, `20m`, `3h` in seconds."""
        return None if self.max_time is None else seconds_of(self.max_time)

    @property
    def milestones(self) -> tuple[float, ...]:
        """The epochs at which the learning rate falls."""
        if not self.decay_milestones:
            return ()
        try:
            return tuple(float(part) for part in self.decay_milestones.split(","))
        except ValueError as err:
            raise UsageError(
                f"--decay-milestones {self.decay_milestones!r} is no list of epochs",
                try_="--decay-milestones 160,240",
            ) from err

    def schedule(self, steps_per_epoch: int, *, fresh: bool) -> Schedule:
        """Steps and learning rate; `fresh` weights start from a larger one."""
        epochs = EPOCHS if self.epochs is None else self.epochs
        steps = round(epochs * steps_per_epoch) if self.steps is None else self.steps
        lr = self.lr or (LR_FRESH if fresh else LR_TRAINED)
        warmup = (
            round(WARMUP_SHARE * steps)
            if self.warmup_epochs is None
            else round(self.warmup_epochs * steps_per_epoch)
        )
        shares = tuple(m * steps_per_epoch / max(steps, 1) for m in self.milestones)
        return Schedule(
            steps,
            lr,
            self.sched,
            min(warmup, steps),
            shares or (0.4, 0.6),
            self.decay_rate,
        )

    def vary(self, augment: Augment, num_classes: int) -> Vary | None:
        """Random erasing, mixup and CutMix on whole batches, through timm."""
        steps: list[Vary] = []
        if augment.reprob:
            steps.append(_erasing(augment.reprob))
        if self.mixup or self.cutmix:
            steps.append(_mixup(self, num_classes))
        if not steps:
            return None

        def vary(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            for step in steps:
                images, targets = step(images, targets)
            return images, targets

        return vary

    def fingerprint(self) -> dict[str, str]:
        """What must not change between a run and its resume."""
        free = {"max_time", "log_interval", "save_every", "report_to", "channels_last"}
        return {key: str(value) for key, value in asdict(self).items() if key not in free}


def training_of(options: Mapping[str, Any]) -> Training:
    """The training options of a command line as one value, checked."""
    known = {field.name for field in fields(Training)}
    given = {k: v for k, v in options.items() if v is not None and k in known}
    training = Training(**given)
    training.check()
    return training


def seconds_of(text: str) -> float:
    """A duration such as 90, 90s, 20m or 3h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h)?", text.strip())
    if not match:
        raise UsageError(f"{text!r} is no duration", try_="--max-time 90s, 20m or 3h")
    factor = {"m": 60, "min": 60, "h": 3600}.get(match[2] or "s", 1)
    return float(match[1]) * factor


def _erasing(probability: float) -> Vary:
    from timm.data import random_erasing

    make: Any = random_erasing.RandomErasing
    erase = make(probability=probability, mode="pixel", device="cpu")

    def vary(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        erase.device = images.device
        return erase(images), targets

    return vary


def _mixup(training: Training, num_classes: int) -> Vary:
    from timm.data import mixup

    make: Any = mixup.Mixup
    mix = make(
        mixup_alpha=training.mixup,
        cutmix_alpha=training.cutmix,
        label_smoothing=training.smoothing,
        num_classes=num_classes,
    )

    def vary(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        even = len(images) - len(images) % 2  # skipped images may leave an odd one
        mixed, soft = mix(images[:even].clone(), targets[:even])
        return mixed, torch.as_tensor(soft)

    return vary
