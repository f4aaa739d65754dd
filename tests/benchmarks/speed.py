"""Milliseconds of exact and of rounded widths in onnxruntime, dense, exact and rounded in turn.

    python tests/benchmarks/speed.py RESULTS.jsonl [--networks resnet18,resnet50,...]
        [--rates 0.3,0.5,0.7] [--batch 1,8] [--threads 1,2] [--seconds 1.5] [--residual]

Appends a line for each cell and leaves out what is there; then prints the table. Weights are
random: time does not depend on them. Needs a quiet machine. Efficiency is the speed-up over the
ratio of MACs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from results import Results

from dcptool import console
from dcptool.deploy import granularity, latency, machine, timing
from dcptool.deploy.session import feed_of, open_session
from dcptool.network import models
from dcptool.network.graph import build_graph
from dcptool.pipeline.widths import cut_to
from dcptool.selection.settings import Selection
from dcptool.selection.widths import at_rate, macs_of

NETWORKS = "resnet18,resnet50,mobilenetv2_100,vgg16_bn"
GENERATIONS = 4


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--rates", default="0.3,0.5,0.7")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--residual", action="store_true", help="open residual groups, too")
    given = parser.parse_args()
    console.configure(quiet=True)
    results = Results(given.results)
    for name in given.networks.split(","):
        for rate in given.rates.split(","):
            keys = [
                {
                    "network": name,
                    "rate": rate,
                    "batch": int(batch),
                    "threads": int(threads),
                    "residual": given.residual,
                    "cpu": machine.cpu_model(),
                }
                for batch in given.batch.split(",")
                for threads in given.threads.split(",")
            ]
            missing = [key for key in keys if not results.lines(**key)]
            if missing:
                run(given, results, name, rate, missing)
    table(results.lines())


def run(
    given: argparse.Namespace, results: Results, name: str, rate: str, keys: list[dict]
) -> None:
    """Export three networks once, and time them beside each other under each condition."""
    network = models.load(f"timm:{name}", pretrained=False)
    graph = build_graph(network.module, network.input.size)
    multiple = granularity.auto()
    exact = Selection(rate=Fraction(rate), prune_residual=given.residual)
    full = {group.name: len(group.units) for group in exact.groups(graph)}
    plans = {
        "dense": full,
        "exact": at_rate(network, graph, exact),
        "rounded": at_rate(network, graph, replace(exact, round_to=multiple)),
    }
    macs = {way: macs_of(network, graph)(widths) for way, widths in plans.items()}
    cuts = {way: cut_to(network, graph, widths) for way, widths in plans.items()}
    with latency.exported(cuts) as scanned:
        for key in keys:
            times = measure(scanned, key["batch"], key["threads"], given.seconds)
            line = {**key, "multiple": multiple, "load": round(machine.load(), 2)}
            generator = np.random.default_rng(0)
            for way in ("exact", "rounded"):
                found = timing.compare(times["dense"], times[way], generator)
                line[way] = {
                    "speedup": round(found.ratio, 3),
                    "low": round(found.low, 3),
                    "high": round(found.high, 3),
                    "macs_ratio": round(macs["dense"] / macs[way], 3),
                }
            against = timing.compare(times["exact"], times["rounded"], generator)
            line["rounded_over_exact"] = [round(against.low, 3), round(against.high, 3)]
            dense = np.concatenate([block.ravel() for block in times["dense"]])
            line["dense_ms"] = round(1e3 * float(np.median(dense)), 2)
            results.add(line)


def measure(scanned: dict, batch: int, threads: int, seconds: float) -> dict:
    """Seconds of each call, over several generations of sessions."""
    generator = np.random.default_rng(0)
    found: dict[str, list] = {name: [] for name in scanned}
    schedule: timing.Schedule | None = None
    for _ in range(GENERATIONS):
        runners = {}
        for index in generator.permutation(len(scanned)):
            name = list(scanned)[index]
            session = open_session(scanned[name].data, threads=threads)
            feeds = feed_of(scanned[name].proto).random(batch, size=None, seed=0)
            runners[name] = lambda session=session, feeds=feeds: session.run(None, feeds)
        once = timing.plan(runners, warmup=2, duration_s=seconds / GENERATIONS, iterations=None)
        # One schedule for all generations, so that each weighs the same.
        schedule = schedule or replace(once, rounds=12 if batch < 8 else 3)
        for name, times in timing.interleave(runners, schedule, generator).items():
            found[name].append(times)
    return found


def table(lines: list[dict]) -> None:
    """Markdown: speed-up and efficiency of exact and rounded widths."""
    print("| network | rate | batch | threads | dense, ms | MACs | exact | rounded | efficiency |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        exact, rounded = line["exact"], line["rounded"]
        residual = " residual" if line["residual"] else ""
        print(
            f"| {line['network']}{residual} | {line['rate']} | {line['batch']} | {line['threads']} "
            f"| {line['dense_ms']:.1f} | {rounded['macs_ratio']:.2f}x | {exact['speedup']:.2f}x "
            f"({exact['speedup'] / exact['macs_ratio']:.2f}) | {rounded['speedup']:.2f}x "
            f"({rounded['low']:.2f} .. {rounded['high']:.2f}) "
            f"| {rounded['speedup'] / rounded['macs_ratio']:.2f} |"
        )


if __name__ == "__main__":
    main()
