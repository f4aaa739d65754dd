"""Selection in closed form against the paper's loop, on the same network, samples and machine.

    python tests/benchmarks/selection.py CIFAR_DIR WEIGHTS_DIR [--network resnet56_a]
        [--samples 500] [--rate 0.5] [--groups layer1.4.conv1,layer2.4.conv1,layer3.4.conv1]
    python tests/benchmarks/selection.py CIFAR_DIR WEIGHTS_DIR --whole RESULTS.jsonl
        [--network resnet20_a] [--samples 256] [--rate 0.5] [--seeds 0] [--stage-steps 50]

Without --whole: one group of each stage by each solver, with the network's own loss as the
discriminating one; times are of choosing and refitting that group alone. The whole network is
extrapolated: every group of a stage is taken to cost what the measured one does.

With --whole the network is pruned from end to end by each solver, in a process of its own, and
trained with the same short fine-tune: seconds of selection, peak memory, test error before and
after training. Appends a line for each run and leaves out what is there.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path

import methods
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
from dcptool.training.loop import Run, fit
from dcptool.training.losses import cross_entropy
from dcptool.training.settings import Training


def main() -> None:
    """Compare the solvers, group by group or as a whole."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cifar", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--network", default="resnet56_a")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--rate", default="0.5")
    parser.add_argument("--groups", default="layer1.4.conv1,layer2.4.conv1,layer3.4.conv1")
    parser.add_argument("--whole", type=Path, metavar="RESULTS")
    parser.add_argument("--solvers", default="gram,sgd")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--stage-steps", type=int, default=50)
    parser.add_argument("--stage-lr", type=float, default=0.005)
    parser.add_argument("--loop-epochs", type=int, default=1)
    parser.add_argument("--updates", type=int, default=200, help="of the fine-tune")
    given = parser.parse_args()
    console.configure(quiet=True)
    if given.whole:
        whole(given)
    else:
        parts(given)


def whole(given: argparse.Namespace) -> None:
    """Prune and train with each solver and seed, and print a table."""
    names = ("network", "samples", "rate", "stage_steps", "stage_lr", "loop_epochs", "updates")
    conditions = {name: getattr(given, name) for name in names}
    for seed in map(int, given.seeds.split(",")):
        for solver in given.solvers.split(","):
            key = {**conditions, "solver": solver, "seed": seed}
            if any(key.items() <= line.items() for line in methods.read(given.whole)):
                continue
            given.solver = solver
            # A process of its own, as the peak of memory is never taken back.
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                found = {**key, **pool.submit(once, given, seed).result()}
            with given.whole.open("a") as stream:
                stream.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
    print("| network | solver | seeds | selection, s | peak, GB | error, % | after training, % |")
    print("|---|---|---|---|---|---|---|")
    lines = [x for x in methods.read(given.whole) if conditions.items() <= x.items()]
    for solver in dict.fromkeys(x["solver"] for x in lines):
        mine = [x for x in lines if x["solver"] == solver]
        keys = ("selection_s", "peak_gb", "error", "error_trained")
        mean = [f"{sum(x[k] for x in mine) / len(mine):.2f}" for k in keys]
        print(f"| {given.network} | {solver} | {len(mine)} | " + " | ".join(mean) + " |")


def once(given: argparse.Namespace, seed: int) -> dict:
    """One network by one solver, from the weights to the errors."""
    console.configure(quiet=True)
    module, data, facts = methods.pruned(given, "dcp", seed)
    status = Path("/proc/self/status").read_text()
    peak_kb = int(status.partition("VmHWM:")[2].split()[0])
    before = methods.right_of(module, data.report)
    training = Training(steps=given.updates, batch_size=64)
    batches = loader(data.train, training.images_per_step, train=True, seed=seed)
    schedule = training.schedule(len(batches), fresh=False)
    run = Run(optimizer=training.optimizer, seed=seed, channels_last="off")
    fit(module, batches, [cross_entropy()], schedule, run)
    after = methods.right_of(module, data.report)
    return {
        **facts,
        "peak_gb": round(peak_kb / 2**20, 2),
        "error": round(100 - 100 * float(before.mean()), 2),
        "error_trained": round(100 - 100 * float(after.mean()), 2),
        "threads": torch.get_num_threads(),
    }


def parts(given: argparse.Namespace) -> None:
    """Time both solvers on one group of each stage, and print a table."""
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
