"""Accuracy at equal MACs and equal updates: dcptool, torch-pruning, and dcptool's other methods.

    python tests/benchmarks/peers.py DATA_DIR WEIGHTS_DIR RESULTS.jsonl [--network resnet56_a]
        [--shares 1/2,1/3] [--updates 300,1500] [--seeds 0,1,2] [--batch-size 32] [--maps 20]
        [--rows ...]

All start from the same weights and cut the same groups (inner channels). torch-pruning and the
other methods take one rate for all groups, the one whose MACs are next below the share; `dcptool`
gets those MACs as --target-macs and spends no update on them, and so do the rows of torch-pruning
that end in "-global", which rank the channels of all groups together. All are trained by the loop
of `dcptool finetune`, with and without distillation. The learning rate of every other row is chosen
for its share, updates and distillation among --rates, on the images held out of train, with the
first seed; dcptool has its default, which it measures. The public weights have learnt from these
images, too, which speaks for small rates: so the table also gives the error of each other row at
the rate that is best on test for the first seed, and dcptool has to lead that. As `finetune` does
with such weights, those before and after training that are better on images of train count.
DATA_DIR is CIFAR-10 for the networks of the zoo, and imagenet2k for mobilenetv2_100 (`--network
mobilenetv2_100 --shares 4/5 --updates 40`), where few updates of few images show who does no harm.

Appends a line for each training to RESULTS.jsonl and leaves out what is there, so that it can be
stopped and started again. Then prints the table: mean error, spread over the seeds, and a paired
comparison with dcptool, trained in the same way, over the test images (McNemar, both tails).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import tempfile
import time
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from methods import right_of
from oneshot import NETWORKS
from peer import torch_pruning
from results import Line, Results, mcnemar, packed, unpacked
from torch import Tensor, nn

import dcptool
from dcptool import console
from dcptool.network import cost, models
from dcptool.network.base import Network
from dcptool.network.graph import build_graph
from dcptool.selection.settings import Selection
from dcptool.selection.stages import select
from dcptool.selection.widths import at_rate, macs_of
from dcptool.training.data import Data, DataSpec, open_data, samples
from dcptool.training.dist import SINGLE
from dcptool.training.loader import loader
from dcptool.training.loop import Run, fit
from dcptool.training.losses import Loss, cross_entropy, distill
from dcptool.training.maps import seen_at, shared_pivots, with_maps
from dcptool.training.settings import Training
from dcptool.training.step_length import measured

OURS = "dcptool"
# The same without labels: no heads, and errors count alike in every direction.
UNLABELLED = "dcptool --no-training"
PEERS = ("tp-l1", "tp-bn-scale", "tp-group-norm", "tp-taylor")
# The same, ranking the channels of all groups together.
GLOBAL = ("tp-l1-global", "tp-group-norm-global", "tp-taylor-global")
METHODS = ("l1", "thinet", "cp", "random")
CALIBRATION = 512
# Images of train that choose learning rates where val has to report.
CHOOSING = 100


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--network", default="resnet56_a")
    parser.add_argument("--shares", default="1/2,1/3")
    parser.add_argument("--updates", default="300,1500")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rates", default="0.002,0.005,0.02", help="learning rates of other rows")
    parser.add_argument("--rows", default=",".join([OURS, UNLABELLED, *PEERS, *GLOBAL, *METHODS]))
    parser.add_argument("--kd", default="on,off")
    parser.add_argument("--maps", type=float, default=20.0, help="as finetune --kd-maps has it")
    given = parser.parse_args()
    console.configure(quiet=True)
    bench = Bench(given)
    conditions = itertools.product(
        map(int, given.updates.split(",")),
        given.shares.split(","),
        given.rows.split(","),
        [kd == "on" for kd in given.kd.split(",")],
    )
    keys = [bench.key(row, share, updates, kd) for updates, share, row, kd in conditions]
    # A seed at a time: what a teacher answered to its batches is all that is remembered.
    rates = [bench.chosen(key) for key in keys]
    for seed in bench.seeds[1:]:
        for key, lr in zip(keys, rates, strict=True):
            bench.line({**key, "lr": lr, "seed": seed})
    table(bench.results.lines())


class Cut(NamedTuple):
    """A cut network, its accuracy on val and on test in percent, and how long it took."""

    module: nn.Module
    val: float
    top1: float
    seconds: float


class Remembered(nn.Module):
    """A teacher that answers once: rows of one seed are trained on the same batches.

    `maps` are those of the last batch at the pivots that were asked for.
    """

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher
        self.names: tuple[str, ...] = ()
        self.maps: dict[str, Tensor] = {}
        self.answers: dict[tuple, tuple[Tensor, dict[str, Tensor]]] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Scores, from memory where these images came before."""
        key = (self.names, float(images.double().sum()))
        if key not in self.answers:
            with seen_at(self.teacher, self.names) as maps:
                scores = self.teacher(images)
            # In half precision: 1,500 batches of three seeds have to fit.
            self.answers[key] = scores, {name: maps[name].half() for name in self.names}
        scores, maps = self.answers[key]
        self.maps.update(maps)
        return scores


