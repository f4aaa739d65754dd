"""One budget for the whole network against one rate for all groups, at equal milliseconds or MACs.

    python tests/benchmarks/budgets.py latency SHARED_DATA_DIR RESULTS.jsonl
        [--networks mobilenetv2_100,tf_efficientnet_lite0] [--rate 0.3] [--seeds 0,1,2]
        [--samples 300]
    python tests/benchmarks/budgets.py macs SHARED_DATA_DIR RESULTS.jsonl --cifar CIFAR_DIR
        [--rate 0.5] [--seeds 0,1,2] [--samples 512] [--steps 200]

latency: `prune --rate` without training on photographs without labels, timed in onnxruntime; then
`prune --target-latency` with the milliseconds of that network as its aim. Both are timed in turn;
where they differ by more than the target's 5 %, the aim is corrected once and the second one made
again. Both are evaluated on images that took no part. Needs a quiet machine. macs: ResNet-56 on
CIFAR-10 at the MACs of the rate, before and after the same short fine-tune. Appends a line for each
pair and leaves out what is there; then prints the table.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from methods import right_of
from peers import Bench
from results import Line, Results

import dcptool
from dcptool import console
from dcptool.pipeline.widths import TOLERANCE
from dcptool.training.settings import LR_TRAINED

TIMING = {"batch_size": 1, "threads": 2}
# Rate and images.
DEFAULTS = {"latency": ("0.3", 300), "macs": ("0.5", 512)}


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["latency", "macs"])
    parser.add_argument("shared", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--networks", default="mobilenetv2_100,tf_efficientnet_lite0")
    parser.add_argument("--rate")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    given = parser.parse_args()
    rate, count = DEFAULTS[given.kind]
    given.rate, given.samples = given.rate or rate, given.samples or count
    given.network, given.weights = "resnet56_a", given.shared / "weights"
    console.configure(quiet=True)
    results = Results(given.results)
    names = given.networks.split(",") if given.kind == "latency" else [given.network]
    run = at_latency if given.kind == "latency" else at_macs
    for name in names:
        for seed in map(int, given.seeds.split(",")):
            key = {"kind": given.kind, "network": name, "rate": given.rate, "seed": seed}
            key |= {"samples": given.samples}
            results.once(key, partial(run, given, name, seed))
    table(results.lines(kind=given.kind))


def at_latency(given: argparse.Namespace, name: str, seed: int) -> Line:
    """Both ways at the milliseconds of the rate."""
    images = given.shared / "imagenet2k"
    common = {
        "checkpoint": given.shared / "weights" / f"{name}.safetensors",
        "images": images / "train",
        "training": False,
        "samples": given.samples,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as folder:
        one, budget = Path(folder) / "one", Path(folder) / "budget"
        dcptool.prune(name, rate=given.rate, output=one, **common)
        dense = dcptool.bench(one, **TIMING)["speedup"][0]
        aim = round(1 / dense["ratio"], 4)
        for _ in range(2):
            document = dcptool.prune(
                name,
                target_latency=aim,
                threads=TIMING["threads"],
                output=budget,
                force=True,
                **common,
            )
            ratio = dcptool.bench(one, budget, baseline=str(one), **TIMING)["speedup"][0]
            if abs(ratio["ratio"] - 1) <= TOLERANCE["latency"]:
                break
            aim = round(aim * ratio["ratio"], 4)
        top1 = {
            place.name: dcptool.evaluate(place, data_dir=images)["top1"] for place in (one, budget)
        }
    return {
        "top1_rate": top1["one"],
        "top1_budget": top1["budget"],
        "share_of_dense": aim,
        "time_against_rate": round(1 / ratio["ratio"], 3),
        "interval": [round(1 / ratio["high"], 3), round(1 / ratio["low"], 3)],
        "macs_budget": document["slim"]["macs"],
    }


def at_macs(given: argparse.Namespace, name: str, seed: int) -> Line:
    """Both ways at the MACs of the rate, before and after a short fine-tune.

    The end of the fine-tune counts, better or not: the dense network has seen the images that
    `finetune` would hold out, so that they speak for the start.
    """
    start = {
        "checkpoint": given.shared / "weights" / f"cifar10_{name}.safetensors",
        "training": False,
        "samples": given.samples,
        "data_dir": given.cifar,
        "seed": seed,
    }
    line: dict[str, Any] = {"steps": given.steps}
    bench = Bench(given)
    dense, data = bench.open(seed)
    with tempfile.TemporaryDirectory() as folder:
        one, budget = Path(folder) / "one", Path(folder) / "budget"
        rate = dcptool.prune(f"zoo:{name}", rate=given.rate, output=one, **start)
        macs = rate["slim"]["macs"]
        spread = dcptool.prune(f"zoo:{name}", target_macs=macs, output=budget, **start)
        for place, document in ((one, rate), (budget, spread)):
            way = "rate" if place is one else "budget"
            line[f"macs_{way}"] = document["slim"]["macs"]
            line[f"top1_{way}"] = round(document["slim"]["top1"], 2)
            slim = dcptool.load(place)
            bench.train(slim, data, dense.module, given.steps, LR_TRAINED, seed)
            line[f"tuned_{way}"] = round(100 * float(right_of(slim, data.report).mean()), 2)
    return line


def table(lines: list[Line]) -> None:
    """Markdown: means over the seeds, and the gain of every seed."""
    print("| network | rate | seeds | top-1, one rate | top-1, one budget | gain of each seed |")
    print("|---" * 6 + "|")
    for name, rate in dict.fromkeys((x["network"], x["rate"]) for x in lines):
        mine = [x for x in lines if (x["network"], x["rate"]) == (name, rate)]
        for what in ("top1", "tuned"):
            if f"{what}_rate" not in mine[0]:
                continue
            one, budget = (
                np.array([x[f"{what}_{way}"] for x in mine]) for way in ("rate", "budget")
            )
            gains = ", ".join(f"{gain:+.2f}" for gain in budget - one)
            label = name if what == "top1" else f"{name}, fine-tuned"
            print(
                f"| {label} | {rate} | {len(mine)} | {one.mean():.2f} | {budget.mean():.2f} "
                f"| {gains} |"
            )


if __name__ == "__main__":
    main()
