"""Milliseconds of networks that are not made yet: a table measured layer by layer, and a check.

The network is exported at a few uniform widths and run under the runtime's profiler. Each layer's
time then depends on its MACs, straight from one measured width to the next; what belongs to no
layer, and what the profiler cannot see, follows the sum. Weights do not matter here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcptool import files
from dcptool.deploy import bench, export, onnx_export, onnx_scan, profile
from dcptool.network.base import Network

SECONDS = 2.0


@dataclass(frozen=True)
class Table:
    """Points (MACs, ms) of each layer, and (sum over layers, ms of the whole)."""

    layers: Mapping[str, tuple[tuple[float, float], ...]]
    whole: tuple[tuple[float, float], ...]

    def predict(self, macs: Mapping[str, int]) -> float:
        """Milliseconds of a network whose layers have these MACs."""
        return _at(self.whole, sum(_at(points, macs[name]) for name, points in self.layers.items()))


def tabulate(
    networks: Sequence[tuple[Network, Mapping[str, int]]], condition: bench.Condition
) -> Table:
    """Measure networks of several widths, each given with the MACs of its layers."""
    points: dict[str, list[tuple[float, float]]] = {}
    with exported({str(i): network for i, (network, _) in enumerate(networks)}) as scanned:
        times = milliseconds(scanned, condition)
        for i, (_, macs) in enumerate(networks):
            found = profile.profile(
                scanned[str(i)],
                batch_size=condition.batch_size,
                threads=condition.threads,
                size=None,
                provider=condition.provider,
            )
            for layer in found.layers:
                if layer.layer in macs:
                    points.setdefault(layer.layer, []).append((macs[layer.layer], layer.ms))
    layers = {name: _rising(found) for name, found in points.items()}
    summed = [sum(_at(known, macs[name]) for name, known in layers.items()) for _, macs in networks]
    return Table(layers, _rising([(s, times[str(i)]) for i, s in enumerate(summed)]))


def milliseconds(
    scanned: Mapping[str, onnx_scan.Scanned], condition: bench.Condition
) -> dict[str, float]:
    """Median time of each file, measured beside the others."""
    settings = bench.Settings(duration_s=SECONDS)
    found = bench.measure(scanned, condition, settings, np.random.default_rng(0))
    return {
        name: 1e3 * float(np.median(np.concatenate([block.ravel() for block in times])))
        for name, times in found.items()
    }


@contextmanager
def exported(networks: Mapping[str, Network]) -> Iterator[dict[str, onnx_scan.Scanned]]:
    """The networks as ONNX files that vanish afterwards."""
    with tempfile.TemporaryDirectory(prefix="dcptool-latency-") as scratch:
        scanned = {}
        for number, (name, network) in enumerate(networks.items()):
            proto = onnx_export.translate(network).proto
            export.clean(proto)
            proto = export.dress(proto, network, export.Options(), {})
            path = Path(scratch) / f"{number}.onnx"
            files.publish(path, proto.SerializeToString())
            scanned[name] = onnx_scan.scan(path)
        yield scanned


def _rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Points in order, none faster than a smaller one: more work is never less time."""
    ordered = sorted(points)
    times = np.maximum.accumulate([ms for _, ms in ordered])
    return tuple((macs, float(ms)) for (macs, _), ms in zip(ordered, times, strict=True))


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    """The line through the points; below the first one, towards nothing in proportion."""
    first, time = points[0]
    if x < first:
        return time * x / first
    return float(np.interp(x, [p for p, _ in points], [ms for _, ms in points]))
