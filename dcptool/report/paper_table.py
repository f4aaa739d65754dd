"""Tables in the paper's layout: our figures beside the paper's, which are marked as quoted.

Knows measures, layouts and how a figure is written; where figures come from is the caller's. The
same table is given as Markdown, as CSV (one line for each figure), as text and as a picture.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcptool import console, files

MEASURES = {
    "params": "#Param.",
    "macs": "#FLOPs (MACs)",
    "params_ratio": "#Param. reduction",
    "macs_ratio": "#FLOPs reduction",
    "error": "Testing err. (%)",
    "error_gap": "Err. gap (%)",
    "top5_error": "Top-5 err. (%)",
    "top5_gap": "Top-5 gap (%)",
    "pruned_error": "Testing err. right after pruning (%)",
    "pruned_gap": "Err. gap right after pruning (%)",
    "train_error": "Training err. (%)",
    "top1": "Top-1 (%)",
    "top5": "Top-5 (%)",
    "verification": "LFW acc. (%)",
    "forward_ms": "Forward (ms)",
    "backward_ms": "Backward (ms)",
    "total_ms": "Forward + backward (ms)",
    "latency_ms": "Latency (ms)",
    "speedup": "Speedup",
    "seconds": "Seconds",
}
LAYOUTS = ("across", "down", "grid")
# Known before anything is trained.
COMPLEXITY = ("params", "macs", "params_ratio", "macs_ratio")
NOTHING = "-"
OURS = "#2f6db5"
QUOTED = "#b9c0cb"


@dataclass(frozen=True)
class Entry:
    """One column (or line) of a table: figures by measure, ours and quoted.

    `place` is the series and the value of a point in a grid.
    """

    name: str
    ours: Mapping[str, float | None] = field(default_factory=dict)
    quoted: Mapping[str, Any] = field(default_factory=dict)
    place: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Table:
    """A table of the paper: its title, its layout, what is measured and all entries."""

    title: str
    measures: Sequence[str]
    entries: Sequence[Entry]
    layout: str = "across"
    notes: Sequence[str] = ()

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The header and the lines, every figure written out."""
        return {"across": _across, "down": _down, "grid": _grid}[self.layout](self)


def written(measure: str, value: Any) -> str:
    """A figure as it stands in a table; a text is left as it is."""
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value
    number = float(value)
    if measure.endswith("_ratio") or measure == "speedup":
        return f"{number:.2f}x"
    if measure.endswith("_gap"):
        return f"{number:+.2f}"
    if measure in ("params", "macs"):
        return f"{number:,.0f}"
    return f"{number:.2f}"


def _has_quotes(table: Table, measure: str) -> bool:
    return any(measure in entry.quoted for entry in table.entries)


def _across(table: Table) -> tuple[list[str], list[list[str]]]:
    lines = []
    for measure in table.measures:
        label = MEASURES[measure]
        lines.append([f"{label}, ours", *(_ours(entry, measure) for entry in table.entries)])
        if _has_quotes(table, measure):
            lines.append(
                [f"{label}, quoted", *(_quoted(entry, measure) for entry in table.entries)]
            )
    return ["", *(entry.name for entry in table.entries)], lines


def _down(table: Table) -> tuple[list[str], list[list[str]]]:
    header, sides = [""], []
    for measure in table.measures:
        header.append(f"{MEASURES[measure]}, ours")
        sides.append((_ours, measure))
        if _has_quotes(table, measure):
            header.append(f"{MEASURES[measure]}, quoted")
            sides.append((_quoted, measure))
    lines = [[entry.name, *(side(entry, name) for side, name in sides)] for entry in table.entries]
    return header, lines


def _grid(table: Table) -> tuple[list[str], list[list[str]]]:
    """Values down, series across, for the first measure."""
    measure = table.measures[0]
    series = list(dict.fromkeys(entry.place[0] for entry in table.entries))
    values = list(dict.fromkeys(entry.place[1] for entry in table.entries))
    at = {entry.place: entry for entry in table.entries}
    quotes = _has_quotes(table, measure)
    header = [MEASURES[measure]]
    for name in series:
        header += [f"{name}, ours", f"{name}, quoted"] if quotes else [name]
    lines = []
    for value in values:
        line = [value]
        for name in series:
            entry = at.get((name, value), Entry(""))
            line += [_ours(entry, measure), *([_quoted(entry, measure)] if quotes else [])]
        lines.append(line)
    return header, lines


