"""`analyze` as data: what a network consists of and what a pruning rate would leave of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcptool.network.base import Network
from dcptool.network.cost import Cost, count, plan_cost
from dcptool.network.graph import ChannelGraph, build_graph
from dcptool.selection.budget import first_units, parse_rate
from dcptool.selection.settings import Selection
from dcptool.selection.widths import at_rate, removed_by


@dataclass(frozen=True)
class Analysis:
    """A network's graph, its cost, and the JSON document of the command."""

    graph: ChannelGraph
    dense: Cost
    document: dict[str, Any]


def analyze(
    network: Network,
    *,
    rates: Sequence[str] = ("0.3", "0.5", "0.7"),
    scope: str = "paper",
    losses: int | None = None,
    round_to: int = 1,
) -> Analysis:
    """Read a network: every layer, every group, and the cost at each rate, exact and rounded."""
    parsed = [(text, parse_rate(text)) for text in rates]
    graph = build_graph(network.module, network.input.size)
    counted = count(network.module, network.input.size)
    dense = plan_cost(graph, network.module)
    group_of = {name: group.name for group in graph.groups for name in group.producers}
    predictions = []
    for text, rate in parsed:
        for prune_residual in (False, True):
            for multiple in sorted({1, round_to}):
                settings = Selection(
                    rate=rate, scope=scope, prune_residual=prune_residual, round_to=multiple
                )
                dead = removed_by(graph, at_rate(network, graph, settings))
                slim = plan_cost(graph, network.module, dead)
                predictions.append(
                    {
                        "rate": float(text),
                        "scope": scope,
                        "prune_residual": prune_residual,
                        "round_to": multiple,
                        "params": slim.params,
                        "macs": slim.macs,
                    }
                )
    structure = graph.structure
    document = {
        "model": str(network.base),
        "input_size": list(network.input.size),
        "dense": {
            "params": counted.params,
            "macs": counted.macs,
            "macs_with_bias": counted.macs_with_bias,
        },
        "uncounted": list(counted.uncounted),
        "rates": predictions,
        "layers": [
            {
                "name": site.name,
                "kind": _kind(site.kind, site.groups, len(site.inputs)),
                "in": len(site.inputs),
                "out": len(site.outputs),
                "params": dense.by_site[site.name][0],
                "macs": dense.by_site[site.name][1],
                "group": group_of.get(site.name) or _carried_by(graph, site.name),
            }
            for site in graph.sites.values()
            if site.kind in ("conv", "linear")
        ],
        "groups": [
            {
                "name": group.name,
                "channels": group.channels,
                "units": len(group.units),
                "status": group.status,
                "reason": group.reason,
                "producers": list(group.producers),
                "consumers": list(group.consumers),
            }
            for group in graph.groups
        ],
        "pivots": list(structure.pivots(losses or structure.default_losses())),
    }
    return Analysis(graph, dense, document)


def _kind(kind: str, groups: int, inputs: int) -> str:
    if kind == "linear" or groups == 1:
        return kind
    return "depthwise" if groups == inputs else "grouped"


def _carried_by(graph: ChannelGraph, name: str) -> str | None:
    return next((group.name for group in graph.groups if name in group.carriers), None)


def plan_document(
    analysis: Analysis, *, rate: str, scope: str, prune_residual: bool
) -> dict[str, Any]:
    """A plan to edit by hand: how many units of each open group stay."""
    groups = analysis.graph.open_groups(scope, prune_residual)
    kept = first_units(groups, parse_rate(rate))
    return {
        "dcptool_plan": 1,
        "model": analysis.document["model"],
        "comment": "keep: units that stay, 1 to units; remove a line to leave the group whole",
        "groups": {
            group.name: {"units": len(group.units), "keep": len(kept[group.name])}
            for group in groups
        },
    }
