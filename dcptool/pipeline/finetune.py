"""Fine-tune a network and publish the result as a new artifact.

The best weights by val win, and those it started from are among the candidates, so a fine-tune that
does harm changes nothing. Where val was taken out of train and the dense network has learnt from it
before, it speaks for the start; then images of train choose, which both have learnt from. Test only
reports. Without labels the teacher's answers are the right ones, on images of which one half
chooses and the other reports.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dcptool import console, files
from dcptool.errors import GateFailed, UsageError
from dcptool.network import artifact, cost
from dcptool.network.graph import build_graph
from dcptool.network.models import Network
from dcptool.pipeline.agreement import Agreement, agree, halves
from dcptool.selection.heads import WithHeads, new_head, width_at, with_head_losses
from dcptool.training import checkpoint, room, signals
from dcptool.training.angular import AngularSoftmax
from dcptool.training.checkpoint import Checkpoints, digest_of
from dcptool.training.data import Data, samples
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.evaluate import Accuracy, Predictor, evaluate, predictor
from dcptool.training.familiar import knows_held_out
from dcptool.training.loader import Batches, ImageSet, loader
from dcptool.training.loop import Fitted, Run, fit
from dcptool.training.losses import Loss, cross_entropy, distill, with_sparsity
from dcptool.training.maps import seen_at, shared_pivots, with_maps
from dcptool.training.metrics import Metrics, open_trackers
from dcptool.training.norms import reestimate_norms
from dcptool.training.run import by_divergence, by_top1
from dcptool.training.schedule import Schedule
from dcptool.training.settings import Training
from dcptool.training.step_length import measured

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Distillation:
    """Who teaches, how much its scores count, and how much the maps that both networks have."""

    teacher: nn.Module
    weight: float = 0.5
    temperature: float = 2.0
    maps: float = 0.0


@dataclass(frozen=True)
class Job:
    """Everything about a fine-tune but the network, the data and the place."""

    training: Training
    device: str = "cpu"
    amp: torch.dtype | None = None
    workers: int | None = None
    seed: int = 0
    distillation: Distillation | None = None
    fresh: bool = False
    reestimate: bool = False
    min_top1: float | None = None
    lineage: Mapping[str, object] | None = None
    resume_command: str = ""


@dataclass(frozen=True)
class Finetuned:
    """What came out."""

    artifact: Path
    before: Accuracy | None
    after: Accuracy | None
    fitted: Fitted
    seconds: float
    gates: list[dict[str, object]]
    agreement: tuple[Agreement, Agreement] | None = None


def check_loss(training: Training, *, wants_teacher: bool) -> None:
    """Refuse a loss that leaves a teacher, asked for by name, without a say."""
    if training.loss == "angular" and wants_teacher:
        raise UsageError(
            "--loss angular has no place for a teacher",
            why="it trains the classifier by the labels alone",
            try_="leave out --loss angular, or --kd, --teacher and --teacher-checkpoint",
        )


def check(
    data: Data, *, taught: bool, min_top1: float | None, training: Training | None = None
) -> None:
    """Refuse what images without labels cannot give, before anything is written."""
    if data.labelled:
        return
    wanted = {
        "--min-top1": min_top1 is not None,
        **(_needs_of(training) if training is not None else {}),
    }
    faults = [option for option, is_wanted in wanted.items() if is_wanted]
    if faults:
        raise UsageError(
            f"{', '.join(faults)} need{'s' if len(faults) == 1 else ''} labels",
            why="the images have none: the teacher's answers are all there is",
            try_="--data-dir with class folders, or the same command without",
        )
    if not taught:
        raise UsageError(
            "images without labels need a teacher",
            try_="--teacher with the dense network, or --data-dir with class folders",
        )


def _needs_of(training: Training) -> dict[str, bool]:
    """The options that are about labels, and whether they are used."""
    return {
        "--mixup": training.mixup > 0,
        "--cutmix": training.cutmix > 0,
        "--smoothing": training.smoothing > 0,
        "--losses": training.extra_losses > 0,
        "--loss angular": training.loss == "angular",
    }


def finetune(
    network: Network, data: Data, job: Job, folder: Path, dist: Dist = SINGLE
) -> Finetuned:
    """Train `network` on `data` and save it in `folder`; resumes what it finds there."""
    with signals.ending(job.resume_command):
        return _finetune(network, data, job, folder, dist)


def _finetune(network: Network, data: Data, job: Job, folder: Path, dist: Dist) -> Finetuned:
    started = time.monotonic()
    network.input = data.input
    if data.labelled and data.classes:
        network.classes = data.classes
    module = network.module.to(job.device)
    fingerprint = _fingerprint(network, data, job, dist)
    dist.agree(fingerprint)
    if dist.is_writer:
        # The result, and two states with their momentum.
        files.require_space(folder, 5 * room.bytes_of(module))
    if job.device == "cpu":
        room.require_memory(module, data.input.size, job.training.images_per_step)
    classes = network.base.num_classes

    choosing, reporting = (data.val, data.report) if data.labelled else halves(data.val)

    def validate(model: nn.Module, stop: Callable[[], bool]) -> Accuracy:
        answers = None
        if not data.labelled and job.distillation is not None:
            answers = predictor(job.distillation.teacher, amp=job.amp)
        return _accuracy(model, choosing, job, classes, dist, "validation", stop, answers)

    def report(title: str) -> Accuracy | None:
        if not data.labelled:
            return None
        return _accuracy(module, reporting, job, classes, dist, title)

    def agreement() -> Agreement | None:
        if data.labelled or job.distillation is None:
            return None
        found = agree(
            job.distillation.teacher,
            module,
            reporting,
            workers=job.workers,
            device=job.device,
            dist=dist,
        )
        module.to(job.device)
        job.distillation.teacher.to(job.device)
        return found

    before, agreed_before = report("accuracy before"), agreement()
    is_known = not job.fresh and knows_held_out(
        module if job.distillation is None else job.distillation.teacher.to(job.device),
        data,
        seed=job.seed,
        workers=job.workers,
        device=job.device,
        amp=job.amp,
        dist=dist,
    )
    if is_known:
        console.note("the images held out of train were learnt from before: images of train choose")
        choosing = samples(data, len(data.val), job.seed)
    batches = loader(
        data.train,
        job.training.images_per_step,
        train=True,
        seed=job.seed,
        workers=job.workers,
        dist=dist,
        device=job.device,
    )
    prefer = by_top1 if data.labelled else by_divergence
    if job.reestimate:
        tried = copy.deepcopy(module)
        reestimate_norms(tried, dataclasses.replace(batches, train=False))
        was, now = (prefer(validate(one, _never)) for one in (module, tried))
        if now > was:
            module.load_state_dict(tried.state_dict())
        console.note(
            f"batch norms estimated anew: {'kept' if now > was else 'no better, not kept'}"
        )
    schedule = job.training.schedule(len(batches), fresh=job.fresh)
    trackers = open_trackers(job.training.report_to, folder, folder.name) if dist.is_writer else ()
    run = Run(
        optimizer=job.training.optimizer,
        device=job.device,
        seed=job.seed,
        amp=job.amp,
        clip_grad=job.training.clip_grad,
        ema_decay=job.training.model_ema_decay,
        channels_last=job.training.channels_last,
        norms=job.training.norms,
        vary=job.training.vary(data.train.augment, classes),
        validate=validate,
        validate_first=True,
        prefer=prefer,
        checkpoints=Checkpoints(folder / CHECKPOINTS, fingerprint, job.training.save_every),
        metrics=Metrics(folder, trackers),
        log_every=job.training.log_interval,
        max_time_s=job.training.max_time_s,
        title="fine-tune",
        resume_command=job.resume_command,
    )
    fitted = _fit(network, batches, data, job, schedule, run, dist)
    after, agreed_after = report("accuracy after"), agreement()
    module.cpu()
    gates = _gates(job, after, data)
    if dist.is_writer:
        _publish(network, data, job, folder, before, after, fitted, is_known=is_known)
    dist.barrier()
    agreed = (agreed_before, agreed_after) if agreed_before and agreed_after else None
    return Finetuned(folder, before, after, fitted, time.monotonic() - started, gates, agreed)


def _never() -> bool:
    return False


def _fit(
    network: Network,
    batches: Batches,
    data: Data,
    job: Job,
    schedule: Schedule,
    run: Run,
    dist: Dist,
) -> Fitted:
    """Train by the losses that are asked for: the network's own, and those of extra heads."""
    module = network.module
    training, taught, loss = job.training, job.distillation, _loss(data, job)
    with ExitStack() as stack:
        if taught is not None and taught.maps:
            names = shared_pivots(module, taught.teacher, data.input.size)
            given = stack.enter_context(seen_at(module, names))
            wanted = stack.enter_context(seen_at(taught.teacher.to(job.device), names))
            loss = with_maps(loss, given, wanted, taught.maps)
        if training.sparsity:
            loss = with_sparsity(loss, training.sparsity)
        if not training.extra_losses:
            return _train(module, batches, loss, job, schedule, run, dist)
        structure = build_graph(module, data.input.size).structure
        module.cpu()
        classes = network.base.num_classes
        heads = {
            pivot: new_head(width_at(module, pivot, data.input.size), classes, number)
            for number, pivot in enumerate(structure.pivots(training.extra_losses))
        }
        both = stack.enter_context(WithHeads(module, heads).attached())
        loss = with_head_losses(loss, training.head_loss)
        return _train(both.to(job.device), batches, loss, job, schedule, run, dist)