def _ours(entry: Entry, measure: str) -> str:
    return written(measure, entry.ours.get(measure))


def _quoted(entry: Entry, measure: str) -> str:
    return written(measure, entry.quoted.get(measure))


def text(table: Table) -> str:
    """The table for a terminal."""
    header, lines = table.cells()
    body = console.table(header, lines, align="<" + ">" * (len(header) - 1))
    return "\n".join([table.title, "", body, *(["", *table.notes] if table.notes else [])])


def markdown(table: Table, conditions: Sequence[str] = ()) -> str:
    """The table as Markdown, with what it was made under."""
    header, lines = table.cells()
    rule = ["---", *("---:" for _ in header[1:])]
    rows = ["| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines]
    parts = [
        f"## {table.title}",
        "",
        "| " + " | ".join(_escaped(cell) for cell in header) + " |",
        "|" + "|".join(rule) + "|",
        *rows,
        "",
        "Quoted figures are the paper's, not measured here; `-`: not reported, or not measured.",
        *table.notes,
    ]
    if conditions:
        parts += ["", *(f"- {line}" for line in conditions)]
    return "\n".join(parts) + "\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def as_csv(table: Table) -> str:
    """One line for each figure: point, measure, ours, quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["point", "measure", "ours", "quoted"])
    for entry in table.entries:
        for measure in table.measures:
            ours, quoted = entry.ours.get(measure), entry.quoted.get(measure)
            writer.writerow([entry.name, measure, _plain(ours), _plain(quoted)])
    return out.getvalue()


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def draw(table: Table, path: Path) -> None:
    """One panel for each measure: bars of ours and of the quoted figures, point by point."""
    from matplotlib.figure import Figure

    shown = [m for m in table.measures if any(_number(e.ours.get(m)) is not None
             or _number(e.quoted.get(m)) is not None for e in table.entries)]  # fmt: skip
    shown = shown or list(table.measures[:1])
    width = max(5.0, 0.7 * len(table.entries) + 2.5)
    figure = Figure(figsize=(min(width, 24.0), 2.8 * len(shown) + 0.8), layout="constrained")
    axes: Any = figure.subplots(len(shown), 1, squeeze=False)
    places = range(len(table.entries))
    for axis, measure in zip(axes[:, 0], shown, strict=True):
        for offset, colour, label, side in (
            (-0.2, OURS, "ours", [e.ours for e in table.entries]),
            (0.2, QUOTED, "quoted from the paper", [e.quoted for e in table.entries]),
        ):
            heights = [_number(figures.get(measure)) for figures in side]
            known = [(i + offset, h) for i, h in zip(places, heights, strict=True) if h is not None]
            if known:
                axis.bar(*zip(*known, strict=True), width=0.38, color=colour, label=label)
        axis.set_ylabel(MEASURES[measure], fontsize=8)
        axis.axhline(0, color="#444", linewidth=0.6)
        axis.set_xticks(list(places), [e.name for e in table.entries], fontsize=8)
        axis.tick_params(axis="x", rotation=90 if len(table.entries) > 9 else 20)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e9ecf1", linewidth=0.8)
        axis.set_axisbelow(True)
    axes[0, 0].legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    figure.suptitle(table.title, fontsize=10)
    publish(figure, path)


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def publish(figure: Any, path: Path) -> None:
    """Write a figure as .svg or .png."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer,
        format=path.suffix[1:],
        dpi=150,
        metadata={"Date": None} if path.suffix == ".svg" else None,
    )
    files.publish(path, buffer.getvalue())


def write(table: Table, folder: Path, conditions: Sequence[str] = (), stem: str = "table") -> None:
    """The table in a folder: Markdown, CSV and a picture."""
    files.publish(folder / f"{stem}.md", markdown(table, conditions).encode())
    files.publish(folder / f"{stem}.csv", as_csv(table).encode())
    draw(table, folder / f"{stem}.svg")
