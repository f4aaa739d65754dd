"""Pictures, drawn with matplotlib without a display."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from dcptool import files
from dcptool.network.base import Network
from dcptool.network.cost import plan_cost
from dcptool.network.surgery import removed_units
from dcptool.selection.budget import first_units, parse_rate

if TYPE_CHECKING:
    from dcptool.network.graph import ChannelGraph

mpl.use("Agg")

COLOURS = ("#c9ced6", "#7aa6d8", "#2f6fb3", "#123d6b", "#0a2340")


def draw_cost(
    network: Network, graph: ChannelGraph, rates: Sequence[str], scope: str, path: Path
) -> None:
    """MACs and params of each layer in forward order, dense and at each rate."""
    from matplotlib.figure import Figure

    layers = [s.name for s in graph.sites.values() if s.kind in ("conv", "linear")]
    series: list[tuple[str, dict[str, tuple[int, int]]]] = [
        ("dense", dict(plan_cost(graph, network.module).by_site))
    ]
    groups = graph.open_groups(scope)
    for rate in rates:
        dead = removed_units(graph, first_units(groups, parse_rate(rate)))
        series.append((f"rate {rate}", dict(plan_cost(graph, network.module, dead).by_site)))
    width = min(max(7.0, 0.16 * len(layers) + 2), 40.0)
    figure = Figure(figsize=(width, 7.2), layout="constrained")
    axes: Any = figure.subplots(2, 1, sharex=True)
    for axis, column, title, scale in (
        (axes[0], 1, "million MACs", 1e6),
        (axes[1], 0, "thousand params", 1e3),
    ):
        for i, (label, costs) in enumerate(series):
            heights = [costs[name][column] / scale for name in layers]
            # Drawn over each other: what a rate removes is the part that stays visible behind.
            axis.bar(
                range(len(layers)),
                heights,
                width=0.85,
                label=label,
                color=COLOURS[i % len(COLOURS)],
            )
        axis.set_ylabel(title)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
    axes[0].legend(frameon=False, ncols=len(series))
    axes[0].set_title(
        f"{network.base}, {'x'.join(map(str, network.input.size))}: cost of each layer"
    )
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
