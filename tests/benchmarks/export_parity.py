"""Dense and slim networks through export: checker, onnxruntime, parity at batch 1 and 8.

python tests/benchmarks/export_parity.py [NAME ...] [--rate 0.5]
Prints one line for each network and exits 1 when one of them is outside 1e-4 relative.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from dcptool.deploy import export as exporting
from dcptool.deploy import onnx_cost, onnx_scan
from dcptool.errors import DcptoolError
from dcptool.network import models, surgery
from dcptool.network.graph import build_graph
from dcptool.network.models import Network

NAMES = [
    "resnet50",
    "mobilenetv2_100",
    "efficientnet_b0",
    "vgg16_bn",
    "densenet121",
    "convnext_tiny",
    "regnety_008",
    "zoo:resnet56",
]


def slim(network: Network, rate: float) -> Network:
    """Drop `rate` of every open group at random, with the project's own surgery."""
    graph = build_graph(network.module, network.input.size)
    generator = torch.Generator().manual_seed(0)
    kept = {}
    for group in graph.open_groups(scope="all"):
        count = len(group.units)
        keep = max(1, round(count * (1 - rate)))
        kept[group.name] = sorted(torch.randperm(count, generator=generator)[:keep].tolist())
    surgery.cut(network.module, surgery.plan_cuts(graph, surgery.removed_units(graph, kept)))
    return network


def randomise(module: torch.nn.Module) -> None:
    """Fresh norms hide errors of folding."""
    torch.manual_seed(0)
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.uniform_(part.weight, 0.7, 1.3)
            torch.nn.init.normal_(part.bias, std=0.1)
            torch.nn.init.normal_(part.running_mean, std=0.1)
            torch.nn.init.uniform_(part.running_var, 0.7, 1.3)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--rate", type=float, default=0.5)
    given = parser.parse_args()
    failed = 0
    for name in given.names:
        for kind in ("dense", "slim"):
            started = time.monotonic()
            network = models.load(name, pretrained=False)
            if kind == "slim":
                network = slim(network, given.rate)
            randomise(network.module)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    result = exporting.export(network, Path(folder) / "m.onnx")
                except DcptoolError as err:
                    print(f"{name:18} {kind:5} FAILED {err.lines()}", flush=True)
                    failed += 1
                    continue
                macs = onnx_cost.macs(onnx_scan.scan(result.file).proto)
            worst = result.parity.max_rel
            failed += worst > 1e-4
            print(
                f"{name:18} {kind:5} {macs:>12,} MACs  {result.bytes / 1e6:7.1f} MB  "
                f"{result.exporter}  max relative {worst:.1e}  {time.monotonic() - started:.0f} s",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