def _train(
    module: nn.Module,
    batches: Batches,
    loss: Loss,
    job: Job,
    schedule: Schedule,
    run: Run,
    dist: Dist,
) -> Fitted:
    """Fit with the learning rate that was asked for, or that trained weights are found to bear."""
    if job.training.lr is None and not job.fresh:
        schedule = measured(module, batches, loss, schedule, run, dist)
        console.note(f"learning rate {schedule.lr:.2g}, as this network bears it")
    return fit(module, batches, [loss], schedule, run, dist)


def _accuracy(
    module: nn.Module,
    images: ImageSet,
    job: Job,
    num_classes: int,
    dist: Dist,
    title: str,
    stop: Callable[[], bool] | None = None,
    answers: Predictor | None = None,
) -> Accuracy:
    batches = loader(images, workers=job.workers, dist=dist, device=job.device)
    predict = predictor(module, amp=job.amp)
    return evaluate(
        predict,
        batches,
        num_classes,
        per_class=stop is None,
        dist=dist,
        title=title,
        stop=stop,
        answers=answers,
    )


def _loss(data: Data, job: Job) -> Loss:
    # Mixup brings its own smoothing.
    smoothing = 0.0 if job.training.mixup or job.training.cutmix else job.training.smoothing
    if job.distillation is not None:
        return distill(
            job.distillation.teacher.to(job.device),
            weight=job.distillation.weight,
            temperature=job.distillation.temperature,
            smoothing=smoothing,
            labelled=data.labelled,
        )
    return AngularSoftmax() if job.training.loss == "angular" else cross_entropy(smoothing)


