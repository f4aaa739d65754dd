"""Test error right after pruning, method by method, with everything else the same.

    python tests/benchmarks/methods.py CIFAR_DIR WEIGHTS_DIR RESULTS.jsonl
        [--network resnet20_a] [--solver sgd] [--rate 0.5 | --rate epsilon=0.01] [--seeds 0]
        [--samples 256] [--loop-epochs 1] [--stage-steps 50] [--only dcp,l1]

Appends one line for each run to RESULTS.jsonl and leaves out what is there, so that it can be
stopped and started again. Then prints the table of all lines with the same conditions, with a
paired comparison of every row with dcp over the test images (McNemar, both tails). Selection and
stages see training images alone; whether fresh batch-norm statistics are kept is decided on
training images that were held out.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from results import Line, Results, mcnemar, packed, unpacked
from torch import nn

from dcptool import console
from dcptool.network import cost, models
from dcptool.pipeline.agreement import halves, settle_norms
from dcptool.pipeline.stage_training import StagePlan, StageTrainer
from dcptool.selection.settings import Selection
from dcptool.selection.stages import select
from dcptool.training.data import Data, DataSpec, open_data, samples
from dcptool.training.evaluate import predictor
from dcptool.training.loader import ImageSet, loader
from dcptool.training.settings import Training

ROWS = {
    "dcp": {"method": "dcp"},
    "dcp, lambda 0": {"method": "dcp", "discrimination": 0.0},
    "dcp, L_S alone": {"method": "dcp", "discrimination": math.inf},
    "random": {"method": "random"},
    "thinet": {"method": "thinet"},
    "cp": {"method": "cp"},
    "l1": {"method": "l1"},
    "apoz": {"method": "apoz"},
}


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cifar", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--network", default="resnet20_a")
    parser.add_argument("--solver", default="sgd")
    parser.add_argument("--rate", default="0.5")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--stage-steps", type=int, default=50)
    parser.add_argument("--stage-lr", type=float, default=0.005)
    parser.add_argument("--loop-epochs", type=int, help="1 with --solver sgd, else 0")
    parser.add_argument("--only", default=",".join(ROWS))
    given = parser.parse_args()
    console.configure(quiet=True)
    if given.loop_epochs is None:
        given.loop_epochs = int(given.solver == "sgd")
    results = Results(given.results)
    names = ("network", "solver", "rate", "samples", "stage_steps", "stage_lr", "loop_epochs")
    conditions = {name: getattr(given, name) for name in names}
    for seed in map(int, given.seeds.split(",")):
        for row in given.only.replace(", ", "; ").split(","):
            row = row.replace("; ", ", ")
            key = {**conditions, "row": row, "seed": seed}
            results.once(key, partial(run, given, row, seed))
    table(results.lines(**conditions))


def run(given: argparse.Namespace, row: str, seed: int) -> Line:
    """Prune once; returns the accuracy on the test images and which of them are right."""
    module, data, facts = pruned(given, row, seed)
    right = right_of(module, data.report)
    return {
        "top1": round(100 * float(right.mean()), 2),
        **facts,
        "right": packed(right),
    }


def right_of(module: nn.Module, images: ImageSet) -> np.ndarray:
    """Which images are classified rightly."""
    layout = torch.channels_last
    predict = predictor(copy.deepcopy(module).to(memory_format=layout))
    found = [predict(x.to(memory_format=layout)).argmax(1) == y for x, y in loader(images, 128)]
    return torch.cat(found).numpy()


def pruned(given: argparse.Namespace, row: str, seed: int) -> tuple[nn.Module, Data, Line]:
    """The slim network of one row, its images, and what it cost."""
    file = given.weights / f"cifar10_{given.network.replace('resnet56', 'resnet56_b')}.safetensors"
    if given.network.endswith("_a"):
        file = given.weights / f"cifar10_{given.network}.safetensors"
    network = models.load(f"zoo:{given.network}", checkpoint=file)
    unit = {} if given.network.endswith("_a") else {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    data = open_data(DataSpec(data_dir=given.cifar, seed=seed, **unit), network)
    network.input = data.input
    is_loop = given.solver == "sgd"
    _, sign, epsilon = given.rate.partition("epsilon=")
    settings = Selection(
        rate=None if sign else Fraction(given.rate),
        epsilon=float(epsilon) if sign else None,
        solver=given.solver,
        loop_epochs=given.loop_epochs,
        target="conv" if is_loop else "block",
        score="gradient" if is_loop else "rise",
        samples=given.samples,
        seed=seed,
        **ROWS[row],
    )
    chosen = samples(data, given.samples, seed)
    batches = list(loader(chosen, 64))
    began = time.monotonic()
    with TemporaryDirectory() as scratch:
        plan = StagePlan(
            given.stage_steps,
            None,
            given.stage_lr,
            Training(),
            None,
            64,
            seed,
            "cpu",
            None,
            Path(scratch),
            {},
            "",
            given.solver,
        )
        images, labels = (list(part) for part in zip(*batches, strict=True))
        trainer = StageTrainer(network, data, plan, images, labels)
        found = select(network, images, settings, fit_stage=trainer.fit_stage).network
    seconds = time.monotonic() - began - trainer.seconds
    choosing, _ = halves(data.val)
    fresh = settle_norms(network.module, found.module, loader(chosen, 64), choosing)
    counted = cost.count(found.module, data.input.size)
    facts = {
        "macs": counted.macs,
        "params": counted.params,
        "norms": "estimated anew" if fresh else "kept",
        "selection_s": round(seconds, 1),
        "training_s": round(trainer.seconds, 1),
    }
    return found.module, data, facts


def table(lines: list[Line]) -> None:
    """Markdown: mean error and spread over the seeds, pooled comparison with dcp."""
    print("| method | test error, % | spread | against dcp, p | norms | selection, s |")
    print("|---|---|---|---|---|---|")
    best = {line["seed"]: unpacked(line) for line in lines if line["row"] == "dcp"}
    for row in ROWS:
        found = [line for line in lines if line["row"] == row]
        if not found:
            continue
        errors = np.array([100 - line["top1"] for line in found])
        shared = [line for line in found if line["seed"] in best]
        p = ""
        if row != "dcp" and shared:
            ours = np.concatenate([best[line["seed"]] for line in shared])
            p = f"{mcnemar(ours, np.concatenate([unpacked(line) for line in shared])):.2g}"
        spread = f"{errors.std(ddof=1):.2f}" if len(errors) > 1 else ""
        seconds = np.mean([line["selection_s"] for line in found])
        norms = ", ".join(sorted({line["norms"] for line in found}))
        print(f"| {row} | {errors.mean():.2f} | {spread} | {p} | {norms} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
