"""Where the milliseconds go: onnxruntime's profile, joined to the layers of the network.

The runtime fuses and renames nodes: a convolution with its activation is called after the
activation's output. A name is therefore looked up as a node or as a tensor, and followed
back to the convolution or product that made it; the name of its weight is the layer's name.
Imports no torch.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from dcptool.deploy import onnx_cost, onnx_scan
from dcptool.deploy.session import feed_of, open_session
from dcptool.errors import InputError

RUNS, WARMUP_RUNS = 20, 3
_KERNEL = "_kernel_time"
# Added by the runtime's own rewrites.
_SUFFIXES = re.compile(r"(_nchwc|_token_\d+|/[A-Za-z]*Fusion/?|_fused.*|_quant|_bn_fused)+$")
_HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds that one run spends in a layer and in what was fused into it."""

    layer: str
    kind: str
    ms: float


@dataclass(frozen=True)
class Profile:
    """Times by layer in graph order, then nodes without a weight, by operator in brackets."""

    layers: tuple[LayerTime, ...]
    total_ms: float


class _Finder:
    """From a name in the profile to a layer of the graph."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._nodes = {node.name: node for node in proto.graph.node if node.name}
        self._makers = {out: node for node in proto.graph.node for out in node.output}
        self._layer = onnx_cost.layer_names(proto)
        self._weighted = {cost.node for cost in onnx_cost.layer_costs(proto)}

    def layer(self, event: str, operator: str) -> str | None:
        """The layer behind an event, or None for nodes that belong to none."""
        name = event
        node = self._find(name)
        while node is None:
            shorter = _SUFFIXES.sub("", name)
            if shorter == name:
                return None
            name = shorter
            node = self._find(name)
        wants_weight = any(kind in operator for kind in _HEAVY)
        if wants_weight:
            node = self._back(node)
        if node is not None and node.name in self._weighted:
            return self._layer[node.name]
        return None

    def _find(self, name: str) -> onnx.NodeProto | None:
        return self._nodes.get(name) or self._makers.get(name)

    def _back(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """Walk from a fused activation, addition or quantization to the layer it was fused with."""
        front = [node]
        seen: set[str] = set()
        while front:
            current = front.pop(0)
            if current.name in self._weighted:
                return current
            for source in current.input:
                maker = self._makers.get(source)
                if maker is not None and source not in seen and len(seen) < 16:
                    seen.add(source)
                    front.append(maker)
        return None


def profile(
    scanned: onnx_scan.Scanned,
    *,
    batch_size: int,
    threads: int,
    size: int | None,
    provider: str = "cpu",
) -> Profile:
    """Run the model under the runtime's profiler."""
    with tempfile.TemporaryDirectory(prefix="dcptool-profile-") as scratch:
        session = open_session(
            scanned.data,
            provider=provider,
            threads=threads,
            folder=scanned.folder,
            profile_prefix=Path(scratch) / "run",
        )
        feeds = feed_of(scanned.proto).random(batch_size, size=size)
        for _ in range(WARMUP_RUNS + RUNS):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    return join(scanned.proto, events)


def join(proto: onnx.ModelProto, events: Sequence[Mapping[str, object]]) -> Profile:
    """Sum the events of each layer; the first runs are warm-up and do not count."""
    finder = _Finder(proto)
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") != "Node" or not name.endswith(_KERNEL):
            continue
        arguments = event.get("args")
        operator = str(arguments.get("op_name", "")) if isinstance(arguments, dict) else ""
        duration = event.get("dur")
        if isinstance(duration, int | float):
            durations[name.removesuffix(_KERNEL), operator].append(duration / 1000.0)
    if not durations:
        raise InputError("onnxruntime's profile holds no nodes")
    times: dict[str, float] = defaultdict(float)
    for (name, operator), spent in durations.items():
        times[finder.layer(name, operator) or f"({operator})"] += _per_run(spent)
    kinds: dict[str, str] = {}
    for cost in onnx_cost.layer_costs(proto):
        kinds.setdefault(cost.layer, cost.kind)
    layers = [
        LayerTime(name, kind, times.pop(name)) for name, kind in kinds.items() if name in times
    ]
    layers += [LayerTime(name, "", ms) for name, ms in sorted(times.items(), key=lambda x: -x[1])]
    return Profile(tuple(layers), sum(layer.ms for layer in layers))


def _per_run(spent: Sequence[float]) -> float:
    """The median over the runs: a neighbour that takes the processor for once is no cost.

    A name that the runtime gave to several nodes has several events in each run.
    """
    each = max(1, len(spent) // (WARMUP_RUNS + RUNS))
    runs = [sum(spent[start : start + each]) for start in range(0, len(spent), each)]
    return statistics.median(runs[WARMUP_RUNS:] or runs)


def document(profiles: Mapping[str, Profile]) -> list[dict[str, object]]:
    """One row for each layer, with the milliseconds of each model beside each other."""
    names: dict[str, str] = {}
    for found in profiles.values():
        for layer in found.layers:
            names.setdefault(layer.layer, layer.kind)
    # What belongs to no layer comes last.
    ordered = sorted(names, key=lambda name: name.startswith("("))
    tables = {
        model: {layer.layer: layer.ms for layer in found.layers}
        for model, found in profiles.items()
    }
    return [
        {
            "layer": name,
            "kind": names.get(name, ""),
            "ms": {model: table.get(name) for model, table in tables.items()},
        }
        for name in ordered
    ]