def _fingerprint(network: Network, data: Data, job: Job, dist: Dist) -> dict[str, str]:
    taught = job.distillation
    return {
        **{f"training.{key}": value for key, value in job.training.fingerprint().items()},
        "model": f"{network.base} {digest_of(network.module.state_dict())}",
        "teacher": "none"
        if taught is None
        else f"{digest_of(taught.teacher.state_dict())} {taught.weight} {taught.temperature} "
        f"{taught.maps}",
        "data": f"{data.source} {data.digest[:16]}",
        "data.split": f"{len(data.train)} / {len(data.val)}",
        "input": str(data.input),
        "augment": str(data.train.augment),
        "amp": str(job.amp),
        "seed": str(job.seed),
        "processes": str(dist.world),
    }


def _gates(job: Job, after: Accuracy | None, data: Data) -> list[dict[str, object]]:
    if job.min_top1 is None or after is None:
        return []
    ok = after.top1 >= job.min_top1
    if not ok:
        raise GateFailed(
            f"top-1 is {after.top1:.2f} %, below {job.min_top1:g} %",
            why=f"after the fine-tune, on {after.images} {data.report.name} images",
            try_="more --epochs, or a smaller rate in prune",
        )
    return [{"name": "top1", "limit": job.min_top1, "value": after.top1, "ok": ok}]


def _publish(
    network: Network,
    data: Data,
    job: Job,
    folder: Path,
    before: Accuracy | None,
    after: Accuracy | None,
    fitted: Fitted,
    *,
    is_known: bool,
) -> None:
    counted = cost.count(network.module, network.input.size)
    lineage = {
        **(job.lineage or {}),
        "finetune": {
            "data": data.source,
            "epochs": round(fitted.epochs, 4),
            "steps": fitted.steps,
            "lr": fitted.lr,
            "channels_last": fitted.channels_last,
            "distilled": job.distillation is not None,
            "chosen_by": "train" if is_known else "val",
            "ended_by": fitted.ended_by,
            "threads": torch.get_num_threads(),
        },
    }
    metrics: dict[str, object] = {"images": data.report.name, "source": data.source}
    if before is not None and after is not None:
        metrics |= {"top1": after.top1, "top5": after.top5, "top1_before": before.top1}
    artifact.save(
        network,
        folder,
        cost={"params": counted.params, "macs": counted.macs},
        metrics=metrics,
        lineage=lineage,
    )


def clear_checkpoints(folder: Path) -> None:
    """Remove the states of a run that is through; only files of ours."""
    place = folder / CHECKPOINTS
    for _, _, path in checkpoint.generations(place):
        files.remove(path)
    with suppress(OSError):
        place.rmdir()
