"""The layers of a run's network, dense and slim, in forward order.

The dense network is built again from its name and read as `analyze` reads it; the widths that are
left come from the manifest. A module of the user's own cannot be built here, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcptool.network import artifact, models
from dcptool.network.cost import plan_cost
from dcptool.network.graph import ChannelGraph, Group, build_graph
from dcptool.report.charts import Band
from dcptool.report.record import Record


@dataclass(frozen=True)
class Layer:
    """One conv or linear layer."""

    name: str
    kind: str
    before: int
    after: int
    params: int
    macs: int
    status: str
    reason: str

    @property
    def removed(self) -> float:
        """Share of its channels that went, in percent."""
        return 100 * (1 - self.after / self.before) if self.before else 0.0

    @property
    def tip(self) -> str:
        """All that is known about it, in one line."""
        text = f"{self.name}: {self.before} to {self.after} channels"
        text += f", {self.removed:.0f} % removed" if self.after < self.before else ""
        return f"{text}; {self.status}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Architecture:
    """All layers, the stages they were pruned in, and the cost of the dense network."""

    layers: tuple[Layer, ...]
    bands: tuple[Band, ...]
    locked: tuple[Mapping[str, Any], ...]
    params: int
    macs: int


def read(record: Record) -> Architecture | None:
    """The architecture of a run, or None where the network cannot be built."""
    manifest = record.manifest
    if manifest.base.source == artifact.CUSTOM:
        return None
    module = models.build(manifest.base)
    graph = build_graph(module, manifest.input.size)
    cost = plan_cost(graph, module)
    owner = {n: g for g in graph.groups for n in (*g.carriers, *g.producers)}
    layers = []
    for site in graph.sites.values():
        if site.kind not in ("conv", "linear"):
            continue
        cut = manifest.cuts.get(site.name)
        before = len(site.outputs)
        after = len(cut.outputs) if cut is not None and cut.outputs is not None else before
        group = owner.get(site.name)
        params, macs = cost.by_site[site.name]
        status, reason = _status(group, after < before)
        layers.append(Layer(site.name, site.kind, before, after, params, macs, status, reason))
    locked = [
        {"name": g.name, "channels": g.channels, "status": g.status, "reason": g.reason}
        for g in graph.groups
        if g.status != "prunable" and not _is_cut(g, manifest.cuts)
    ]
    bands = _bands(record, graph, [layer.name for layer in layers])
    return Architecture(tuple(layers), tuple(bands), tuple(locked), cost.params, cost.macs)


def _status(group: Group | None, is_cut: bool) -> tuple[str, str]:
    if group is None:
        return "carried with its input", ""
    if is_cut:
        return "pruned", ""
    if group.status == "prunable":
        return "kept whole", ""
    return group.status, group.reason


def _is_cut(group: Group, cuts: Mapping[str, Any]) -> bool:
    return any(name in cuts and cuts[name].outputs is not None for name in group.producers)


def _bands(record: Record, graph: ChannelGraph, names: list[str]) -> list[Band]:
    """The stages between two losses, when the network was pruned with training in stages."""
    pruned = record.lineage("prune")
    if not pruned.get("training") or pruned.get("method") not in (None, "dcp"):
        return []
    wanted = record.options.get("losses")
    losses = wanted if isinstance(wanted, int) and wanted > 0 else None
    bands: list[Band] = []
    first = 0
    for pivot in graph.structure.pivots(losses or graph.structure.default_losses()):
        inside = [i for i, n in enumerate(names) if n == pivot or n.startswith(f"{pivot}.")]
        if not inside or max(inside) < first:
            continue
        text = f"head: the loss of stage {len(bands) + 1} is taken after {pivot}"
        bands.append(Band(first, max(inside), f"stage {len(bands) + 1}", text))
        first = max(inside) + 1
    if first < len(names):
        text = f"stage {len(bands) + 1} (the network's own loss)"
        wide = len(names) - first >= 12
        bands.append(Band(first, len(names) - 1, text if wide else f"stage {len(bands) + 1}"))
    return bands
