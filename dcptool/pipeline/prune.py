"""`prune` from data to artifact: calibration, stages, selection, measurement, publication."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import nn

from dcptool import console, files
from dcptool.errors import GateFailed, InputError, Interrupted, UsageError
from dcptool.network import artifact, cost
from dcptool.network.base import Cut, Network
from dcptool.network.graph import build_graph
from dcptool.pipeline.stage_training import SAVE_EVERY_S, StagePlan, StageTrainer
from dcptool.selection.heads import Head
from dcptool.selection.settings import Selection
from dcptool.selection.stage import Choice
from dcptool.selection.stages import Outcome, Progress, nothing_to_prune, select
from dcptool.training import signals
from dcptool.training.checkpoint import Checkpoints, digest_of
from dcptool.training.data import Data, samples
from dcptool.training.evaluate import Accuracy, evaluate, predictor
from dcptool.training.loader import ImageSet, loader

STEPS_FILE = "steps.jsonl"
DENSE_WEIGHTS = "dense.safetensors"
CHECKPOINTS = "checkpoints"
EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Job:
    """What surrounds selection: training in stages, machine, gates, names."""

    selection: Selection
    training: bool = True
    stage_steps: int | None = None
    stage_lr: float = 0.005
    batch_size: int = 64
    device: str = "cpu"
    workers: int | None = None
    min_agreement: float | None = None
    lineage: dict[str, object] | None = None
    resume_command: str = ""


@dataclass(frozen=True)
class Agreement:
    """How far the slim network answers as the dense one, on images held out from selection."""

    top1: float
    kl: float
    images: int


def check(network: Network, data: Data, settings: Selection, *, training: bool) -> None:
    """Refuse what cannot work, before anything is written."""
    if training and not data.labelled:
        raise UsageError(
            "images without labels cannot train",
            why="the stages of DCP are fine-tuned with labels",
            try_="add --no-training, or give labels with --data-dir",
        )
    graph = build_graph(network.module, data.input.size)
    if settings.plan is None:
        if not settings.groups(graph):
            raise nothing_to_prune(network, graph)
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
            try_=f"dcptool analyze {network.base} --emit-plan plan.json",
        )


def prune(network: Network, data: Data, job: Job, folder: Path) -> dict[str, Any]:
    """Prune `network` on `data` and publish the artifact in `folder`; returns the document."""
    started = time.monotonic()
    network.input = data.input
    if data.labelled and data.classes:
        network.classes = data.classes
    settings = job.selection
    chosen = samples(data, settings.samples, settings.seed)
    batches = list(loader(chosen, job.batch_size, workers=job.workers))
    images = [x for x, _ in batches]
    labels = [y for _, y in batches]
    dense_top1 = _top1(network.module, data, job)
    memory = Checkpoints(folder / CHECKPOINTS, fingerprint(network, data, job), SAVE_EVERY_S)
    saved = memory.load()
    start = _progress(saved) if saved is not None else None
    trainer = None
    if job.training:
        plan = StagePlan(
            job.stage_steps,
            job.stage_lr,
            job.batch_size,
            settings.seed,
            job.device,
            job.workers,
            folder / CHECKPOINTS,
            memory.fingerprint,
            job.resume_command,
        )
        trainer = StageTrainer(network, data, plan, labels)
    if trainer is not None and saved is not None:
        trainer.restore(saved["head"])
    (folder / STEPS_FILE).unlink(missing_ok=True)
    for choice in start.choices if start is not None else ():
        _record(folder, choice)
    selection_began = time.monotonic()
    with signals.watch() as flag:

        def edge(progress: Progress) -> None:
            if flag.number or memory.due():
                memory.save(_tree(progress, trainer.head if trainer else None))
            if flag.number:
                done = f"{len(progress.choices)} groups decided, state saved"
                raise Interrupted(flag.number, message=f"stopped: {done}", try_=job.resume_command)

        outcome = select(
            network,
            images,
            settings,
            fit_stage=trainer.fit_stage if trainer else None,
            report=lambda choice: _record(folder, choice),
            edge=edge,
            start=start,
        )
    selection_seconds = time.monotonic() - selection_began
    training_seconds = trainer.seconds if trainer else 0.0
    slim = outcome.network
    dense_cost = cost.count(network.module, data.input.size)
    slim_cost = cost.count(slim.module, data.input.size)
    agreement = agree(network.module, slim.module, data.val, job)
    slim_top1 = _top1(slim.module, data, job)
    gates = _gates(job, agreement)
    files.publish(folder / DENSE_WEIGHTS, _weights(network.module))
    document = {
        "run": folder.name,
        "artifact": str(folder),
        "model": str(network.base),
        "data": data.source,
        "method": settings.method,
        "solver": settings.solver,
        **_budget(settings),
        "dense": _side(dense_cost, dense_top1),
        "slim": _side(slim_cost, slim_top1),
        "kept": {choice.group: len(choice.kept) for choice in outcome.choices},
        "dead": sum(choice.dead for choice in outcome.choices),
        "agreement": {"top1": agreement.top1, "kl": agreement.kl, "images": agreement.images},
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
    artifact.save(
        slim,
        folder,
        cost=artifact.cost_document(
            slim_cost.params, slim_cost.macs, dense_cost.params, dense_cost.macs
        ),
        metrics=_metrics(data, slim_top1, dense_top1, agreement),
        lineage={
            **(job.lineage or {}),
            "dense": {"checkpoint": DENSE_WEIGHTS, "weights": network.weights},
            "prune": _plain(settings, job, outcome),
        },
    )
    clear_checkpoints(folder)
    return document


def _record(folder: Path, choice: Choice) -> None:
    """Append what was decided for one group."""
    line = {
        "group": choice.group,
        "units": choice.units,
        "kept": list(choice.kept),
        "order": list(choice.order),
        "losses": [float(f"{loss:.6g}") for loss in choice.losses],
        "norms": [float(f"{norm:.6g}") for norm in choice.norms],
        "dead": choice.dead,
        "stopped": choice.why_stopped,
    }
    with (folder / STEPS_FILE).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def fingerprint(network: Network, data: Data, job: Job) -> dict[str, str]:
    """What must not change between a run and its resume."""
    return {
        **{f"prune.{key}": str(value) for key, value in asdict(job.selection).items()},
        "model": f"{network.base} {digest_of(network.module.state_dict())}",
        "data": f"{data.source} {data.digest[:16]}",
        "input": str(data.input),
        "training": str((job.training, job.stage_steps, job.stage_lr, job.batch_size)),
    }


def _tree(progress: Progress, head: Head | None) -> dict[str, Any]:
    """Progress in the form that checkpoints keep."""
    return {
        "stage": progress.stage,
        "place": progress.place,
        "cuts": {k: [c.inputs, c.outputs, c.dim] for k, c in progress.cuts.items()},
        "removed": list(progress.removed),
        "choices": [asdict(choice) for choice in progress.choices],
        "weights": dict(progress.weights),
        "head": dict(head.state_dict()) if head is not None else None,
    }


def _progress(tree: Mapping[str, Any]) -> Progress:
    def indices(value: Sequence[int] | None) -> tuple[int, ...] | None:
        return None if value is None else tuple(value)

    return Progress(
        tree["stage"],
        tree["place"],
        {k: Cut(indices(i), indices(o), dim) for k, (i, o, dim) in tree["cuts"].items()},
        tuple(tree["removed"]),
        tuple(
            Choice(
                entry["group"],
                entry["units"],
                tuple(entry["kept"]),
                tuple(entry["losses"]),
                entry["why_stopped"],
                entry["dead"],
                tuple(entry["order"]),
                tuple(entry["norms"]),
            )
            for entry in tree["choices"]
        ),
        tree["weights"],
    )


def clear_checkpoints(folder: Path) -> None:
    """Remove the states of a run that is through."""
    place = folder / CHECKPOINTS
    for path in [*place.glob("state-*.safetensors"), *place.glob("stage-*/state-*.safetensors")]:
        path.unlink(missing_ok=True)
    for old in [*place.glob("stage-*"), place]:
        with suppress(OSError):
            old.rmdir()


def agree(dense: nn.Module, slim: nn.Module, images: ImageSet, job: Job) -> Agreement:
    """Top-1 agreement in percent and mean KL divergence of the slim network from the dense one."""
    same, divergence, count = 0, 0.0, 0
    for batch, _ in loader(images, EVALUATION_BATCH, workers=job.workers):
        wanted = predictor(dense)(batch)
        found = predictor(slim)(batch)
        same += int((wanted.argmax(1) == found.argmax(1)).sum())
        log_wanted, log_found = wanted.log_softmax(1), found.log_softmax(1)
        divergence += float((log_wanted.exp() * (log_wanted - log_found)).sum())
        count += len(batch)
    return Agreement(100 * same / max(count, 1), divergence / max(count, 1), count)


def _top1(module: nn.Module, data: Data, job: Job) -> Accuracy | None:
    if not data.labelled:
        return None
    batches = loader(data.report, EVALUATION_BATCH, workers=job.workers)
    classes = len(data.classes)
    return evaluate(predictor(module), batches, classes, title="accuracy")


def _gates(job: Job, agreement: Agreement) -> list[dict[str, object]]:
    if job.min_agreement is None:
        return []
    if agreement.top1 < job.min_agreement:
        raise GateFailed(
            f"the slim network agrees with the dense one on {agreement.top1:.2f} % of the images",
            why=f"the limit is {job.min_agreement:g} %, on {agreement.images} held-out images",
            try_="a smaller --rate, or more --samples",
        )
    limit = job.min_agreement
    return [{"name": "agreement", "limit": limit, "value": agreement.top1, "ok": True}]


def _budget(settings: Selection) -> dict[str, object]:
    if settings.plan is not None:
        return {"plan": dict(settings.plan)}
    if settings.epsilon is not None:
        return {"epsilon": settings.epsilon}
    return {"rate": float(settings.rate or 0)}


def _side(counted: cost.Counted, accuracy: Accuracy | None) -> dict[str, object]:
    return {
        "params": counted.params,
        "macs": counted.macs,
        "top1": accuracy.top1 if accuracy else None,
    }


def _metrics(
    data: Data, slim: Accuracy | None, dense: Accuracy | None, agreement: Agreement
) -> dict[str, object]:
    metrics: dict[str, object] = {
        "source": data.source,
        "agreement": agreement.top1,
        "agreement_images": agreement.images,
        "kl": agreement.kl,
    }
    if slim is not None and dense is not None:
        metrics |= {
            "images": data.report.name,
            "top1": slim.top1,
            "top5": slim.top5,
            "dense_top1": dense.top1,
        }
    return metrics


def _plain(settings: Selection, job: Job, outcome: Outcome) -> dict[str, object]:
    return {
        **_budget(settings),
        "method": settings.method,
        "solver": settings.solver,
        "target": settings.target,
        "score": settings.score,
        "lambda": settings.discrimination,
        "samples": settings.samples,
        "positions": settings.positions,
        "scope": settings.scope,
        "prune_residual": settings.prune_residual,
        "training": job.training,
        "stage_steps": job.stage_steps if job.training else 0,
        "stage_lr": job.stage_lr,
        "seed": settings.seed,
        "threads": torch.get_num_threads(),
        "groups": len(outcome.choices),
    }


def _weights(module: nn.Module) -> bytes:
    data: bytes = safetensors_bytes({k: v.contiguous() for k, v in module.state_dict().items()})
    return data


def next_commands(document: dict[str, Any]) -> str:
    """What to type after a prune."""
    console.detail(f"record of each group: {document['artifact']}/{STEPS_FILE}")
    return "next: dcptool finetune, dcptool export --onnx, dcptool bench"
