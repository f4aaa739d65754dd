"""The result of `bench` for people: plain tables, Markdown, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from dcptool import console
from dcptool.deploy import profile

_CONDITION = ("model", "provider", "batch", "threads")
_ROW_KEYS = ("p50_ms", "p90_ms", "p99_ms", "mean_ms", "std_ms")


def text(document: Mapping[str, Any], *, style: str = "plain") -> str:
    """All tables of a bench document."""
    if style == "csv":
        return _csv(document["rows"])
    parts = [_rows(document["rows"], style)]
    if document["speedup"]:
        parts.append(_speedups(document["speedup"], style))
    if document.get("precision"):
        parts.insert(0, _precision(document["precision"], style))
    if document.get("torch"):
        parts.append(_torch(document["torch"], style))
    if document.get("profile"):
        parts.append(_profile(document["profile"], document["rows"][0], style))
    machine = document["machine"]
    parts.append(
        f"{machine['cpu']}, {machine['cores']} cores, onnxruntime {machine['onnxruntime']}, "
        f"load {machine['load']:.1f}"
    )
    return "\n\n".join(parts)


def precision(
    document: Mapping[str, Any], top1: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """Accuracy, time under the first condition and size of each precision."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in document["rows"]:
        first.setdefault(row["model"], row)
    return [
        {
            "model": name,
            "top1": accuracy,
            "p50_ms": first[name]["p50_ms"],
            "bytes": first[name]["bytes"],
            "batch_size": first[name]["batch_size"],
            "threads": first[name]["threads"],
        }
        for name, accuracy in top1.items()
    ]


def _precision(rows: Sequence[Mapping[str, Any]], style: str) -> str:
    under = f"ms (batch {rows[0]['batch_size']}, threads {rows[0]['threads']})"
    cells = [
        (
            row["model"],
            "-" if row["top1"] is None else f"{row['top1']:.2f}",
            f"{row['p50_ms']:.2f}",
            f"{rows[0]['p50_ms'] / row['p50_ms']:.2f}x",
            f"{row['bytes'] / 1e6:.1f}",
        )
        for row in rows
    ]
    return _table(["", "top-1, %", under, "faster", "MB"], cells, "<>>>>", style)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str, style: str) -> str:
    if style != "markdown":
        return console.table(headers, rows, align=align)
    sides = {"<": ":--", ">": "--:"}
    lines = [list(headers), [sides[side] for side in align], *map(list, rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )


def _rows(rows: Sequence[Mapping[str, Any]], style: str) -> str:
    headers = [*_CONDITION, "p50 ms", "p90", "p99", "mean", "dev", "images/s", "peak MB"]
    headers += ["file MB", "MACs"]
    cells = [
        (
            row["model"],
            row["provider"],
            str(row["batch_size"]),
            str(row["threads"]),
            *(f"{row[key]:.2f}" for key in _ROW_KEYS),
            f"{row['images_per_second']:.1f}",
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['bytes'] / 1e6:.1f}",
            console.quantity(row["macs"]),
        )
        for row in rows
    ]
    return _table(headers, cells, "<<" + ">" * 11, style)


def _speedups(entries: Sequence[Mapping[str, Any]], style: str) -> str:
    headers = [*_CONDITION, "against", "speed-up", "95 % interval", "MACs ratio", "efficiency"]
    cells: list[tuple[str, ...]] = [
        (
            entry["model"],
            entry["provider"],
            str(entry["batch_size"]),
            str(entry["threads"]),
            entry["baseline"],
            f"{entry['ratio']:.2f}",
            f"{entry['low']:.2f} .. {entry['high']:.2f}",
            f"{entry['macs_ratio']:.2f}",
            "" if entry["efficiency"] is None else f"{entry['efficiency']:.2f}",
        )
        for entry in entries
    ]
    align = "<<>><>>>>"
    if not all(entry["measurable"] for entry in entries):
        said = ["" if entry["measurable"] else "no measurable difference" for entry in entries]
        cells = [(*row, text) for row, text in zip(cells, said, strict=True)]
        headers, align = [*headers, "note"], align + "<"
    return _table(headers, cells, align, style)


def _torch(rows: Sequence[Mapping[str, Any]], style: str) -> str:
    headers = ["model", "batch", "threads", "torch forward ms", "backward ms"]
    cells = [
        (
            row["model"],
            str(row["batch_size"]),
            str(row["threads"]),
            f"{row['forward_ms']:.2f}",
            f"{row['backward_ms']:.2f}",
        )
        for row in rows
    ]
    return _table(headers, cells, "<>>>>", style)


def _profile(rows: Sequence[Mapping[str, Any]], first: Mapping[str, Any], style: str) -> str:
    models = list(rows[0]["ms"])
    totals = {model: sum(row["ms"][model] or 0.0 for row in rows) for model in models}
    headers = ["layer", "kind", *(f"{model} ms" for model in models)]
    lines = [*rows, {"layer": "total", "kind": "", "ms": totals}]
    cells = [[row["layer"], row["kind"], *_times(row["ms"], models)] for row in lines]
    if len(models) == 2:
        headers.append("saved ms")
        for cell, row in zip(cells, lines, strict=True):
            before, after = (row["ms"][model] or 0.0 for model in models)
            cell.append(f"{before - after:+.3f}")
    align = "<<" + ">" * (len(headers) - 2)
    caption = f"time by layer: {first['provider']}, batch {first['batch_size']}, "
    caption += f"threads {first['threads']}, median of {profile.RUNS} runs under the profiler"
    return caption + "\n\n" + _table(headers, cells, align, style)


def _times(times: Mapping[str, float | None], models: Sequence[str]) -> list[str]:
    return ["-" if times[model] is None else f"{times[model]:.3f}" for model in models]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().rstrip("\n")
