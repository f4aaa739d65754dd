"""Before a stage of DCP: a head on the stage's pivot, fitted alone or together with the network.

In closed form the network is left alone unless updates are asked for: its layers are solved to give
what the dense network gives, and updates in between lead away from that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dcptool import files
from dcptool.errors import Interrupted
from dcptool.network.base import Network
from dcptool.selection.greedy import LossAt
from dcptool.selection.heads import (
    AngularHeadLoss,
    Head,
    WithHead,
    fit_alone,
    head_loss,
    new_head,
    summed,
    width_at,
)
from dcptool.training import signals
from dcptool.training.angular import AngularSoftmax
from dcptool.training.checkpoint import Checkpoints
from dcptool.training.data import Data
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.evaluate import predictor
from dcptool.training.loader import loader
from dcptool.training.loop import Run, fit
from dcptool.training.losses import Loss, cross_entropy
from dcptool.training.schedule import Schedule
from dcptool.training.settings import Training

MOST_STAGE_STEPS = 100
SAVE_EVERY_S = 30.0


@dataclass(frozen=True)
class StagePlan:
    """How stages are trained, and where they keep their state."""

    steps: int | None
    epochs: float | None
    lr: float
    options: Training
    amp: torch.dtype | None
    batch_size: int
    seed: int
    device: str
    workers: int | None
    folder: Path
    fingerprint: Mapping[str, str]
    resume_command: str
    solver: str = "gram"

    def updates(self, images: int, processes: int = 1) -> int:
        """Updates of the network before each stage, with so many training images."""
        epoch = max(1, images // (self.batch_size * processes))
        return stage_steps(self.steps, self.epochs, epoch, self.solver)


def stage_steps(steps: int | None, epochs: float | None, epoch: int, solver: str) -> int:
    """Updates before each stage: as asked; else none, or for the loop an epoch, at most 100."""
    if steps is not None:
        return steps
    if epochs is not None:
        return round(epochs * epoch)
    return min(epoch, MOST_STAGE_STEPS) if solver == "sgd" else 0


def own_losses(
    network: Network, images: Sequence[Tensor], labels: Sequence[Tensor] | None, device: str
) -> list[LossAt]:
    """The loss of the network's own scores on each batch, where no head is trained.

    Without labels the dense network's answers take their place.
    """
    if labels is None:
        answers = predictor(network.module.to(device))
        labels = [answers(batch.to(device)).argmax(1) for batch in images]
        network.module.cpu()
    return [summed(None, wanted.to(device)) for wanted in labels]


class StageTrainer:
    """Puts a head on each stage's pivot, and fine-tunes the network where that is asked for.

    `images` and `labels` are this process's rows of the batches that channels are chosen on.
    """

    def __init__(
        self,
        network: Network,
        data: Data,
        plan: StagePlan,
        images: Sequence[Tensor],
        labels: Sequence[Tensor],
        dist: Dist = SINGLE,
    ) -> None:
        self.network, self.data, self.plan = network, data, plan
        self.images, self.labels, self.dist = images, labels, dist
        self.seconds = 0.0
        self.head: Head | None = None

    def restore(self, state: Mapping[str, Tensor] | None) -> None:
        """Take the head of an earlier process."""
        if state is not None:
            width, classes = len(state["norm.weight"]), self.network.base.num_classes
            self.head = new_head(width, classes, 0)
            self.head.load_state_dict(state)
            self.head.eval().requires_grad_(False)

    def fit_stage(
        self, module: nn.Module, pivot: str | None, number: int, is_fitted: bool
    ) -> list[LossAt]:
        """Fit the head, and the network if asked; returns the head's losses on the samples."""
        if not is_fitted:
            began = time.monotonic()
            self.head = None
            steps = self.plan.updates(len(self.data.train), self.dist.world)
            if steps:
                self._fit(module, pivot, number, steps)
            elif pivot is not None:
                self._fit_head(module, pivot, number)
            self.seconds += time.monotonic() - began
        if self.head is not None:
            self.head.to(self.plan.device)
        kind = self.plan.options.head_loss
        return [summed(self.head, wanted.to(self.plan.device), kind) for wanted in self.labels]

    def _fit_head(self, module: nn.Module, pivot: str, number: int) -> None:
        """Fit the head alone to what the network gives at the pivot now."""
        plan, dist = self.plan, self.dist
        width = width_at(module.cpu(), pivot, self.data.input.size)
        head = new_head(width, self.network.base.num_classes, number).to(plan.device)
        with (
            signals.watch() as flag,
            WithHead(module.to(plan.device), pivot, head).attached() as both,
        ):

            def tick() -> None:
                asked = int(dist.largest(flag.number))
                if asked:
                    raise Interrupted(asked, message="stopped", try_=plan.resume_command)

            fit_alone(both, self.images, self.labels, tick, dist)
        module.cpu()
        self.head = head.cpu().eval()
        self.head.requires_grad_(False)

    def _fit(self, module: nn.Module, pivot: str | None, number: int, steps: int) -> None:
        plan = self.plan
        batches = loader(
            self.data.train,
            plan.batch_size,
            train=True,
            seed=plan.seed + number,
            workers=plan.workers,
            device=plan.device,
            dist=self.dist,
        )
        options, classes = plan.options, self.network.base.num_classes
        if self.dist.is_writer:
            files.make_folder(plan.folder, parents=False)
        run = Run(
            optimizer=options.optimizer,
            device=plan.device,
            seed=plan.seed + number,
            amp=plan.amp,
            clip_grad=options.clip_grad,
            channels_last=options.channels_last,
            norms=options.norms,
            vary=options.vary(self.data.train.augment, classes),
            keep_best=False,
            title=f"stage {number + 1}",
            lr_option="--stage-lr",
            checkpoints=Checkpoints(
                plan.folder / f"stage-{number + 1}", plan.fingerprint, SAVE_EVERY_S
            ),
            resume_command=plan.resume_command,
        )
        schedule = Schedule(steps, plan.lr, options.sched, decay=options.decay_rate)
        smoothing = 0.0 if options.mixup or options.cutmix else options.smoothing
        own = AngularSoftmax() if options.loss == "angular" else cross_entropy(smoothing)
        angular = options.head_loss == "angular"
        if pivot is None:
            fit(module, batches, [own], schedule, run, self.dist)
        else:
            width = width_at(module.cpu(), pivot, self.data.input.size)
            head = new_head(width, classes, number)
            aware: Loss = AngularHeadLoss() if angular else head_loss
            with WithHead(module, pivot, head).attached() as both:
                fit(both, batches, [aware, own], schedule, run, self.dist)
            self.head = head.cpu().eval()
            self.head.requires_grad_(False)
        module.cpu().eval()
