"""Pruning with no training and no labels, against what other ways leave at the same counts.

    python tests/benchmarks/oneshot.py CIFAR_DIR SHARED_DATA_DIR RESULTS.jsonl
        [--networks mobilenetv2_100,resnet56_a] [--rates 0.1,...,0.7]
        [--rows ours,curves,l1,random,tp-magnitude,tp-taylor] [--images 100,300,1000]

Appends a line for each run and leaves out what is there; then prints the table. All rows cut the
same groups to the same counts (`curves` spreads the same MACs) and see the same calibration images,
without labels but for Taylor, which needs them. torch-pruning's networks get batch-norm statistics
measured anew on those images; ours where held-out calibration images say so. Agreement is told on
up to 300 training images that were not chosen, accuracy on images that took no part in anything.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import torch
from peer import torch_pruning
from results import Line, Results

from dcptool import console
from dcptool.network import cost, models
from dcptool.network.base import Network
from dcptool.network.graph import build_graph
from dcptool.pipeline.agreement import agree, halves, settle_norms
from dcptool.selection import curves, widths
from dcptool.selection.settings import Selection
from dcptool.selection.stages import select
from dcptool.training.data import Data, DataSpec, open_data, samples
from dcptool.training.evaluate import predictor
from dcptool.training.loader import ImageSet, loader
from dcptool.training.norms import reestimate_norms

# Name, file of weights, and accuracy of the dense network on the same images.
NETWORKS = {
    "mobilenetv2_100": ("timm:mobilenetv2_100", "mobilenetv2_100", 68.8),
    "tf_efficientnet_lite0": ("timm:tf_efficientnet_lite0", "tf_efficientnet_lite0", 73.4),
    "squeezenet1_1": ("torchvision:squeezenet1_1", "torchvision_squeezenet1_1", 54.8),
    "resnet56_a": ("zoo:resnet56_a", "cifar10_resnet56_a", 93.39),
    "resnet56_b": ("zoo:resnet56", "cifar10_resnet56_b", 93.20),
}
ROWS = ("ours", "curves", "l1", "random", "tp-magnitude", "tp-taylor")
# Curves do not depend on the rate; with the seconds they took.
CURVES: dict[tuple[str, int], tuple[dict[str, widths.Curve], float]] = {}
# Images that agreement with the dense network is told on, beside those to choose on.
UNSEEN = 300
RATES = "0.1,0.2,0.3,0.4,0.5,0.6,0.7"


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cifar", type=Path)
    parser.add_argument("shared", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--images", default="1000")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    console.configure(quiet=True)
    results = Results(given.results)
    for name in given.networks.split(","):
        for count in map(int, given.images.split(",")):
            for rate in given.rates.split(","):
                for row in given.rows.split(","):
                    key = {
                        "network": name,
                        "images": count,
                        "rate": rate,
                        "row": row,
                        "seed": given.seed,
                    }
                    results.once(key, partial(run, given, name, count, rate, row))
    table(results.lines())


def open_all(given: argparse.Namespace, name: str) -> tuple[Network, Data]:
    """The network with its weights, and its images."""
    model, file, _ = NETWORKS[name]
    path = given.shared / "weights" / f"{file}.safetensors"
    network = models.load(model, checkpoint=path)
    small = name.startswith("resnet56")
    unit = {"mean": (0.0,) * 3, "std": (1.0,) * 3} if name == "resnet56_b" else {}
    folder = given.cifar if small else given.shared / "imagenet2k"
    data = open_data(DataSpec(data_dir=folder, seed=given.seed, **unit), network)
    network.input = data.input
    return network, data


def run(given: argparse.Namespace, name: str, count: int, rate: str, row: str) -> Line:
    """One network at one rate by one way: accuracy, agreement, seconds, memory."""
    network, data = open_all(given, name)
    # A tenth of the calibration images is held out, as `prune --images` does.
    chosen = samples(data, count, given.seed)
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(given.seed))
    held = max(2, len(chosen) // 10)
    fit = chosen.subset(order[held:].sort().values.numpy(), "samples")
    choosing, half = halves(chosen.subset(order[:held].sort().values.numpy(), "held out"))
    reporting = unseen(data, chosen, given.seed) or half
    peak_gb(restart=True)
    batches = list(loader(fit))
    images = [x for x, _ in batches]
    mirrored = [*images, *[x.flip(3) for x in images]]
    began = time.monotonic()
    settings = Selection(rate=Fraction(rate), samples=count, seed=given.seed)
    if row.startswith("tp-"):
        slim = torch_pruning(network, settings, batches, row)
        reestimate_norms(slim, loader(fit, 64))
        norms = "estimated anew"
    else:
        method = row if row in ("l1", "random") else "dcp"
        settings = replace(settings, method=method)
        if row == "curves":
            if (name, count) in CURVES:
                began -= CURVES[name, count][1]
            else:
                found = curves.measure(network, mirrored, settings)
                CURVES[name, count] = found, time.monotonic() - began
            found = CURVES[name, count][0]
            graph = build_graph(network.module, network.input.size)
            cost_of = widths.macs_of(network, graph)
            budget = cost_of(widths.at_rate(network, graph, settings))
            plan = widths.spread(settings.groups(graph), found, budget, cost_of)
            settings = replace(settings, plan=plan)
        slim = select(network, mirrored, settings).network.module
        fresh = settle_norms(network.module, slim, loader(fit, 64), choosing)
        norms = "estimated anew" if fresh else "kept"
    seconds = time.monotonic() - began
    peak = peak_gb()
    answer = agree(network.module, slim, reporting)
    predict = predictor(slim)
    right = torch.cat([predict(x).argmax(1) == y for x, y in loader(data.report)])
    return {
        "top1": round(100 * float(right.float().mean()), 2),
        "agreement": round(answer.top1, 2),
        "kl": round(answer.kl, 4),
        "macs": cost.count(slim, data.input.size).macs,
        "norms": norms,
        "seconds": round(seconds, 1),
        "peak_gb": peak,
    }


def unseen(data: Data, chosen: ImageSet, seed: int) -> ImageSet | None:
    """Images of the training set that were not chosen, to tell agreement on; None without any."""
    known = set(chosen.numbers.tolist())
    more = samples(data, len(chosen) + UNSEEN, seed)
    fresh = [i for i, number in enumerate(more.numbers.tolist()) if number not in known]
    return more.subset(np.array(fresh[:UNSEEN]), "unseen") if fresh else None


def peak_gb(restart: bool = False) -> float:
    """The most memory that this process held since the restart (Linux)."""
    if restart:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return round(int(status.partition("VmHWM:")[2].split()[0]) / 2**20, 2)


def table(lines: list[Line]) -> None:
    """Markdown: accuracy of each way, network by network."""
    print("| network | images | rate | " + " | ".join(ROWS) + " |")
    print("|---" * (3 + len(ROWS)) + "|")
    keys = dict.fromkeys((line["network"], line["images"], line["rate"]) for line in lines)
    for key in sorted(keys):
        found = {
            line["row"]: line["top1"]
            for line in lines
            if (line["network"], line["images"], line["rate"]) == key
        }
        cells = [f"{found[row]:.1f}" if row in found else "" for row in ROWS]
        print(f"| {key[0]} | {key[1]} | {key[2]} | " + " | ".join(cells) + " |")
    from scipy.stats import spearmanr

    kept = [line["top1"] / NETWORKS[line["network"]][2] for line in lines]
    rank = spearmanr([line["agreement"] for line in lines], kept).statistic
    print(f"rank correlation of agreement and the share of accuracy kept: {rank:.3f}")
    for name in dict.fromkeys(line["network"] for line in lines):
        of = [line for line in lines if line["network"] == name]
        if len(of) > 3:
            rank = spearmanr([x["agreement"] for x in of], [x["top1"] for x in of]).statistic
            print(f"rank correlation of agreement and accuracy, {name}: {rank:.3f} ({len(of)})")


if __name__ == "__main__":
    main()