class Bench:
    """The conditions of all trainings, and the file that they are written to."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.results = Results(given.results)
        name = given.network
        self.model, file = (
            (f"zoo:{name}", f"cifar10_{name}") if "resnet" in name else NETWORKS[name][:2]
        )
        self.file = given.weights / f"{file}.safetensors"
        self.seeds = [int(seed) for seed in given.seeds.split(",")]
        self.cuts: dict[tuple[str, str, int], Cut] = {}
        self.teachers: dict[int, Remembered] = {}
        self.data: dict[int, Data] = {}

    def key(self, row: str, share: str, updates: int, kd: bool) -> Line:
        """The conditions of a row, but for its learning rate and the seed."""
        return {
            "network": self.given.network,
            "batch_size": self.given.batch_size,
            "share": share,
            "updates": updates,
            "row": row,
            "kd": kd,
            "maps": self.given.maps if kd else 0.0,
        }

    def chosen(self, key: Line) -> float | None:
        """The learning rate of a row, by the images held out, with the first seed."""
        rates = [float(x) for x in self.given.rates.split(",")]
        tried = [None] if key["row"] in (OURS, UNLABELLED) else rates
        found = [self.line({**key, "lr": lr, "seed": self.seeds[0]}) for lr in tried]
        best: Line = max(found, key=lambda line: line["val"])
        return best["lr"]

    def line(self, key: Line) -> Line:
        """The result of one training, from the file or made now."""
        return self.results.once(key, partial(self.run, key))

    def run(self, key: Line) -> Line:
        """Cut, train, and look at the test images once."""
        dense, data = self.open(key["seed"])
        cut = self.start(dense, data, key["row"], key["share"], key["seed"])
        trained = copy.deepcopy(cut.module)
        teacher = self.teacher(dense, key["seed"])
        began = time.monotonic()
        rate = self.train(
            trained,
            data,
            teacher if key["kd"] else None,
            key["updates"],
            key["lr"],
            key["seed"],
            maps=key["maps"],
        )
        train_s = time.monotonic() - began
        known = samples(data, len(data.val), key["seed"])
        before, after = (percent(right_of(module, known)) for module in (cut.module, trained))
        kept = trained if after >= before else cut.module
        right = right_of(kept, data.report)
        return {
            "macs": cost.count(trained, data.input.size).macs,
            "train_start": before,
            "train": after,
            "rate": rate,
            "val_start": cut.val,
            "top1_start": cut.top1,
            "val": percent(right_of(kept, data.val)),
            "top1": percent(right),
            "cut_s": round(cut.seconds, 1),
            "seconds": round(cut.seconds + train_s, 1),
            "right": packed(right),
        }

    def teacher(self, dense: Network, seed: int) -> Remembered:
        """The dense network, remembering its answers to the batches of this seed alone."""
        if seed not in self.teachers:
            self.teachers = {seed: Remembered(dense.module)}
        return self.teachers[seed]

    def start(self, dense: Network, data: Data, row: str, share: str, seed: int) -> Cut:
        """A cut network before training; the same one for every way to train it."""
        key = (row, share, seed)
        if key not in self.cuts:
            began = time.monotonic()
            slim = self.cut(dense, data, row, Fraction(share), seed)
            cut_s = time.monotonic() - began
            val, top1 = (percent(right_of(slim, part)) for part in (data.val, data.report))
            self.cuts[key] = Cut(slim, val, top1, cut_s)
        return self.cuts[key]

    def open(self, seed: int) -> tuple[Network, Data]:
        """The dense network and its images, which are read once."""
        network = models.load(self.model, checkpoint=self.file)
        if seed not in self.data:
            spec = DataSpec(data_dir=self.given.data, seed=seed)
            self.data[seed] = apart(open_data(spec, network), seed)
        data = self.data[seed]
        network.input = data.input
        network.module.eval()
        return network, data

    def cut(self, dense: Network, data: Data, row: str, share: Fraction, seed: int) -> nn.Module:
        """The slim network of one row, untrained."""
        rate, macs = uniform(dense, share)
        if row in (OURS, UNLABELLED):
            with tempfile.TemporaryDirectory() as folder:
                document = dcptool.prune(
                    self.model,
                    checkpoint=self.file,
                    data_dir=self.given.data,
                    target_macs=macs,
                    training=row == OURS,
                    seed=seed,
                    output=Path(folder) / "slim",
                )
                return dcptool.load(document["artifact"])
        batches = list(loader(samples(data, CALIBRATION, seed), 64))
        if row in (*PEERS, *GLOBAL):
            return torch_pruning(dense, Selection(rate=rate), batches, row, macs)
        settings = Selection(rate=rate, method=row, samples=CALIBRATION, seed=seed)
        return select(dense, [x for x, _ in batches], settings).network.module

    def train(
        self,
        module: nn.Module,
        data: Data,
        teacher: Remembered | None,
        updates: int,
        lr: float | None,
        seed: int,
        **options: Any,
    ) -> float:
        """The loop of `finetune` with its defaults, but for these options; its learning rate.

        Without one it is measured, as `finetune` does.
        """
        options = {
            "norms": "train",
            "ema": None,
            "kd": 0.5,
            "temperature": 2.0,
            "maps": 0.0,
            **options,
        }
        training = Training(steps=updates, lr=lr, batch_size=self.given.batch_size)
        batches = loader(data.train, training.images_per_step, train=True, seed=seed)
        loss = cross_entropy()
        if teacher is not None and options["kd"]:
            loss = distill(teacher, weight=options["kd"], temperature=options["temperature"])
        schedule = training.schedule(len(batches), fresh=False)
        run = Run(
            optimizer=training.optimizer,
            seed=seed,
            channels_last="on",
            norms=options["norms"],
            ema_decay=options["ema"],
        )

        def go(loss: Loss) -> float:
            given = schedule if lr else measured(module, batches, loss, schedule, run, SINGLE)
            fit(module, batches, [loss], given, run)
            return given.lr

        if not (teacher is not None and options["maps"]):
            return go(loss)
        teacher.names = shared_pivots(module, teacher.teacher, data.input.size)
        teacher.maps.clear()
        with seen_at(module, teacher.names) as given:
            rate = go(with_maps(loss, given, teacher.maps, options["maps"]))
        teacher.names = ()
        return rate


def apart(data: Data, seed: int) -> Data:
    """The same images with some to choose by that nothing is reported on."""
    if data.test is not None:
        return data
    order = np.random.default_rng(seed).permutation(len(data.train))
    held = data.train.subset(np.sort(order[:CHOOSING]), "held out")
    train = data.train.subset(np.sort(order[CHOOSING:]), "train")
    return replace(data, train=train, val=held, test=data.val)


def percent(right: np.ndarray) -> float:
    """The share of right answers."""
    return round(100 * float(right.mean()), 2)


def uniform(dense: Network, share: Fraction) -> tuple[Fraction, int]:
    """The rate for all groups whose MACs are next below a share of the dense ones."""
    graph = build_graph(dense.module, dense.input.size)
    count = macs_of(dense, graph)
    whole = cost.count(dense.module, dense.input.size).macs
    for permille in range(1, 1000):
        rate = Fraction(permille, 1000)
        macs = count(at_rate(dense, graph, Selection(rate=rate, round_to=1)))
        if macs <= share * whole * Fraction(1005, 1000):
            return rate, int(macs)
    raise SystemExit(f"no rate gives {share} of the MACs")


def leader_of(lines: list[Line]) -> str:
    """Our row that others are compared with: without labels where the default is still to come."""
    names = {line["row"] for line in lines}
    return next((row for row in (OURS, UNLABELLED) if row in names), "")


def table(lines: list[Line]) -> None:
    """Markdown: mean error and spread over the seeds, pooled comparison with dcptool."""
    names = (
        "network,MACs,updates,maps,row,distilled,lr,test error %,spread,dcptool better p,"
        "best lr on test,s"
    )
    print("| " + names.replace(",", " | ") + " |")
    print("|---" * len(names.split(",")) + "|")
    fields = ("network", "share", "updates")
    keys = dict.fromkeys((*(x[field] for field in fields), x["maps"]) for x in lines if x["kd"])
    for network, share, updates, maps in sorted(keys):
        same = [x for x in lines if [x[f] for f in fields] == [network, share, updates]]
        here = [x for x in same if not x["kd"] or x["maps"] == maps]
        leaders = {kd: leader_of([x for x in here if x["kd"] == kd]) for kd in (True, False)}
        ours = {(x["kd"], x["seed"]): unpacked(x) for x in here if x["row"] == leaders[x["kd"]]}
        rows = []
        for row, kd in dict.fromkeys((x["row"], x["kd"]) for x in here):
            tried = [x for x in here if (x["row"], x["kd"]) == (row, kd)]
            first = [x for x in tried if x["seed"] == 0]
            if not first:
                continue
            lr = max(first, key=lambda x: x["val"])["lr"]
            oracle = min(100 - x["top1"] for x in first)
            found = [x for x in tried if x["lr"] == lr]
            errors = np.array([100 - x["top1"] for x in found])
            shared = [x for x in found if (kd, x["seed"]) in ours]
            p = ""
            if row != leaders[kd] and shared:
                mine = np.concatenate([ours[kd, x["seed"]] for x in shared])
                p = f"{mcnemar(mine, np.concatenate([unpacked(x) for x in shared])):.2g}"
            spread = f"{errors.std(ddof=1):.2f} ({len(errors)})" if len(errors) > 1 else ""
            seconds = np.mean([x["seconds"] for x in found])
            text = (
                f"| {network} | {share} | {updates} | {maps:g} | {row} | {'yes' if kd else 'no'} "
            )
            text += "| measured " if lr is None else f"| {lr:g} "
            text += f"| {errors.mean():.2f} | {spread} | {p} | {oracle:.2f} | {seconds:.0f} |"
            rows.append((errors.mean(), text))
        print("\n".join(text for _, text in sorted(rows)))


if __name__ == "__main__":
    main()
