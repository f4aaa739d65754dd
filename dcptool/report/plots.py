"""Pictures, drawn with matplotlib without a display."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from dcptool import console, files
from dcptool.network.base import Network
from dcptool.network.cost import Cost, plan_cost
from dcptool.network.surgery import removed_units
from dcptool.selection.budget import first_units, parse_rate

if TYPE_CHECKING:
    from dcptool.network.graph import ChannelGraph

mpl.use("Agg")

DENSE = "#d5d9e0"
WHOLE = "#8d95a3"


def draw_cost(
    network: Network, graph: ChannelGraph, rates: Sequence[str], scope: str, path: Path
) -> None:
    """MACs and params of each layer in forward order, dense and at each rate."""
    from matplotlib.figure import Figure

    layers = [s.name for s in graph.sites.values() if s.kind in ("conv", "linear")]
    dense = plan_cost(graph, network.module)
    # The smallest is drawn last, over the others.
    ordered = sorted(dict.fromkeys(rates), key=parse_rate)
    slim = [_at_rate(network, graph, rate, scope) for rate in ordered]
    width = min(max(8.0, 0.17 * len(layers) + 2), 40.0)
    figure = Figure(figsize=(width, 7.6), layout="constrained")
    axes: Any = figure.subplots(2, 1, sharex=True)
    _bars(axes[0], layers, "MACs", 1, dense, ordered, slim)
    _bars(axes[1], layers, "params", 0, dense, ordered, slim)
    size = "x".join(map(str, network.input.size))
    figure.suptitle(f"{network.base} at {size}: cost of each layer", fontsize=12)
    axes[1].set_xticks(
        range(len(layers)), layers, rotation=90, fontsize=6 if len(layers) > 40 else 8
    )
    buffer = BytesIO()
    figure.savefig(
        buffer,
        format=path.suffix[1:],
        dpi=150,
        metadata={"Date": None} if path.suffix == ".svg" else None,
    )
    files.publish(path, buffer.getvalue())


def _at_rate(network: Network, graph: ChannelGraph, rate: str, scope: str) -> Cost:
    kept = first_units(graph.open_groups(scope), parse_rate(rate))
    return plan_cost(graph, network.module, removed_units(graph, kept))


def _bars(
    axis: Any,
    layers: Sequence[str],
    title: str,
    column: int,
    dense: Cost,
    rates: Sequence[str],
    slim: Sequence[Cost],
) -> None:
    """One bar for each layer; what a rate removes is the part that stays visible behind."""
    top = max([1, *(dense.by_site[name][column] for name in layers)])
    scale, unit = next((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")) if top >= s)
    blues = mpl.colormaps["Blues"]
    shades = [blues(0.45 + 0.5 * i / max(len(rates) - 1, 1)) for i in range(len(rates))]
    series: list[tuple[str, Any, Cost]] = [("dense", DENSE, dense)]
    series += [
        (f"rate {r}", shade, cost) for r, shade, cost in zip(rates, shades, slim, strict=True)
    ]
    for label, colour, cost in series:
        total = cost.macs if column else cost.params
        heights = [cost.by_site[name][column] / scale for name in layers]
        axis.bar(
            range(len(layers)),
            heights,
            width=0.85,
            color=colour,
            label=f"{label}: {console.quantity(total)}",
        )
    whole = [
        i
        for i, name in enumerate(layers)
        if all(cost.by_site[name][column] == dense.by_site[name][column] for cost in slim)
    ]
    if whole and rates:
        heights = [dense.by_site[layers[i]][column] / scale for i in whole]
        axis.bar(whole, heights, width=0.85, color=WHOLE, label="not cut at these rates")
    axis.set_ylabel(f"{title} ({unit})" if unit else title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)
    axis.grid(axis="y", color="#e9ecf1", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.legend(
        frameon=False, ncols=len(series) + 1, loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8
    )
