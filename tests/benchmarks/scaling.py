"""How the time of selection grows with samples, depth and width.

    python tests/benchmarks/scaling.py [--depths 20,56,110] [--widths 1,2] [--samples 128,256,512]

Residual networks for 32 px with random weights, on which time does not depend, random images, rate
0.5, no training, one thread, processor seconds. Prints a table, with the time of one plain pass of
the dense network over the most samples: no selection can grow more slowly than that.
"""

from __future__ import annotations

import argparse
import time
from fractions import Fraction

import torch
from torch import nn

from dcptool import console
from dcptool.network import cost
from dcptool.network.base import Base, Input, Network
from dcptool.network.zoo.resnet import ResNet, _stage
from dcptool.selection.settings import Selection
from dcptool.selection.stages import select

SIZE = (3, 32, 32)


def main() -> None:
    """Time every network with every number of samples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--depths", default="20,56,110")
    parser.add_argument("--widths", default="1,2")
    parser.add_argument("--samples", default="128,256,512")
    given = parser.parse_args()
    console.configure(quiet=True)
    torch.set_num_threads(1)
    print(
        "| network | width | MACs | "
        + given.samples.replace(",", " samples, s | ")
        + " samples, s | one pass, s |"
    )
    print("|---" * (4 + len(given.samples.split(","))) + "|")
    for depth in map(int, given.depths.split(",")):
        for width in map(int, given.widths.split(",")):
            network = built(depth, width)
            macs = cost.count(network.module, SIZE).macs
            spent = [timed(network, int(count)) for count in given.samples.split(",")]
            cells = " | ".join(f"{seconds:.1f}" for seconds in spent)
            passed = forward(network, max(map(int, given.samples.split(","))))
            print(f"| ResNet-{depth} | {width}x | {macs:,} | {cells} | {passed:.1f} |", flush=True)


def built(depth: int, width: int) -> Network:
    """A network of so many layers, so many times as wide as usual."""
    torch.manual_seed(0)
    blocks, first = (depth - 2) // 6, 16 * width
    module = ResNet(blocks, 10, projection=True)
    module.conv1, module.bn1 = nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first)
    module.layer1 = _stage(blocks, first, first, 1, True)
    module.layer2 = _stage(blocks, first, 2 * first, 2, True)
    module.layer3 = _stage(blocks, 2 * first, 4 * first, 2, True)
    module.linear = nn.Linear(4 * first, 10)
    base = Base("zoo", f"resnet{depth}", 10)
    return Network(module.eval(), base, Input(SIZE, (0.5,) * 3, (0.5,) * 3))


def timed(network: Network, samples: int) -> float:
    """Processor seconds of one selection."""
    images = list(torch.randn(samples, *SIZE).split(64))
    began = time.process_time()
    select(network, images, Selection(rate=Fraction(1, 2), samples=samples))
    return time.process_time() - began


def forward(network: Network, samples: int) -> float:
    """Processor seconds of one pass, the least of three."""
    images, least = list(torch.randn(samples, *SIZE).split(64)), float("inf")
    with torch.no_grad():
        for _ in range(3):
            began = time.process_time()
            for batch in images:
                network.module(batch)
            least = min(least, time.process_time() - began)
    return least


if __name__ == "__main__":
    main()
