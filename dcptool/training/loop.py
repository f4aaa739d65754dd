"""The one training loop: baseline, stages and fine-tune differ in their losses alone.

Every update of step k depends on the weights, the optimizer and k: order, augmentation,
dropout and learning rate are drawn from k. A step that is not finite ends the run before it
is saved. Several processes average gradients and norm statistics, one message per update.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcptool import console
from dcptool.errors import GateFailed, Interrupted
from dcptool.training import signals
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.evaluate import Stopped
from dcptool.training.layout import apply_layout, choose_layout
from dcptool.training.loader import Batches
from dcptool.training.losses import Loss, tell_step
from dcptool.training.meter import Meter
from dcptool.training.norms import one_value_explained
from dcptool.training.randomness import kept_random_state, seed_all
from dcptool.training.run import Fitted, Run, Validate, Vary
from dcptool.training.schedule import Schedule

__all__ = ["Fitted", "Run", "Validate", "Vary", "fit"]

GPU_CHECK_EVERY = 20
MEASURED_STEPS = 100


@dataclass
class _State:
    step: int = 0
    validated: int = -1
    best_top1: float | None = None
    best_score: float | None = None
    best: dict[str, Tensor] | None = None
    seconds: float = 0.0
    channels_last: bool | None = None


def fit(
    model: nn.Module,
    batches: Batches,
    losses: Sequence[Loss],
    schedule: Schedule,
    run: Run | None = None,
    dist: Dist = SINGLE,
) -> Fitted:
    """Train `model` in place; one update for each loss and mini-batch.

    Raises Interrupted at the edge of a step after a signal, GateFailed when a loss is not
    finite, UsageError when batches are too small for batch norms. With `validate` and
    `keep_best` the best weights are the ones that stay.
    """
    run = run or Run()
    with kept_random_state(), signals.watch() as flag, one_value_explained():
        return _Fit(model, batches, losses, schedule, run, dist, flag).go()


class _Fit:
    """One fit under way; split into small steps so that each can be read alone."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        losses: Sequence[Loss],
        schedule: Schedule,
        run: Run,
        dist: Dist,
        flag: signals.Flag,
    ) -> None:
        self.model, self.batches, self.losses = model.to(run.device), batches, losses
        self.schedule, self.run, self.dist, self.flag = schedule, run, dist, flag
        dist.broadcast_tensors([*model.parameters(), *model.buffers()])
        self.optimizer = run.optimizer.make(model, schedule.lr)
        self.ema = copy.deepcopy(model).requires_grad_(False) if run.ema_decay else None
        self.scaler = torch.amp.GradScaler(
            run.device.partition(":")[0], enabled=run.amp is torch.float16
        )
        self.state = _State()
        self.began = time.monotonic()
        self.meter = Meter(run.device)
        self.last_loss = math.nan
        self.ended_by = "schedule"
        self.images_done = 0
        self.busy_s = 0.0

    def go(self) -> Fitted:
        """Resume if there is something to resume, then train to the end."""
        state, run = self.state, self.run
        self._restore()
        if state.channels_last is None:
            wish = run.channels_last
            if wish == "auto" and self.schedule.steps < MEASURED_STEPS:
                wish = "off"  # measuring would cost more than it can win
            chosen = choose_layout(self.model, self.batches, wish)
            state.channels_last = self.dist.broadcast(chosen)
            if wish == "auto":
                self._save()  # a clock chose: whoever starts this again must not ask it again
        apply_layout(self.model, state.channels_last)
        if self.ema is not None:
            apply_layout(self.ema, state.channels_last)
        try:
            with console.progress(run.title, self.schedule.steps) as task:
                task.advance(state.step)
                self._train(task)
        finally:
            apply_layout(self.model, False)
        self._finish()
        epochs = state.step / len(self.batches)
        speed = self.images_done * self.dist.world / self.busy_s if self.busy_s else 0.0
        return Fitted(
            steps=state.step,
            epochs=epochs,
            seconds=self._elapsed(),
            images_per_second=speed,
            last_loss=self.last_loss,
            best_top1=state.best_top1,
            channels_last=state.channels_last,
            lr=self.schedule.lr,
            ended_by=self.ended_by,
        )

    def _train(self, task: console.Task) -> None:
        state, per_epoch = self.state, len(self.batches)
        self._mode()
        if self._validation_is_due() and (state.step or self.run.validate_first):
            self._validate()
        while state.step < self.schedule.steps and self.ended_by == "schedule":
            epoch, start = divmod(state.step, per_epoch)
            clock = time.perf_counter()
            for images, labels in self.batches.epoch(epoch, start):
                stop = self._step(images, labels)
                state.step += 1
                self.images_done += len(labels)
                self.busy_s += time.perf_counter() - clock
                task.advance(1, self._status())
                self._edge(stop)
                clock = time.perf_counter()
                if self.ended_by != "schedule" or state.step >= self.schedule.steps:
                    break

    def _mode(self) -> None:
        self.model.train()
        if self.run.norms == "eval":
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def _step(self, images: Tensor, labels: Tensor) -> float:
        """All updates of one mini-batch; returns the request to stop, summed over ranks."""
        run, state = self.run, self.state
        rate = self.schedule.at(state.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        seed_all(run.seed, state.step, self.dist.rank)
        wanted = torch.channels_last if state.channels_last else torch.contiguous_format
        images = images.contiguous(memory_format=wanted)
        targets = labels
        if run.vary is not None:
            images, targets = run.vary(images, labels)
        stop, total = 0.0, None
        for loss_of in self.losses:
            tell_step(loss_of, state.step)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(
                images.device.type, dtype=run.amp or torch.bfloat16, enabled=run.amp is not None
            ):
                loss, scores = loss_of(self.model, images, targets)
            torch.autograd.backward(self.scaler.scale(loss))
            value, asked = self._share(loss.detach())
            stop = max(stop, asked)
            self._check(value)
            self._update()
            total = value if total is None else total + value
            if scores is not None and len(scores) == len(labels):
                self.meter.count(scores, labels)
        assert total is not None
        self.meter.add(total)
        if self.ema is not None:
            _follow(self.ema, self.model, float(run.ema_decay or 0))
        return stop

    def _share(self, loss: Tensor) -> tuple[Tensor, float]:
        """Average gradients, norm statistics and loss over the ranks, and ask who must stop."""
        wish = float(self.flag.number or self._time_is_up())
        if self.dist.world == 1:
            return loss, wish
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        buffers = [b for b in self.model.buffers() if b.is_floating_point()]
        tail = torch.stack([loss.float(), torch.tensor(wish, device=loss.device)])
        parts = [*grads, *buffers, tail]
        flat = torch.cat([part.reshape(-1).float() for part in parts])
        self.dist.sum(flat)
        asked = float(flat[-1])
        flat /= self.dist.world
        for part, piece in zip(parts, torch.split(flat, [p.numel() for p in parts]), strict=True):
            part.copy_(piece.view_as(part))
        return tail[0], asked

    def _check(self, loss: Tensor) -> None:
        on_gpu = self.run.device.startswith("cuda")
        if on_gpu and self.state.step % GPU_CHECK_EVERY:
            return
        self._require_finite(float(loss))

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise GateFailed(
                f"the loss is {loss} at step {self.state.step}",
                why=f"learning rate {self.schedule.at(self.state.step):.3g}; it was not saved",
                try_=f"the same command with a smaller {self.run.lr_option}, or with --clip-grad 1",
            )

    def _update(self) -> None:
        if self.run.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _edge(self, stop: float) -> None:
        """Between two steps: log, validate, save, or end as asked."""
        state, run = self.state, self.run
        last = state.step >= self.schedule.steps
        at_epoch = state.step % len(self.batches) == 0
        if state.step % run.log_every == 0 or at_epoch or last:
            self._log()
        if stop:
            self._stop()
        if self._validation_is_due() or (last and state.validated != state.step):
            self._validate()
        if run.checkpoints is not None and (last or at_epoch or run.checkpoints.due()):
            self._save()

    def _stop(self) -> None:
        number = int(self.dist.largest(float(self.flag.number)))
        if not number:
            self.ended_by = "max-time"
            self._log()
            if self.run.validate is not None:
                self._validate()
            return
        self._save()
        saved = "state saved" if self.run.checkpoints is not None else "nothing was saved"
        raise Interrupted(
            number,
            message=f"stopped at step {self.state.step}, {saved}",
            try_=self.run.resume_command,
        )

    def _validation_is_due(self) -> bool:
        state, per_epoch = self.state, len(self.batches)
        every = self.run.validate_every * per_epoch
        return (
            self.run.validate is not None
            and state.step % every == 0
            and state.validated < state.step
        )

    def _validate(self) -> None:
        state, run = self.state, self.run
        if run.validate is None:
            return
        judged = self.ema if self.ema is not None else self.model
        try:
            found = run.validate(judged, lambda: bool(self.flag.number))
        except Stopped:
            self._stop()
            return
        self._mode()
        state.validated = state.step
        score = run.prefer(found)
        if state.best_score is None or score >= state.best_score:
            state.best_score, state.best_top1 = score, found.top1
            if run.keep_best:
                state.best = {k: v.detach().clone() for k, v in judged.state_dict().items()}
        if run.metrics is not None and self.dist.is_writer:
            run.metrics.write(
                {
                    "step": state.step,
                    "epoch": state.step / len(self.batches),
                    "val_top1": found.top1,
                    "val_top5": found.top5,
                    "val_loss": found.loss,
                }
            )

    def _log(self) -> None:
        meter, state, run = self.meter, self.state, self.run
        if not meter.steps:
            return
        self.last_loss = meter.loss()
        self._require_finite(self.last_loss)
        images_per_step = self.batches.batch_size * self.dist.world
        if run.metrics is not None and self.dist.is_writer:
            run.metrics.write(
                {
                    "step": state.step,
                    "epoch": state.step / len(self.batches),
                    "lr": self.schedule.at(state.step - 1),
                    "loss": self.last_loss,
                    "train_top1": meter.top1(),
                    "images_per_second": meter.steps_per_second() * images_per_step,
                    "seconds": self._elapsed(),
                }
            )
        meter.clear()

    def _status(self) -> str:
        speed = self.images_done * self.dist.world / max(self.busy_s, 1e-9)
        text = f"epoch {self.state.step / len(self.batches):.1f}  {speed:.0f} img/s"
        if math.isfinite(self.last_loss):
            text += f"  loss {self.last_loss:.3f}"
        if self.state.best_top1 is not None:
            text += f"  best top-1 {self.state.best_top1:.2f}"
        return text

    def _time_is_up(self) -> bool:
        limit = self.run.max_time_s
        return limit is not None and time.monotonic() - self.began >= limit

    def _elapsed(self) -> float:
        return self.state.seconds + time.monotonic() - self.began

    def _save(self) -> None:
        if self.run.checkpoints is None or not self.dist.is_writer:
            return
        state = self.state
        tree: dict[str, Any] = {
            "step": state.step,
            "validated": state.validated,
            "best_top1": state.best_top1,
            "best_score": state.best_score,
            "best": state.best,
            "seconds": self._elapsed(),
            "channels_last": state.channels_last,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema is not None else None,
            "meter": self.meter.state(),
        }
        self.run.checkpoints.save(tree)

    def _restore(self) -> None:
        found = (
            self.run.checkpoints.load() if self.run.checkpoints and self.dist.is_writer else None
        )
        found = self.dist.broadcast(found)
        if found is None:
            self._rewind(-1)  # of a run that was killed before it had a state
            return
        state = self.state
        state.step, state.validated = found["step"], found["validated"]
        state.best_top1, state.best_score = found["best_top1"], found["best_score"]
        state.seconds = found["seconds"]
        state.channels_last = found["channels_last"]
        if found["best"] is not None:
            state.best = {k: v.to(self.run.device) for k, v in found["best"].items()}
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.scaler.load_state_dict(found["scaler"])
        if self.ema is not None:
            self.ema.load_state_dict(found["ema"])
        self.meter.restore(found["meter"])
        self._rewind(state.step)
        console.note(f"resumed at step {state.step} of {self.schedule.steps}")

    def _rewind(self, step: int) -> None:
        """Leave no figure that this run will write once more."""
        if self.run.metrics is not None and self.dist.is_writer:
            validated = self.state.validated >= step
            self.run.metrics.rewind(step, logged=not self.meter.steps, validated=validated)

    def _finish(self) -> None:
        """Leave the weights that were asked for in the model."""
        if self.run.keep_best and self.state.best is not None:
            self.model.load_state_dict(self.state.best)
        elif self.ema is not None:
            self.model.load_state_dict(self.ema.state_dict())
        self.model.eval()


def _follow(ema: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the averaged weights a little towards the present ones."""
    with torch.no_grad():
        for mine, theirs in zip(
            ema.state_dict().values(), model.state_dict().values(), strict=True
        ):
            if mine.is_floating_point():
                mine.lerp_(theirs, 1 - decay)
            else:
                mine.copy_(theirs)
