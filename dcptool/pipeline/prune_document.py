"""What a prune says of itself: what was asked, what came out, and how it came about."""

from __future__ import annotations

import math

import torch

from dcptool.network import cost
from dcptool.pipeline.agreement import Agreement
from dcptool.pipeline.job import Job
from dcptool.selection.settings import Selection
from dcptool.selection.stages import Outcome
from dcptool.training.data import Data
from dcptool.training.evaluate import Accuracy


def budget(settings: Selection) -> dict[str, object]:
    """What was asked for."""
    if settings.plan is not None:
        return {"plan": dict(settings.plan)}
    rounding = {"round_to": settings.round_to}
    if settings.budget is not None:
        return {f"target_{settings.budget.kind}": settings.budget.value, **rounding}
    if settings.epsilon is not None:
        return {"epsilon": settings.epsilon, **rounding}
    asked: dict[str, object] = {"rate": float(settings.rate or 0)}
    if settings.rates:
        asked["rates"] = {k: float(v) for k, v in settings.rates.items()}
    if settings.widths != "uniform":
        asked["widths"] = settings.widths
    return {**asked, **rounding}


def side(counted: cost.Counted, accuracy: Accuracy | None) -> dict[str, object]:
    """Cost and accuracy of one network."""
    return {
        "params": counted.params,
        "macs": counted.macs,
        "top1": accuracy.top1 if accuracy else None,
    }


def metrics(
    data: Data, slim: Accuracy | None, dense: Accuracy | None, agreement: Agreement
) -> dict[str, object]:
    """What the manifest tells of the slim network's answers."""
    found: dict[str, object] = {
        "source": data.source,
        "agreement": agreement.top1,
        "agreement_images": agreement.images,
        "kl": agreement.kl,
    }
    if slim is not None:
        found |= {"images": data.report.name, "top1": slim.top1, "top5": slim.top5}
    if dense is not None:
        found["dense_top1"] = dense.top1
    return found


def lineage(
    settings: Selection, job: Job, outcome: Outcome, images: int, updates: int
) -> dict[str, object]:
    """How the slim network came about, for the manifest."""
    return {
        **budget(job.selection),
        "method": settings.method,
        "solver": settings.solver,
        "target": settings.target,
        "score": settings.score,
        "lambda": "inf" if math.isinf(settings.discrimination) else settings.discrimination,
        "samples": images,
        "positions": settings.positions,
        "scope": settings.scope,
        "prune_residual": settings.prune_residual,
        "training": job.training,
        "stage_steps": updates,
        "stage_lr": job.stage_lr,
        "sweeps": job.sweeps,
        "seed": settings.seed,
        "threads": torch.get_num_threads(),
        "groups": len(outcome.choices),
    }
