"""`prune` from data to artifact: calibration, stages, selection, measurement, publication."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import nn

from dcptool import console, files
from dcptool.errors import GateFailed, InputError, Interrupted, UsageError
from dcptool.network import artifact, cost, models
from dcptool.network.base import Network
from dcptool.network.graph import ChannelGraph, build_graph
from dcptool.network.manifest import DENSE_WEIGHTS
from dcptool.pipeline import calibration, prune_document, prune_record, widths
from dcptool.pipeline.agreement import agree, halves, settle, settle_norms
from dcptool.pipeline.job import Job
from dcptool.pipeline.stage_training import SAVE_EVERY_S, StagePlan, StageTrainer, own_losses
from dcptool.report.record import keep_classes
from dcptool.selection.limits import too_wide
from dcptool.selection.methods import AT_ONCE, FROM_SCRATCH
from dcptool.selection.methods.width import afresh
from dcptool.selection.probe import Tick
from dcptool.selection.settings import Selection
from dcptool.selection.stages import (
    Listen,
    Outcome,
    Progress,
    nothing_to_prune,
    select,
    solve_again,
)
from dcptool.training import room, signals
from dcptool.training.checkpoint import Checkpoints, digest_of
from dcptool.training.data import Data
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.evaluate import Accuracy, evaluate, predictor
from dcptool.training.loader import ImageSet, loader


def check(
    network: Network, data: Data, settings: Selection, *, training: bool, processes: int = 1
) -> None:
    """Refuse what cannot work, before anything is written."""
    if training and not data.labelled:
        raise UsageError(
            "images without labels cannot train",
            why="the stages of DCP are fine-tuned with labels",
            try_="add --no-training, or give labels with --data-dir",
        )
    images = min(settings.samples or len(data.train), len(data.train))
    if images < processes:
        raise UsageError(
            f"{images} samples for {processes} processes",
            why="every process needs at least one",
            try_="more --samples, or fewer processes",
        )
    network.input = data.input
    graph = build_graph(network.module, data.input.size)
    _tell_idle_patterns(settings, graph)
    fault = too_wide(settings, settings.groups(graph), network.module)
    if fault is not None and settings.plan is None:
        raise fault
    if settings.plan is None:
        groups = settings.groups(graph)
        if not groups:
            raise nothing_to_prune(network, graph, settings)
        strange = set(settings.reuse) - {group.name for group in graph.groups}
        if strange:
            raise InputError(
                f"what --reuse names was recorded of another network than {network.base}",
                why=f"there is no group {min(strange)} here",
                try_="--reuse with a run of the same network, or without it",
            )
        anew = [group.name for group in groups if settings.recorded(group) is None]
        if settings.reuse and anew:
            console.note(
                f"{len(anew)} of {len(groups)} groups are ordered anew: what was recorded of them "
                f"does not reach this size ({', '.join(anew[:3])}{' ...' if anew[3:] else ''})"
            )
        return
    sizes = {group.name: len(group.units) for group in graph.groups if group.units}
    faults = [f"there is no group {name} to cut" for name in settings.plan if name not in sizes]
    faults += [
        f"{name} has {sizes[name]} units, the plan keeps {keep}"
        for name, keep in settings.plan.items()
        if name in sizes and keep > sizes[name]
    ]
    if faults:
        raise InputError(
            f"the plan does not fit {network.base}",
            why="\n".join(faults[:10]),
            try_=f"dcptool analyze {network.base} --emit-plan fresh-plan.json",
        )
    if not settings.groups(graph):
        raise InputError(
            "the plan names no group to cut",
            why="--keep leaves all of them whole" if settings.plan else "it is empty",
            try_=f"dcptool analyze {network.base} --emit-plan fresh-plan.json",
        )


def _tell_idle_patterns(settings: Selection, graph: ChannelGraph) -> None:
    """Warn of names in --keep and --rate-of that no group has: they may be misspelled."""
    names = [group.name for group in graph.groups]
    for option, patterns in (("--keep", settings.keep), ("--rate-of", settings.rates)):
        for pattern in patterns:
            if not any(fnmatch.fnmatch(name, pattern) for name in names):
                console.warn(f"{option} {pattern}: no group has such a name")


def prune(
    network: Network, data: Data, job: Job, folder: Path, dist: Dist = SINGLE
) -> dict[str, Any]:
    """Prune `network` on `data` and publish the artifact in `folder`; returns the document."""
    with signals.ending(job.resume_command):
        return _prune(network, data, job, folder, dist)


def _prune(network: Network, data: Data, job: Job, folder: Path, dist: Dist) -> dict[str, Any]:
    started = time.monotonic()
    network.input = data.input
    if data.labelled and data.classes:
        network.classes = data.classes
    settings = job.selection
    marks = fingerprint(network, data, job, dist)
    dist.agree(marks)
    if dist.is_writer:
        # The dense weights, the slim ones, and two states.
        files.require_space(folder, 4 * room.bytes_of(network.module))
    plan = _stage_plan(job, folder, marks)
    updates = plan.updates(len(data.train), dist.world) if job.training else 0
    if updates and job.device == "cpu":
        room.require_memory(network.module, data.input.size, job.batch_size)
    chosen = calibration.images_for(network, data, job, dist)
    calibration.require_memory(chosen, job)
    batches = calibration.batches_of(chosen, job, dist)
    if settings.solver == "gram" and calibration.may_mirror(data, chosen):
        batches += [(x.flip(3), y) for x, y in batches]
    mine = [x[dist.rank :: dist.world] for x, _ in batches]
    labels = [y[dist.rank :: dist.world] for _, y in batches]
    before_top1 = _top1(network, data, job, dist)
    memory = Checkpoints(folder / prune_record.CHECKPOINTS, marks, SAVE_EVERY_S)
    saved = memory.load()
    start = prune_record.progress_of(saved) if saved is not None else None
    trainer = None
    is_aware = settings.method == "dcp" and settings.discrimination > 0
    at_once = settings.removes_nothing or settings.method in AT_ONCE
    if job.training and (updates or is_aware) and not at_once:
        trainer = StageTrainer(network, data, plan, mine, labels, dist)
        if saved is not None:
            trainer.restore(saved["head"])
    losses = []
    if not job.training and is_aware:
        losses = own_losses(network, mine, labels if data.labelled else None, job.device)
    if dist.is_writer:
        prune_record.begin(folder, start.choices if start is not None else ())
    selection_began = time.monotonic()
    images = [x for x, _ in batches]
    settings = widths.decide(network, images, job, folder, dist, marks)
    with _edges(memory, trainer, job, dist) as (edge, tick):
        outcome = select(
            network,
            images,
            settings,
            fit_stage=trainer.fit_stage if trainer else None,
            losses=losses,
            report=lambda choice: prune_record.record(folder, choice) if dist.is_writer else None,
            edge=edge,
            tick=tick,
            start=start,
            dist=dist,
            device=job.device,
        )
    choosing, reporting = halves(data.val)
    sweeps = _sweep(network, outcome, images, job, choosing, dist)
    selection_seconds = time.monotonic() - selection_began
    training_seconds = trainer.seconds if trainer else 0.0
    slim = outcome.network
    if settings.method in FROM_SCRATCH:
        afresh(slim, settings.seed)
    dense = _original(network, job)
    before_cost = dense_cost = cost.count(network.module, data.input.size)
    dense_top1 = before_top1
    if dense is not network:
        dense_cost = cost.count(dense.module, data.input.size)
        # Random weights tell the cost alone.
        dense_top1 = _top1(dense, data, job, dist) if job.ancestor else None
    slim_cost = cost.count(slim.module, data.input.size)
    again = loader(chosen, job.batch_size, workers=job.workers, device=job.device)
    fresh_norms = settle_norms(
        network.module, slim.module, again, choosing, workers=job.workers, dist=dist
    )
    agreement = agree(
        network.module, slim.module, reporting, workers=job.workers, device=job.device, dist=dist
    )
    slim_top1 = _top1(slim, data, job, dist)
    gates = gates_of(job, agreement.top1, agreement.images)
    document = {
        "run": folder.name,
        "artifact": str(folder),
        "model": str(network.base),
        "data": data.source,
        "split": data.report.name,
        "method": settings.method,
        "solver": settings.solver,
        "samples": len(chosen),
        **prune_document.budget(job.selection),
        **(widths.target_of(folder) if dist.is_writer else {}),
        "dense": prune_document.side(dense_cost, dense_top1),
        "slim": prune_document.side(slim_cost, slim_top1),
        **({"before": prune_document.side(before_cost, before_top1)} if network.cuts else {}),
        "kept": {choice.group: len(choice.kept) for choice in outcome.choices},
        "dead": sum(choice.dead for choice in outcome.choices),
        "agreement": asdict(agreement),
        "norms": "estimated anew" if fresh_norms else "kept",
        "sweeps": sweeps,
        "proof": {
            "difference": outcome.proof.difference if outcome.proof else 0.0,
            "power": outcome.proof.power if outcome.proof else 0.0,
        },
        "seconds": {
            "total": round(time.monotonic() - started, 2),
            "selection": round(selection_seconds - training_seconds, 2),
            "training": round(training_seconds, 2),
        },
        "gates": gates,
    }
    if not dist.is_writer:
        dist.barrier()
        return document
    kept_weights = _dense(network, job, folder)
    compared = dense_top1 or before_top1
    if slim_top1 is not None and compared is not None:
        keep_classes(folder, data.classes, slim_top1.per_class, compared.per_class)
    artifact.save(
        slim,
        folder,
        cost=artifact.cost_document(
            slim_cost.params, slim_cost.macs, dense_cost.params, dense_cost.macs
        ),
        metrics=prune_document.metrics(data, slim_top1, dense_top1, agreement),
        lineage={
            **(job.lineage or {}),
            **kept_weights,
            "prune": prune_document.lineage(settings, job, outcome, len(chosen), updates),
        },
    )
    prune_record.clear_checkpoints(folder)
    dist.barrier()
    return document


@contextmanager
def _edges(
    memory: Checkpoints, trainer: StageTrainer | None, job: Job, dist: Dist
) -> Iterator[tuple[Listen, Tick]]:
    """Save the state between two layers now and then, and end with it after a signal."""
    latest: list[Progress] = []

    def save() -> None:
        if dist.is_writer and latest:
            memory.save(prune_record.tree(latest[-1], trainer.head if trainer else None))

    with signals.watch() as flag:

        def tick() -> None:
            number = int(dist.largest(flag.number or 0))
            if number:
                save()
                dist.barrier()
                done = f"{len(latest[-1].choices) if latest else 0} groups decided, state saved"
                raise Interrupted(number, message=f"stopped: {done}", try_=job.resume_command)

        def edge(progress: Progress) -> None:
            latest[:] = [progress]
            if memory.due():
                save()
            tick()

        yield edge, tick


def _sweep(
    network: Network,
    outcome: Outcome,
    images: list[torch.Tensor],
    job: Job,
    choosing: ImageSet,
    dist: Dist,
) -> int:
    """Solve the slim network again as often as it helps; returns how often it did."""
    for done in range(job.sweeps if outcome.cuts else 0):
        tried = solve_again(network, outcome, images, job.selection, dist=dist, device=job.device)
        if not settle(
            network.module,
            outcome.network.module,
            tried,
            choosing,
            f"sweep {done + 1}",
            workers=job.workers,
            device=job.device,
            dist=dist,
        ):
            return done
    return job.sweeps if outcome.cuts else 0


def _stage_plan(job: Job, folder: Path, marks: dict[str, str]) -> StagePlan:
    return StagePlan(
        job.stage_steps,
        job.stage_epochs,
        job.stage_lr,
        job.options,
        job.amp,
        job.batch_size,
        job.selection.seed,
        job.device,
        job.workers,
        folder / prune_record.CHECKPOINTS,
        marks,
        job.resume_command,
        job.selection.solver,
    )


def fingerprint(network: Network, data: Data, job: Job, dist: Dist) -> dict[str, str]:
    """What must not change between a run and its resume."""
    steps = (job.stage_steps, job.stage_epochs, job.stage_lr, job.sweeps)
    trained = (job.training, *steps, str(job.amp))
    return {
        **{f"prune.{key}": str(value) for key, value in asdict(job.selection).items()},
        **{f"training.{key}": value for key, value in job.options.fingerprint().items()},
        "model": f"{network.base} {digest_of(network.module.state_dict())}",
        "data": f"{data.source} {data.digest[:16]}",
        "input": str(data.input),
        "training": str((*trained, job.batch_size)),
        "processes": str(dist.world),
    }


def _original(network: Network, job: Job) -> Network:
    """The dense network that an artifact goes back to; a network that was never cut is its own."""
    if not network.cuts or network.base.source == artifact.CUSTOM:
        return network
    if job.ancestor is not None:
        return artifact.load_dense(network.base, network.input, job.ancestor)
    return replace(network, module=models.build(network.base), cuts={})


def _top1(network: Network, data: Data, job: Job, dist: Dist) -> Accuracy | None:
    if not data.labelled:
        return None
    batches = loader(data.report, workers=job.workers, dist=dist, device=job.device)
    predict = predictor(network.module.to(job.device), amp=job.amp)
    classes = network.base.num_classes
    found = evaluate(predict, batches, classes, per_class=True, dist=dist, title="accuracy")
    network.module.cpu()
    return found


def gates_of(job: Job, agreement: float, images: int = 0) -> list[dict[str, object]]:
    """The verdict on --min-agreement, where it is given."""
    limit = job.min_agreement
    if limit is None:
        return []
    if agreement < limit:
        raise GateFailed(
            f"the slim network agrees with the dense one on {agreement:.2f} % of the images",
            why=f"the limit is {limit:g} %, on {images} held-out images",
            try_="a smaller --rate, or more --samples",
        )
    return [{"name": "agreement", "limit": limit, "value": agreement, "ok": True}]


def _dense(network: Network, job: Job, folder: Path) -> dict[str, object]:
    """Keep the dense weights beside the result, to learn from; says where, for the lineage.

    Of an artifact that is pruned again they are those that it came from, where they can be had.
    """
    known: Any = (job.lineage or {}).get("dense", {})
    origin = known.get("weights", "") if network.cuts else network.weights
    if not network.cuts:
        data = _weights(network.module)
    elif job.ancestor is not None:
        data = files.read_bytes(job.ancestor, what="the dense weights")
    else:
        return {"dense": {"checkpoint": None, "weights": origin}}
    files.publish(folder / DENSE_WEIGHTS, data)
    return {"dense": {"checkpoint": DENSE_WEIGHTS, "weights": origin}}


def _weights(module: nn.Module) -> bytes:
    data: bytes = safetensors_bytes({k: v.contiguous() for k, v in module.state_dict().items()})
    return data
