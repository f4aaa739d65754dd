"""Selection in closed form against the paper's loop, on the same network, samples and machine.

    python tests/benchmarks/selection.py CIFAR_DIR WEIGHTS_DIR [--network resnet56_a]
        [--samples 500] [--rate 0.5] [--groups layer1.4.conv1,layer2.4.conv1,layer3.4.conv1]

One group of each stage by each solver, with the network's own loss as the discriminating one;
times are of choosing and refitting that group alone. The whole network is extrapolated: every
group of a stage is taken to cost what the measured one does.
"""

from __future__ import annotations

import argparse
import copy
import time
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn.functional as F

from dcptool import console
from dcptool.network import models
from dcptool.selection import greedy
from dcptool.selection.samples import share
from dcptool.selection.settings import Selection
from dcptool.selection.stage import Stage
from dcptool.selection.store import Room
from dcptool.training.data import DataSpec, open_data, samples
from dcptool.training.loader import loader


def main() -> None:
    """Time both solvers on each group and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cifar", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--network", default="resnet56_a")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--rate", default="0.5")
    parser.add_argument("--groups", default="layer1.4.conv1,layer2.4.conv1,layer3.4.conv1")
    given = parser.parse_args()
    console.configure(quiet=True)
    path = given.weights / f"cifar10_{given.network}.safetensors"
    network = models.load(f"zoo:{given.network}", checkpoint=path)
    data = open_data(DataSpec(data_dir=given.cifar), network)
    network.input = data.input
    batches = list(loader(samples(data, given.samples), 64))
    images = share([x for x, _ in batches])
    losses = [lambda s, y=y: F.cross_entropy(s, y, reduction="sum") for _, y in batches]
    walks = counted()
    print("| group | solver | seconds | walks over the samples | shared channels |")
    print("|---|---|---|---|---|")
    totals = {"sgd": 0.0, "gram": 0.0}
    for name in given.groups.split(","):
        kept = {}
        for solver in ("sgd", "gram"):
            is_loop = solver == "sgd"
            settings = Selection(
                rate=Fraction(given.rate),
                solver=solver,
                target="conv" if is_loop else "block",
                score="gradient" if is_loop else "rise",
            )
            dense = network.module.eval()
            current = copy.deepcopy(dense)
            room = Room(2**31)
            stage = Stage(network, dense, current, {}, settings, room, images, None, losses)
            group = stage.graph.group(name)
            with torch.no_grad():
                stage.probe.begin(stage.chain.place_of(group.consumers[-1]))
                walks.clear()
                began = time.perf_counter()
                kept[solver] = set(stage._decide(group).kept)
            seconds = time.perf_counter() - began
            alike = [g for g in settings.groups(stage.graph) if len(g.units) == len(group.units)]
            totals[solver] += seconds * len(alike)
            shared = f"{len(kept['sgd'] & kept[solver])} of {len(kept['sgd'])}"
            count = len(walks) if is_loop else 3  # moments, gradients, dense targets
            print(f"| {name} | {solver} | {seconds:.2f} | {count} | {shared} |", flush=True)
    ratio = totals["sgd"] / totals["gram"]
    print(
        f"extrapolated to the network: sgd {totals['sgd']:.0f} s, gram {totals['gram']:.1f} s: ",
        end="",
    )
    print(f"{ratio:.0f}x, {given.samples} samples, {torch.get_num_threads()} threads")


def counted() -> list[str]:
    """Note every walk that the loop takes: one for gradients, one for each epoch of training."""
    seen: list[str] = []
    for name in ("_walk", "_train"):
        plain = getattr(greedy, name)

        def noted(*args: object, plain=plain, name=name, **kwargs: object) -> object:
            seen.append(name)
            return plain(*args, **kwargs)

        setattr(greedy, name, noted)
    return seen


if __name__ == "__main__":
    main()
