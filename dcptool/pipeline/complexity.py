"""What the points of a recipe cost, in params and MACs, without data and without weights.

Counts plans in closed form. A point whose widths are only found on data (epsilon, curves) has no
count. Adds what a table of the paper asks for: one operation for each bias, and layers that it
leaves out because they are for training alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcptool.errors import UsageError
from dcptool.network.base import Network
from dcptool.network.cost import COUNTED, plan_cost
from dcptool.network.graph import ChannelGraph, Group, build_graph
from dcptool.network.surgery import removed_units
from dcptool.pipeline.recipe import Recipe
from dcptool.pipeline.study import Point
from dcptool.report.paper_table import COMPLEXITY, Entry, Table
from dcptool.report.structure_table import Layer
from dcptool.selection.settings import Selection

DENSE = "dense"


@dataclass(frozen=True)
class Costed:
    """A network as the paper counts it: its graph, and rules of its table."""

    network: Network
    graph: ChannelGraph
    leaves_out: tuple[str, ...] = ()
    with_bias: bool = False

    @classmethod
    def of(cls, network: Network, paper: Mapping[str, Any]) -> Costed:
        """Read the graph of a network, for a table with these rules."""
        graph = build_graph(network.module, network.input.size)
        leaves_out = tuple(paper.get("leaves_out", ()))
        unknown = [name for name in leaves_out if name not in graph.sites]
        if unknown:
            raise UsageError(f"{network.base} has no layer {unknown[0]} to leave out")
        return cls(network, graph, leaves_out, bool(paper.get("with_bias")))

    def count(self, kept: Mapping[str, int]) -> dict[str, int]:
        """Params and MACs with so many units of each named group left."""
        dead = self._dead(kept)
        cost = plan_cost(self.graph, self.network.module, dead)
        params, macs = cost.params, cost.macs
        for name in self.leaves_out:
            params, macs = params - cost.by_site[name][0], macs - cost.by_site[name][1]
        if self.with_bias:
            macs += self._biases(dead)
        return {"params": params, "macs": macs}

    def layers(self, kept: Mapping[str, int] | None) -> list[tuple[str, int, int | None]]:
        """Convolutions with their input channels, dense and left, in forward order."""
        gone = np.fromiter(self._dead(kept or {}), dtype=np.int64)
        return [
            (
                site.name,
                len(site.inputs),
                None if kept is None else int((~np.isin(site.inputs, gone)).sum()),
            )
            for site in self.graph.sites.values()
            if site.kind == "conv"
        ]

    def plan_of(self, inputs: Sequence[int]) -> dict[str, int]:
        """Units to keep of each group so that the convolutions read so many channels."""
        layers = [name for name, *_ in self.layers({})]
        if len(layers) != len(inputs):
            raise UsageError(
                f"paper.structure has {len(inputs)} layers",
                why=f"{self.network.base} has {len(layers)} convolutions",
            )
        wanted = dict(zip(layers, inputs, strict=True))
        plan: dict[str, int] = {}
        for group in self.graph.groups:
            readers = [name for name in group.consumers if name in wanted]
            if group.units and readers and wanted[readers[0]] < group.channels:
                plan[group.name] = wanted[readers[0]] * len(group.units) // group.channels
        return plan

    def _dead(self, kept: Mapping[str, int]) -> set[int]:
        return removed_units(self.graph, {name: range(count) for name, count in kept.items()})

    def _biases(self, dead: set[int]) -> int:
        gone = np.fromiter(dead, dtype=np.int64)
        total = 0
        for site in self.graph.sites.values():
            if site.kind not in COUNTED or site.name in self.leaves_out:
                continue
            if getattr(self.network.module.get_submodule(site.name), "bias", None) is not None:
                total += int((~np.isin(site.outputs, gone)).sum()) * site.positions
        return total


def kept_of(graph: ChannelGraph, settings: Selection) -> dict[str, int] | None:
    """How many units of each group would stay; None where that is found on data."""
    if settings.widths != "uniform" or settings.method == "slimming":
        return None
    groups: list[Group] = settings.groups(graph)
    kept = {group.name: settings.kept(group) for group in groups}
    return None if None in kept.values() else {k: v for k, v in kept.items() if v is not None}


def figures(dense: Mapping[str, int], slim: Mapping[str, int] | None) -> dict[str, float | None]:
    """A count and what it saves, by measure."""
    if slim is None:
        return dict.fromkeys(COMPLEXITY)
    return {
        **slim,
        "params_ratio": dense["params"] / slim["params"],
        "macs_ratio": dense["macs"] / slim["macs"],
    }


def table(
    recipe: Recipe, points: Sequence[tuple[Point, Costed, Mapping[str, int] | None]]
) -> Table:
    """The complexity of all points (kept units each), and of what the paper found, in one table."""
    paper = recipe.sections.get("paper", {})
    quoted = paper.get("quoted", {})
    entries: list[Entry] = []
    for name, costed in {str(c.network.base): c for _, c, _ in points}.items():
        dense = costed.count({})
        title = (
            DENSE if len({str(c.network.base) for _, c, _ in points}) == 1 else f"{DENSE} {name}"
        )
        told = quoted.get(title, paper.get("baseline", {}))
        entries.append(Entry(title, figures(dense, dense), _only(told)))
    for point, costed, kept in points:
        if point.name in {entry.name for entry in entries}:
            continue
        slim = None if kept is None else costed.count(kept)
        ours = figures(costed.count({}), slim)
        entries.append(Entry(point.name, ours, _only(quoted.get(point.name, {})), point.place))
    if "structure" in paper and points:
        costed = points[0][1]
        plan = costed.plan_of([int(count) for count in paper["structure"].values()])
        name = str(paper.get("column", "the structure of the paper"))
        ours = figures(costed.count({}), costed.count(plan))
        told = _only(quoted.get(name, {}))
        entries.append(Entry(f"{name}, the paper's structure", ours, told))
    known = {entry.name for entry in entries}
    entries += [Entry(name, {}, _only(q)) for name, q in quoted.items() if name not in known
                and any(measure in q for measure in COMPLEXITY)]  # fmt: skip
    title = f"{paper.get('table', recipe.name)}: complexity"
    notes = [str(paper["note"])] if "note" in paper else []
    return Table(title, COMPLEXITY, entries, "down", notes)


def _only(quoted: Mapping[str, Any]) -> dict[str, Any]:
    return {measure: value for measure, value in quoted.items() if measure in COMPLEXITY}


def structure(
    paper: Mapping[str, Any], costed: Costed, kept: Mapping[str, int] | None
) -> list[Layer]:
    """Widths of all convolutions, called as the paper calls them where it tells its own."""
    quoted = paper.get("structure", {})
    names, counts = list(quoted), [int(count) for count in quoted.values()]
    found = costed.layers(kept)
    if quoted and len(quoted) != len(found):
        raise UsageError(f"paper.structure has {len(quoted)} layers for {len(found)} convolutions")
    return [
        Layer(names[i] if quoted else name, dense, ours, counts[i] if quoted else None)
        for i, (name, dense, ours) in enumerate(found)
    ]
