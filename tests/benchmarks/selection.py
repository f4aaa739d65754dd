"""Selection in closed form against the paper's loop, on the same network, samples and machine.

    python tests/benchmarks/selection.py CIFAR_DIR WEIGHTS_DIR [--network resnet56_a]
        [--samples 500] [--rate 0.5] [--cache-gb 8]
    python tests/benchmarks/selection.py IMAGE_DIR WEIGHTS_DIR --network timm:resnet50 --channels 2
    python tests/benchmarks/selection.py CIFAR_DIR WEIGHTS_DIR --whole RESULTS.jsonl
        [--network resnet20_a] [--samples 256] [--rate 0.5] [--seeds 0] [--stage-steps 50]

Without --whole: the stages of `prune` with untrained heads on their pivots, nothing is trained.
The closed form is timed over every whole stage, on those of the samples that `prune` would take; of
the loop the group in the middle of each stage is run on the dense network (its first --channels),
and the rest is extrapolated: each group walks over the samples as often as the channels that it
keeps ask for, and a walk is taken to cost what it did for the measured one. `--solver sgd` keeps
the features of a layer and walks from there to the pivot; the program that the authors released
walks from the images to the pivot in the pruned network and to the layer in the dense one, each
time: one such walk is timed for each stage. Seconds are of the processor, so that neighbours on the
machine disturb them little. A network of timm has random weights, on which time does not depend.

With --whole the network is pruned from end to end by each solver, in a process of its own, and
trained with the same short fine-tune: seconds of selection, peak memory, test error before and
after training. Appends a line for each run and leaves out what is there.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path

import methods
import torch
from results import Results
from torch import nn

from dcptool import console
from dcptool.network import models
from dcptool.network.base import Network
from dcptool.network.graph import build_graph
from dcptool.selection import greedy
from dcptool.selection.chain import run_from
from dcptool.selection.enough import useful
from dcptool.selection.greedy import LossAt
from dcptool.selection.heads import new_head, summed, width_at
from dcptool.selection.samples import share
from dcptool.selection.settings import Selection
from dcptool.selection.stage import Stage
from dcptool.selection.stages import plan_stages, select
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
    parser.add_argument("--channels", type=int, help="of the loop's group; all")
    parser.add_argument("--cache-gb", type=float, default=8, help="features in memory")
    parser.add_argument("--whole", type=Path, metavar="RESULTS")
    parser.add_argument("--solvers", default="gram,sgd")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--stage-steps", type=int, default=50)
    parser.add_argument("--stage-lr", type=float, default=0.005)
    parser.add_argument("--loop-epochs", type=int, default=0)
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
    results = Results(given.whole)
    for seed in map(int, given.seeds.split(",")):
        for solver in given.solvers.split(","):
            key = {**conditions, "solver": solver, "seed": seed}
            given.solver = solver
            results.once(key, partial(apart, given, seed))
    print("| network | solver | seeds | selection, s | peak, GB | error, % | after training, % |")
    print("|---|---|---|---|---|---|---|")
    lines = results.lines(**conditions)
    for solver in dict.fromkeys(x["solver"] for x in lines):
        mine = [x for x in lines if x["solver"] == solver]
        keys = ("selection_s", "peak_gb", "error", "error_trained")
        mean = [f"{sum(x[k] for x in mine) / len(mine):.2f}" for k in keys]
        print(f"| {given.network} | {solver} | {len(mine)} | " + " | ".join(mean) + " |")


def apart(given: argparse.Namespace, seed: int) -> dict:
    """One run in a process of its own, as the peak of memory is never taken back."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(once, given, seed).result()


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
    """Time a whole selection in closed form and one group of each stage by the loop."""
    network, batches = opened(given)
    images = [x for x, _ in batches]
    settings = Selection(rate=Fraction(given.rate), cache_gb=given.cache_gb)
    # What `prune` would take of so many samples.
    taken = -(-min(given.samples, useful(network, settings)) // len(images[0]))
    dense = network.module.eval()
    size, classes = network.input.size, network.base.num_classes
    heads = []

    def with_head(module: nn.Module, pivot: str | None, *_: object) -> list[LossAt]:
        head = None if pivot is None else new_head(width_at(module.cpu(), pivot, size), classes, 0)
        heads.append(head)
        return [summed(head, y) for _, y in batches[:taken]]

    spent = timed_stages()
    choices = select(network, images[:taken], settings, fit_stage=with_head).choices
    walks = counted()
    names = "stage,groups,closed form s,loop: group,walks,s a walk,all s,released s,same channels"
    print("| " + names.replace(",", " | ") + " |")
    print("|---" * 9 + "|")
    looped = released = 0.0
    for number, (pivot, _) in enumerate(plan_stages(network, build_graph(dense, size), settings)):
        by_form, first, last = spent[number]
        here = choices[first:last]
        middle = here[len(here) // 2]
        plan = {middle.group: given.channels} if given.channels else None
        loop = Selection(
            rate=settings.rate if plan is None else None,
            plan=plan,
            solver="sgd",
            target="conv",
            score="gradient",
        )
        losses = [summed(heads[number], y) for _, y in batches]
        room = Room(int(given.cache_gb * 2**30))
        current = copy.deepcopy(dense)
        stage = Stage(network, dense, current, {}, loop, room, share(images), pivot, losses)
        group = stage.graph.group(middle.group)
        walks.clear()
        with torch.no_grad():
            stage.probe.begin(stage.chain.place_of(group.consumers[-1]))
            began = time.process_time()
            kept = set(stage._decide(group).kept)
        one = (time.process_time() - began) / len(walks)
        count = len(walks)
        began = time.process_time()
        released_walk(stage, group.consumers[-1])
        bare = time.process_time() - began
        room.close()
        all_walks = sum(2 * len(choice.kept) + 1 for choice in here)
        looped, released = looped + one * all_walks, released + bare * all_walks
        alike = f"{len(kept & set(middle.kept))} of {len(kept)}"
        row = (number + 1, len(here), f"{by_form:.1f}", middle.group, f"{count} of {all_walks}")
        seconds = (f"{one:.2f}", f"{one * all_walks:.0f}", f"{bare * all_walks:.0f}", alike)
        print("|", " | ".join(map(str, (*row, *seconds))), "|", flush=True)
    solved = sum(seconds for seconds, _, _ in spent)
    print(
        f"{given.network} at {given.rate}, {given.samples} samples, {torch.get_num_threads()} "
        f"threads, processor time: closed form {solved:.1f} s (measured, "
        f"{sum(map(len, images[:taken]))} samples); --solver sgd "
        f"{looped:.0f} s (extrapolated), {looped / solved:.0f}x; as released "
        f"{released:.0f} s (extrapolated), {released / solved:.0f}x"
    )


def timed_stages() -> list[tuple[float, int, int]]:
    """Note processor seconds of every stage, and which of the choices it made."""
    seen: list[tuple[float, int, int]] = []
    plain = Stage.run

    def noted(self: Stage, first: int, last: int, choices: list, *rest: object) -> set[int]:
        before, began = len(choices), time.process_time()
        removed = plain(self, first, last, choices, *rest)
        seen.append((time.process_time() - began, before, len(choices)))
        return removed

    Stage.run = noted
    return seen


def opened(given: argparse.Namespace) -> tuple[Network, list]:
    """The network, and its samples in batches."""
    if ":" in given.network:
        network = models.load(given.network, pretrained=False)
    else:
        path = given.weights / f"cifar10_{given.network}.safetensors"
        network = models.load(f"zoo:{given.network}", checkpoint=path)
    data = open_data(DataSpec(data_dir=given.cifar), network)
    network.input = data.input
    most = 64 if ":" not in given.network else 16
    return network, list(loader(samples(data, given.samples), most))


def released_walk(stage: Stage, name: str) -> None:
    """One walk over the samples as the released program takes it, with nothing kept."""
    chain, probe = stage.chain, stage.probe
    node, (end, _) = chain.calls[name][0], chain.end_of(stage.pivot)
    stage.current.requires_grad_(False)
    weight = stage.current.get_submodule(name).weight.requires_grad_()
    for images, head in zip(probe.samples.batches, stage.losses, strict=True):
        with torch.no_grad():
            wanted = run_from(chain, 0, probe.dense, images, [node])[node]
        with torch.enable_grad():
            found = run_from(chain, 0, stage.current, images, [node, end])
            loss = (found[node] - wanted).square().mean() / 2 + head(found[end]) / len(images)
            torch.autograd.grad(loss, weight)


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
