"""The smallest network that stays within a drop of accuracy, found by few trials.

Each trial is a whole `prune` at one share of the dense cost, in a folder of its own, and is judged
on held-out images: by accuracy where there are labels, else by agreement with the dense network.
The curves of the first trial serve all others. A search that was stopped goes on with the trials
it has.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dcptool import console, files
from dcptool.errors import GateFailed
from dcptool.network import artifact
from dcptool.network.base import Network
from dcptool.network.graph import build_graph
from dcptool.pipeline import prune as one_prune
from dcptool.pipeline import widths
from dcptool.pipeline.job import Job
from dcptool.pipeline.prune_record import SEARCH_FILE, TRIALS, WIDTHS_FILE
from dcptool.selection.settings import Budget
from dcptool.selection.widths import macs_of, params_of, reach
from dcptool.training.data import Data
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.evaluate import evaluate, predictor
from dcptool.training.loader import loader

MOST_TRIALS = 6
# The search ends when the smallest that holds and the largest that fails are this close.
CLOSE = 1.08


@dataclass(frozen=True)
class Goal:
    """How much accuracy may be lost, in points, and what is to be small."""

    drop: float
    kind: str = "macs"
    condition: Budget = field(default_factory=lambda: Budget("macs", 1.0, True))


def smallest(
    network: Network, data: Data, job: Job, goal: Goal, folder: Path, dist: Dist = SINGLE
) -> dict[str, Any]:
    """Try shares of the dense cost, and publish the smallest network that holds."""
    network.input = data.input
    graph = build_graph(network.module, data.input.size)
    cost_of = params_of if goal.kind == "params" else macs_of
    groups = job.selection.groups(graph)
    low, high = reach(groups, job.selection.round_to, cost_of(network, graph))
    fails, holds = low / high, 1.0
    dense = _top1(network, data, job, dist) if data.labelled else 100.0
    trials: list[dict[str, Any]] = _recorded(folder, dist)
    best: dict[str, Any] | None = None
    for number in range(MOST_TRIALS):
        share = round(math.sqrt(fails * holds), 3)
        if number < len(trials):
            trial = trials[number]
        else:
            trial = _try(network, data, job, goal, folder / TRIALS, trials, share, dense, dist)
            trials.append(trial)
            if dist.is_writer:
                files.publish_json(folder / SEARCH_FILE, {"goal": goal.drop, "trials": trials})
        ok = _holds(trial, goal, job)
        console.note(
            f"trial {number + 1}: {trial['share']:g} of dense {goal.kind}, {_lost(trial)}: "
            f"{'holds' if ok else 'too much'}"
        )
        if not ok:
            fails = max(fails, trial["share"])
        elif trial["share"] <= holds:
            best, holds = trial, trial["share"]
        if holds / fails < CLOSE:
            break
    if best is None:
        raise GateFailed(
            f"no network within {goal.drop:g} points was found",
            why="\n".join(f"{t['share']:g} of dense: {_lost(t)}" for t in trials),
            try_="a larger --max-accuracy-drop, more --stage-steps or more --samples",
        )
    document = dict(best["document"])
    if dist.is_writer:
        _publish(folder, Path(document["artifact"]).name)
    dist.barrier()
    rows = [
        {**{k: v for k, v in trial.items() if k != "document"}, "ok": _holds(trial, goal, job)}
        for trial in trials
    ]
    document.pop(f"target_{goal.kind}")  # of the trial, not of what was asked
    spent = [trial["document"]["seconds"] for trial in trials]
    gate = {"name": "accuracy_drop", "limit": goal.drop, "value": best["drop"], "ok": True}
    return {
        **document,
        "run": folder.name,
        "artifact": str(folder),
        "max_accuracy_drop": goal.drop,
        "seconds": {key: round(sum(each[key] for each in spent), 2) for key in spent[0]},
        "judged": {"images": len(data.val), "drop": best["drop"], "labels": data.labelled},
        "trials": rows,
        "gates": [*one_prune.gates_of(job, document["agreement"]["top1"]), gate],
    }


def _holds(trial: dict[str, Any], goal: Goal, job: Job) -> bool:
    """Whether a trial is good enough; one of an earlier process may have been asked for less."""
    agrees = trial["document"]["agreement"]["top1"] >= (job.min_agreement or 0.0)
    return bool(trial["drop"] <= goal.drop) and agrees


def _lost(trial: dict[str, Any]) -> str:
    agreed = trial["document"]["agreement"]["top1"]
    return f"{trial['drop']:.2f} points lost, agreement {agreed:.2f} %"


def _try(
    network: Network,
    data: Data,
    job: Job,
    goal: Goal,
    place: Path,
    before: Sequence[Mapping[str, Any]],
    share: float,
    dense: float,
    dist: Dist,
) -> dict[str, Any]:
    # Named after what is tried, so that a trial that was stopped goes on as what it was.
    folder = place / f"{share:g}"
    if dist.is_writer:
        files.make_folder(folder)
    first = place / f"{before[0]['share']:g}" / WIDTHS_FILE if before else None
    budget = replace(goal.condition, kind=goal.kind, value=share, is_share=True, met=False)
    is_known = dist.broadcast(first is not None and first.is_file())
    known = widths.read_curves(first) if first is not None and is_known else None
    trial_job = replace(
        job,
        selection=replace(job.selection, budget=budget),
        curves=known,
        # Here a limit decides between sizes, and ends no search.
        min_agreement=None,
    )
    fresh = replace(network, module=copy.deepcopy(network.module))
    document = one_prune.prune(fresh, data, trial_job, folder, dist)
    if data.labelled:
        kept = _top1(artifact.load(folder), data, job, dist)
    else:
        kept = document["agreement"]["top1"]
    drop = dense - kept
    return {
        "share": share,
        "macs": document["slim"]["macs"],
        "params": document["slim"]["params"],
        "drop": round(drop, 3) + 0.0,
        "document": document,
    }


def _top1(network: Network, data: Data, job: Job, dist: Dist) -> float:
    """Accuracy on the images that choose, never on those that report."""
    batches = loader(data.val, workers=job.workers, dist=dist, device=job.device)
    predict = predictor(network.module.to(job.device), amp=job.amp)
    found = evaluate(predict, batches, network.base.num_classes, dist=dist, title="validation")
    network.module.cpu()
    return found.top1


def _recorded(folder: Path, dist: Dist) -> list[dict[str, Any]]:
    path = folder / SEARCH_FILE
    if not dist.broadcast(path.is_file()):
        return []
    saved: Any = files.read_json(path, what="the search of the run")
    return list(saved["trials"])


def _publish(folder: Path, number: str) -> None:
    """Bring the files of the best trial into the run, its manifest last."""
    source = folder / TRIALS / number
    inside = [p for p in sorted(source.iterdir()) if p.is_file() and p.name != artifact.MANIFEST]
    for path in [*inside, source / artifact.MANIFEST]:
        files.publish(folder / path.name, path.read_bytes())
    shutil.rmtree(folder / TRIALS)
