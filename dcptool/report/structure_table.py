"""How wide each layer is before and after pruning, as a table and as bars of pruning rates."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcptool import console, files
from dcptool.report.paper_table import NOTHING, OURS, QUOTED, publish


@dataclass(frozen=True)
class Layer:
    """Input channels of a layer: dense, ours, and the paper's; None where that is unknown."""

    name: str
    dense: int
    ours: int | None
    quoted: int | None = None


def rate(dense: int, kept: int | None) -> float | None:
    """The share of input channels that is gone, in percent."""
    return None if kept is None else 100 * (dense - kept) / dense


def cells(layers: Sequence[Layer]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table in the paper's layout."""
    header = ["Layer", "#Channel", "#Channel*, ours", "Pruning rate (%), ours"]
    quotes = any(layer.quoted is not None for layer in layers)
    header += ["#Channel*, quoted", "Pruning rate (%), quoted"] if quotes else []
    lines = []
    for layer in layers:
        line = [layer.name, str(layer.dense), _count(layer.ours), _rate(layer.dense, layer.ours)]
        if quotes:
            line += [_count(layer.quoted), _rate(layer.dense, layer.quoted)]
        lines.append(line)
    return header, lines


def _count(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def _rate(dense: int, kept: int | None) -> str:
    share = rate(dense, kept)
    return NOTHING if share is None else f"{share:.2f}"


def text(title: str, layers: Sequence[Layer]) -> str:
    """The table for a terminal."""
    header, lines = cells(layers)
    return f"{title}\n\n{console.table(header, lines, align='<' + '>' * (len(header) - 1))}"


def write(title: str, layers: Sequence[Layer], folder: Path, stem: str = "structure") -> None:
    """Markdown, CSV and the bar plot in a folder."""
    header, lines = cells(layers)
    rows = ["| " + " | ".join(line) + " |" for line in [header, *lines]]
    rows.insert(1, "|---" + "|---:" * (len(header) - 1) + "|")
    notes = ["", "Input channels of each layer; quoted figures are the paper's."]
    document = "\n".join([f"## {title}", "", *rows, *notes]) + "\n"
    files.publish(folder / f"{stem}.md", document.encode())
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *lines])
    files.publish(folder / f"{stem}.csv", out.getvalue().encode())
    draw(title, layers, folder / f"{stem}.svg")


def draw(title: str, layers: Sequence[Layer], path: Path) -> None:
    """A bar for the pruning rate of every layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 0.45 * len(layers) + 2), 3.6), layout="constrained")
    axis: Any = figure.subplots()
    sides = (
        ("ours", OURS, [rate(layer.dense, layer.ours) for layer in layers]),
        ("quoted from the paper", QUOTED, [rate(layer.dense, layer.quoted) for layer in layers]),
    )
    known = [side for side in sides if any(value is not None for value in side[2])]
    width = 0.8 / max(len(known), 1)
    for number, (label, colour, values) in enumerate(known):
        places = [i + (number - (len(known) - 1) / 2) * width for i in range(len(layers))]
        axis.bar(places, [value or 0.0 for value in values], width, color=colour, label=label)
    axis.set_xticks(range(len(layers)), [layer.name for layer in layers], rotation=60, fontsize=8)
    axis.set_ylabel("Pruning rate (%)")
    axis.set_ylim(0, 100)
    axis.spines[["top", "right"]].set_visible(False)
    if known:
        axis.legend(frameon=False, fontsize=8)
    axis.set_title(title, fontsize=10)
    publish(figure, path)
