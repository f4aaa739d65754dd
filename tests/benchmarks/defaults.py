"""What each default of `prune` and `finetune` is worth: one change at a time, on held-out images.

    python tests/benchmarks/defaults.py CIFAR_DIR WEIGHTS_DIR RESULTS.jsonl [--network resnet20_a]
        [--share 1/3] [--updates 300] [--seeds 0,1,2] [--batch-size 32] [--only "maps 1,maps 5"]

CIFAR_DIR has train, val and test; accuracy is on val, and test images are not looked at. The dense
network must not have seen val: WEIGHTS_DIR/cifar10_NETWORK.safetensors is model.safetensors of
`dcptool finetune zoo:resnet20_a --no-pretrained --data-dir CIFAR_DIR --epochs 12 --lr 0.15
-b 128 --weight-decay 5e-4`. (On images that the dense network was fitted to, what is solved for
keeps answers that were learnt by heart, and any training looks harmful.)

Updates are the same in every row, those before and between cuts included. Appends a line for each
run to RESULTS.jsonl and leaves out what is there, then prints the table.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from methods import right_of
from peers import Bench, uniform
from torch import nn

import dcptool
from dcptool import console
from dcptool.errors import GateFailed
from dcptool.network import artifact, cost, surgery
from dcptool.network.base import Network
from dcptool.pipeline import stage_training
from dcptool.selection.heads import WithHead, WithHeads, with_head_losses
from dcptool.training.data import samples
from dcptool.training.loader import loader
from dcptool.training.norms import reestimate_norms

# All changes are to the first row: distillation by scores at 0.005, one cut by --target-macs and no
# training. prune: options of `dcptool prune`; train: those of the fine-tune; stages: updates before
# the stages of pruning; steps: shares of dense MACs on the way, each with its part of the updates;
# order: parts of the network that are cut one after the other, each with its part of the updates;
# channels: the same widths, filled by another rule; solved: whether weights are those solved for;
# anew: images that norms are measured on after training, as they are, without augmentation.
ROWS: dict[str, dict[str, Any]] = {
    "scores alone": {},
    "lr 0.001": {"train": {"lr": 0.001}},
    "lr 0.002": {"train": {"lr": 0.002}},
    "lr 0.01": {"train": {"lr": 0.01}},
    "lr 0.02": {"train": {"lr": 0.02}},
    "lr 0.05": {"train": {"lr": 0.05}},
    "norms in eval mode": {"train": {"norms": "eval"}},
    "no distillation": {"train": {"kd": 0.0}},
    "distillation alone": {"train": {"kd": 1.0}},
    "distillation 0.9, temperature 4": {"train": {"kd": 0.9, "temperature": 4.0}},
    "distillation alone, temperature 4": {"train": {"kd": 1.0, "temperature": 4.0}},
    "maps 1": {"train": {"maps": 1.0}},
    "maps 5": {"train": {"maps": 5.0}},
    "maps 20": {"train": {"maps": 20.0}},
    "maps 100": {"train": {"maps": 100.0}},
    "maps 500": {"train": {"maps": 500.0}},
    "maps 20, lr 0.002": {"train": {"maps": 20.0, "lr": 0.002}},
    "maps 20, lr 0.01": {"train": {"maps": 20.0, "lr": 0.01}},
    "maps 20, lr 0.02": {"train": {"maps": 20.0, "lr": 0.02}},
    "maps 5, lr 0.01": {"train": {"maps": 5.0, "lr": 0.01}},
    "maps 20, weights averaged (0.98)": {"train": {"maps": 20.0, "ema": 0.98}},
    "maps 20, distillation alone": {"train": {"maps": 20.0, "kd": 1.0}},
    "maps 1, distillation alone": {"train": {"maps": 1.0, "kd": 1.0}},
    "maps 5, distillation alone": {"train": {"maps": 5.0, "kd": 1.0}},
    "maps 100, lr 0.002": {"train": {"maps": 100.0, "lr": 0.002}},
    "maps 100, lr 0.01": {"train": {"maps": 100.0, "lr": 0.01}},
    "maps 100, distillation alone": {"train": {"maps": 100.0, "kd": 1.0}},
    "maps 100, weights averaged (0.98)": {"train": {"maps": 100.0, "ema": 0.98}},
    "weights averaged (0.98)": {"train": {"ema": 0.98}},
    "one rate for all groups": {"prune": {"target_macs": None}},
    "exact widths": {"prune": {"round_to": "1"}},
    "maps 20, exact widths": {"train": {"maps": 20.0}, "prune": {"round_to": "1"}},
    "maps 20, multiples of 4": {"train": {"maps": 20.0}, "prune": {"round_to": "4"}},
    "a third of the updates in stages": {"stages": Fraction(1, 3)},
    "the same, both losses from one forward": {"stages": Fraction(1, 3), "joint": True},
    "the same, lambda 0": {"stages": Fraction(1, 3), "prune": {"lambda": 0.0}},
    "the same, one extra loss": {"stages": Fraction(1, 3), "prune": {"losses": 1}},
    "heads fitted alone, lambda 1": {"prune": {"training": True}},
    "two cuts": {"steps": [Fraction(3, 5)]},
    "three cuts": {"steps": [Fraction(7, 10), Fraction(1, 2)]},
    "last layers first, in three cuts": {"order": ["layer3.*", "layer2.*", "layer1.*"]},
    "first layers first, in three cuts": {"order": ["layer1.*", "layer2.*", "layer3.*"]},
    "1024 samples": {"prune": {"samples": "1024"}},
    "2048 samples": {"prune": {"samples": "2048"}},
    "two sweeps": {"prune": {"sweeps": 2}},
    "maps 20, norms measured anew afterwards": {"train": {"maps": 20.0}, "anew": 2048},
    "maps 20, weights as they were": {"train": {"maps": 20.0}, "solved": False},
    "maps 20, channels by l1": {"train": {"maps": 20.0}, "channels": "l1"},
    "maps 20, one rate for all groups": {"train": {"maps": 20.0}, "prune": {"target_macs": None}},
    "maps 20, one rate, channels by l1": {
        "train": {"maps": 20.0},
        "prune": {"target_macs": None, "method": "l1"},
    },
}
# Extra losses of ResNet-20 by default.
LOSSES = 3
# Both losses of a stage are an update each.
LOSSES_OF_A_STAGE = 2


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--network", default="resnet20_a")
    parser.add_argument("--share", default="1/3")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2")
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
    prune = {"target_macs": macs, "training": False, **change.get("prune", {})}
    if prune["target_macs"] is None:
        prune = {**prune, "rate": str(float(rate)), "round_to": "1"}
    if "stages" in change:
        stages = prune.get("losses", LOSSES) + 1
        each = 1 if change.get("joint") else LOSSES_OF_A_STAGE
        # The last stage has the network's own loss alone.
        steps = round(given.updates * change["stages"] / (stages * each))
        left -= steps * ((stages - 1) * each + 1)
        prune |= {"stage_steps": steps, "batch_size": given.batch_size, "training": True}
    began = time.monotonic()
    cuts = [{**prune, "target_macs": int(s * whole(dense))} for s in change.get("steps", [])]
    cuts.append(prune)
    with (
        tempfile.TemporaryDirectory() as folder,
        joined() if change.get("joint") else nullcontext(),
    ):
        if "order" in change or "channels" in change:
            cuts = in_order(bench, change.get("order", ["*"]), prune, seed, folder)
        if "channels" in change:
            cuts = [{**options, "method": change["channels"]} for options in cuts]
        target: str | Path = f"zoo:{given.network}"
        for number, options in enumerate(cuts):
            place = Path(folder) / f"cut{number}"
            common = {"data_dir": given.data, "seed": seed, "output": place}
            if number == 0:
                common["checkpoint"] = bench.file
            is_solved = change.get("solved", True)
            slim = once_cut(target, {**common, **options}, is_kept=len(cuts) == 1 and is_solved)
            if not is_solved:
                slim = unsolved(dense, place)
            start = right_of(slim, data.val).mean()
            updates = left // len(cuts)
            train = {"lr": 0.005, **change.get("train", {})}
            try:
                bench.train(slim, data, bench.teacher(dense, seed), updates, seed=seed, **train)
            except GateFailed as err:
                return {"start": round(100 * float(start), 2), "val": None, "why": err.message}
            if "anew" in change:
                reestimate_norms(slim, loader(samples(data, change["anew"], seed), 128))
            end = right_of(slim, data.val).mean()
            if number + 1 < len(cuts):
                target = store(slim, place, Path(folder) / f"trained{number}")
    return {
        "start": round(100 * float(start), 2),
        "val": round(100 * float(end), 2),
        "seconds": round(time.monotonic() - began, 1),
    }


CUTS: dict[str, Any] = {}


def once_cut(target: str | Path, options: dict[str, Any], *, is_kept: bool) -> Any:
    """The slim network of some options; rows that differ in training alone share it."""
    key = str({k: v for k, v in options.items() if k != "output"})
    if key not in CUTS or not is_kept:
        dcptool.prune(target, **options)
        CUTS[key] = dcptool.load(options["output"])
    return copy.deepcopy(CUTS[key])


def unsolved(dense: Network, place: Path) -> nn.Module:
    """The dense network with the cuts of an artifact and the weights that it had before."""
    module = copy.deepcopy(dense.module)
    surgery.cut(module, artifact.load(place).cuts)
    return module


def in_order(
    bench: Bench, parts: list[str], prune: dict[str, Any], seed: int, folder: str
) -> list[dict[str, Any]]:
    """The widths of a budget as plans for parts of the network, one after the other."""
    common = {"data_dir": bench.given.data, "seed": seed, "checkpoint": bench.file}
    place = Path(folder) / "whole"
    found = dcptool.prune(f"zoo:{bench.given.network}", output=place, **common, **prune)["kept"]
    plans = []
    for number, part in enumerate(parts):
        here = {name: {"keep": n} for name, n in found.items() if fnmatch.fnmatch(name, part)}
        file = Path(folder) / f"plan{number}.json"
        file.write_text(json.dumps({"dcptool_plan": 1, "groups": here}))
        plans.append({"plan": file, "training": False})
    return plans


@contextmanager
def joined() -> Iterator[None]:
    """Train stages by both losses at once, from one forward."""
    plain = stage_training.fit

    def fit(model: nn.Module, batches: Any, losses: Any, *rest: Any) -> Any:
        if not isinstance(model, WithHead):
            return plain(model, batches, losses, *rest)
        with WithHeads(model.network, {model._pivot: model.head}).attached() as both:
            return plain(both, batches, [with_head_losses(losses[1])], *rest)

    stage_training.fit = fit
    try:
        yield
    finally:
        stage_training.fit = plain


def whole(dense: Any) -> int:
    """MACs of the dense network."""
    return cost.count(dense.module, dense.input.size).macs


def store(slim: Any, like: Path, place: Path) -> Path:
    """Write trained weights as an artifact, so that they can be pruned again."""
    network = artifact.load(like)
    network.module.load_state_dict(slim.state_dict())
    counted = cost.count(network.module, network.input.size)
    artifact.save(network, place, cost={"params": counted.params, "macs": counted.macs})
    return place


def table(lines: list[dict]) -> None:
    """Markdown: every change, with what it gives over the first row."""
    base = {x["seed"]: x["val"] for x in lines if x["row"] == "scores alone"}
    print("| change | before training, % | after, % | against the first | seeds |")
    print("|---|---|---|---|---|")
    for row in ROWS:
        found = [x for x in lines if x["row"] == row]
        if not found:
            continue
        if any(x["val"] is None for x in found):
            print(f"| {row} | {found[0]['start']:.2f} | diverged | | {len(found)} |")
            continue
        gains = [x["val"] - base[x["seed"]] for x in found if x["seed"] in base]
        gain = f"{np.mean(gains):+.2f}" if gains and row != "scores alone" else ""
        start, end = (np.mean([x[k] for x in found]) for k in ("start", "val"))
        print(f"| {row} | {start:.2f} | {end:.2f} | {gain} | {len(found)} |")


if __name__ == "__main__":
    main()
