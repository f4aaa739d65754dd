"""What each default of `prune` and `finetune` is worth: one change at a time, on held-out images.

    python tests/benchmarks/defaults.py CIFAR_DIR WEIGHTS_DIR RESULTS.jsonl [--network resnet56_a]
        [--share 1/3] [--updates 300] [--seeds 0,1] [--batch-size 32] [--only "as it is,lr 0.01"]

Accuracy is on the 5,000 training images that take no part in pruning and training; test images are
not looked at. Updates are the same in every row, those before and between cuts included. Appends
a line for each run to RESULTS.jsonl and leaves out what is there, then prints the table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from methods import right_of
from peers import Bench, uniform

import dcptool
from dcptool import console

# prune: options of `dcptool prune`; train: those of the fine-tune; stages: updates before the
# stages of pruning; steps: shares of dense MACs on the way, each with its part of the updates.
ROWS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "lr 0.001": {"train": {"lr": 0.001}},
    "lr 0.002": {"train": {"lr": 0.002}},
    "lr 0.01": {"train": {"lr": 0.01}},
    "lr 0.02": {"train": {"lr": 0.02}},
    "lr 0.05": {"train": {"lr": 0.05}},
    "norms in eval mode": {"train": {"norms": "eval"}},
    "no distillation": {"train": {"kd": 0.0}},
    "distillation alone": {"train": {"kd": 1.0}},
    "distillation alone, temperature 4": {"train": {"kd": 1.0, "temperature": 4.0}},
    "distillation 0.9, temperature 4": {"train": {"kd": 0.9, "temperature": 4.0}},
    "one rate for all groups": {"prune": {"target_macs": None}},
    "exact widths": {"prune": {"round_to": "1"}},
    "a third of the updates in stages": {"stages": Fraction(1, 3)},
    "the same, lambda 0": {"stages": Fraction(1, 3), "prune": {"lambda": 0.0}},
    "the same, one extra loss": {"stages": Fraction(1, 3), "prune": {"losses": 1}},
    "two cuts": {"steps": [Fraction(3, 5)]},
    "three cuts": {"steps": [Fraction(7, 10), Fraction(1, 2)]},
    "2,048 samples": {"prune": {"samples": "2048"}},
    "two sweeps": {"prune": {"sweeps": 2}},
}
# Both losses of a stage are an update each.
LOSSES_OF_A_STAGE = 2


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cifar", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--network", default="resnet56_a")
    parser.add_argument("--share", default="1/3")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--only", default=",".join(ROWS).replace(", ", "; "))
    given = parser.parse_args()
    console.configure(quiet=True)
    bench = Bench(given)
    names = ("network", "share", "updates", "batch_size")
    conditions = {name: getattr(given, name) for name in names}
    for seed in bench.seeds:
        for row in given.only.split(","):
            row = row.replace("; ", ", ")
            key = {**conditions, "row": row, "seed": seed}
            bench.results.once(key, partial(run, bench, ROWS[row], seed))
    table(bench.results.lines(**conditions))


def run(bench: Bench, change: dict[str, Any], seed: int) -> dict:
    """Prune and train in one way; accuracy on the images held out."""
    given = bench.given
    dense, data = bench.open(seed)
    share, left = Fraction(given.share), given.updates
    rate, macs = uniform(dense, share)
    prune = {"target_macs": macs, **change.get("prune", {})}
    if prune["target_macs"] is None:
        prune = {**prune, "rate": str(float(rate)), "round_to": "1"}
    if "stages" in change:
        stages = prune.get("losses", 3) + 1
        steps = round(given.updates * change["stages"] / (stages * LOSSES_OF_A_STAGE))
        # The last stage has the network's own loss alone.
        left -= steps * (stages * LOSSES_OF_A_STAGE - 1)
        prune |= {"stage_steps": steps, "batch_size": given.batch_size}
    else:
        prune["training"] = False
    began = time.monotonic()
    cuts = [*[{**prune, "target_macs": int(s * whole(dense))} for s in change.get("steps", [])]]
    cuts.append(prune)
    with tempfile.TemporaryDirectory() as folder:
        target: str | Path = f"zoo:{given.network}"
        for number, options in enumerate(cuts):
            place = Path(folder) / f"cut{number}"
            common = {"data_dir": given.cifar, "seed": seed, "output": place}
            if number == 0:
                common["checkpoint"] = bench.file
            dcptool.prune(target, **common, **options)
            slim = dcptool.load(place)
            start = right_of(slim, data.val).mean()
            updates = left // len(cuts)
            train = {"lr": 0.005, **change.get("train", {})}
            kept = {k: v.clone() for k, v in slim.state_dict().items()}
            bench.train(slim, data, dense.module, updates, seed=seed, **train)
            end = right_of(slim, data.val).mean()
            if number + 1 < len(cuts):
                target = store(slim, place, Path(folder) / f"trained{number}")
            elif end < start:
                slim.load_state_dict(kept)
    return {
        "start": round(100 * float(start), 2),
        "val": round(100 * float(max(start, end)), 2),
        "seconds": round(time.monotonic() - began, 1),
    }


def whole(dense: Any) -> int:
    """MACs of the dense network."""
    from dcptool.network import cost

    return cost.count(dense.module, dense.input.size).macs


def store(slim: Any, like: Path, place: Path) -> Path:
    """Write trained weights as an artifact, so that they can be pruned again."""
    from dcptool.network import artifact, cost

    network = artifact.load(like)
    network.module.load_state_dict(slim.state_dict())
    counted = cost.count(network.module, network.input.size)
    artifact.save(network, place, cost={"params": counted.params, "macs": counted.macs})
    return place


def table(lines: list[dict]) -> None:
    """Markdown: every change, with what it gives over the defaults."""
    base = {x["seed"]: x["val"] for x in lines if x["row"] == "as it is"}
    print("| change | before training, % | after, % | against the defaults | seeds |")
    print("|---|---|---|---|---|")
    for row in ROWS:
        found = [x for x in lines if x["row"] == row]
        if not found:
            continue
        gains = [x["val"] - base[x["seed"]] for x in found if x["seed"] in base]
        gain = f"{np.mean(gains):+.2f}" if gains and row != "as it is" else ""
        start, end = (np.mean([x[k] for x in found]) for k in ("start", "val"))
        print(f"| {row} | {start:.2f} | {end:.2f} | {gain} | {len(found)} |")


if __name__ == "__main__":
    main()
