"""Images per second and memory of `fit` against a bare PyTorch loop on the same tensors.

    python tests/benchmarks/throughput.py CIFAR_DIR [--rounds 6] [--steps 3] [--batch-size 128]

The two take turns, a few steps each, so that a busy machine disturbs both alike; the ratio is
the median over the rounds, of the clock on the wall and of processor time, which neighbours
disturb less. Reading from memory, augmentation, metrics and checks are on our
side only. Memory is the peak of a process that does one of the two alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from dcptool import console
from dcptool.network import models
from dcptool.training.data import DataSpec, open_data
from dcptool.training.loader import loader
from dcptool.training.loop import Run, fit
from dcptool.training.losses import Outcome
from dcptool.training.metrics import Metrics
from dcptool.training.schedule import Schedule


def bare(images: torch.Tensor, labels: torch.Tensor, batch: int, layout: str) -> Iterator[None]:
    """The loop anybody would write: tensors in memory, no augmentation."""
    module = models.load("zoo:resnet56", pretrained=False).module.train()
    if layout == "on":
        module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        module.parameters(), 0.01, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    while True:
        for chosen in torch.randperm(len(images)).split(batch)[:-1]:
            shown = images[chosen].float().div_(255)
            if layout == "on":
                shown = shown.contiguous(memory_format=torch.channels_last)
            loss = functional.cross_entropy(module(shown), labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            yield


def peak_bytes() -> int:
    """Peak of this process; getrusage would include that of its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def clocks() -> tuple[float, float]:
    """Seconds on the wall and of the processor."""
    return time.perf_counter(), time.process_time()


def since(before: tuple[float, float]) -> tuple[float, float]:
    """Seconds since `before` on both clocks."""
    now = clocks()
    return now[0] - before[0], now[1] - before[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--layout", choices=["off", "on"], default="off")
    parser.add_argument("--only", choices=["ours", "bare"])
    options = parser.parse_args()
    console.configure(quiet=True)
    network = models.load("zoo:resnet56", pretrained=False)
    data = open_data(DataSpec(data_dir=options.data), network)
    batches = loader(data.train, options.batch_size, train=True)
    store = data.train.store
    store.fill(data.train.numbers)
    steps, rounds = options.steps, options.rounds
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
    other = None
    if options.only != "ours":
        pixels = store.take(data.train.numbers)
        if options.only == "bare":
            store._pixels = None
        other = bare(
            pixels, torch.from_numpy(data.train.labels), options.batch_size, options.layout
        )
        if options.only == "bare":
            for _ in range(steps):
                next(other)
    calls, clock = [0], [clocks()]

    def loss(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Outcome:
        if calls[0] % steps == 0:
            if calls[0]:
                times["ours"].append(since(clock[0]))
            if other is not None:
                before = clocks()
                for _ in range(steps):
                    next(other)
                times["bare"].append(since(before))
            clock[0] = clocks()
        calls[0] += 1
        scores = module(images)
        return Outcome(functional.cross_entropy(scores, labels), scores)

    if options.only != "bare":
        with tempfile.TemporaryDirectory() as folder:
            run = Run(channels_last=options.layout, metrics=Metrics(Path(folder)))
            count = steps if options.only else steps * (rounds + 1) + 1
            fit(network.module, batches, [loss], Schedule(count, 0.01), run)
    peak = peak_bytes()
    if options.only:
        sys.stdout.write(json.dumps({"peak_bytes": peak}) + "\n")
        return
    # The first round warms both up.
    pairs = list(zip(times["bare"], times["ours"], strict=False))[1:]
    ratios = [b[0] / o[0] for b, o in pairs]
    cpu = [b[1] / o[1] for b, o in pairs]
    images = steps * options.batch_size
    memory = {}
    for which in ("bare", "ours"):
        command = [sys.executable, __file__, str(options.data), "--only", which]
        done = subprocess.run(
            [*command, "--layout", options.layout], check=True, capture_output=True, text=True
        )
        memory[which] = json.loads(done.stdout)["peak_bytes"]
    result = {
        "ratio": statistics.median(ratios),
        "ratios": [round(r, 3) for r in ratios],
        "cpu_ratio": statistics.median(cpu),
        "cpu_ratios": [round(r, 3) for r in cpu],
        "ours_images_per_second": images / statistics.median(o[0] for _, o in pairs),
        "bare_images_per_second": images / statistics.median(b[0] for b, _ in pairs),
        "memory_ratio": memory["ours"] / memory["bare"],
        "peak_bytes": memory,
        "threads": torch.get_num_threads(),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
