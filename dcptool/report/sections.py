"""What each part of the page says, as plain values and charts; what is missing is named.

Every function here turns records into the context of one section of the template, or into None
when there is nothing to show. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcptool import console
from dcptool.report import charts, conditions, latency
from dcptool.report.architecture import Architecture
from dcptool.report.record import Record, as_object, evaluated, number, numbers

Context = dict[str, Any]

STOPS = {
    "count": "the wanted number of channels was reached",
    "epsilon": "the loss no longer fell by more than epsilon",
}
MOST_CLASSES = 10


def answer(record: Record, architecture: Architecture | None) -> Context:
    """Dense against slim: accuracy, cost, size, latency, under which conditions."""
    rows: list[Context] = []
    dense, slim = accuracies(record)
    if slim is not None:
        change = f"{slim - dense:+.2f}" if dense is not None else ""
        rows.append(_row("top-1", _percent(dense), f"{slim:.2f} %", change))
    cost = costs(record, architecture)
    for name, key in (("MACs", "macs"), ("params", "params")):
        before, after = cost["dense"].get(key), cost["slim"].get(key)
        if after:
            ratio = f"{before / after:.2f}x fewer" if before else ""
            if not record.manifest.cuts:  # trained alone, it costs what it did
                before, ratio = after, ""
            rows.append(_row(name, f"{before:,}" if before else "", f"{after:,}", ratio))
    before, after = sizes(record)
    ratio = f"{before / after:.2f}x smaller" if before and after else ""
    if not record.manifest.cuts:
        before, ratio = after, ""
    rows.append(_row("weights", _bytes(before), _bytes(after), ratio))
    rows += [
        _row(
            f"latency, {pair['condition']}",
            f"{pair['before']:.2f} ms",
            f"{pair['after']:.2f} ms",
            _speed(pair["ratio"]),
        )
        for pair in latency.pairs(record.bench)
    ]
    return {
        "rows": rows,
        "conditions": conditions.lines(record),
        "commands": list(record.commands),
        "gates": [
            {
                "name": str(gate.get("name")),
                "limit": _general(gate.get("limit")),
                "value": _general(gate.get("value")),
                "ok": gate.get("ok") is True,
            }
            for gate in record.gates
        ],
    }


def accuracies(record: Record) -> tuple[float | None, float | None]:
    """Top-1 of the dense network and of the newest one."""
    pruned = record.documents.get("prune", {})
    dense = number(as_object(pruned.get("dense")).get("top1"))
    for part in record.parts:
        if dense is None:
            dense = number(part.manifest.metrics.get("dense_top1"))
    if dense is None and not record.manifest.cuts:
        dense = number(record.manifest.metrics.get("top1_before"))
    slim = number(evaluated(record.documents).get("top1"))
    return dense, slim if slim is not None else number(record.manifest.metrics.get("top1"))


def costs(record: Record, architecture: Architecture | None) -> dict[str, dict[str, int]]:
    """MACs and params of both networks, as far as they are known."""
    slim = {k: v for k, v in record.manifest.cost.items() if k in ("macs", "params")}
    dense: dict[str, int] = {}
    for part in reversed(record.parts):
        for key in ("macs", "params"):
            if f"dense_{key}" in part.manifest.cost:
                dense.setdefault(key, part.manifest.cost[f"dense_{key}"])
    if architecture is not None and record.manifest.cuts:
        dense.setdefault("macs", architecture.macs)
        dense.setdefault("params", architecture.params)
    return {"dense": dense, "slim": slim}


def sizes(record: Record) -> tuple[int | None, int]:
    """Bytes of the dense weights, where they lie in the run, and of the slim ones."""
    dense = record.dense_weights()
    return dense.stat().st_size if dense else None, record.manifest.weights_bytes


def layers(architecture: Architecture) -> Context:
    """Widths before and after in forward order, and what is locked."""
    items = [
        charts.Bar(
            layer.name,
            layer.before,
            layer.after,
            layer.tip,
            is_locked=layer.status in ("locked", "coupled", "outside"),
        )
        for layer in architecture.layers
    ]
    title = "Channels of each layer before and after, and the share removed"
    return {
        "chart": charts.bars(items, architecture.bands, title=title),
        "layers": architecture.layers,
        "locked": architecture.locked,
    }


def selection(record: Record) -> Context | None:
    """The loss of each group against the channels that are kept."""
    groups = []
    for step in record.steps:
        losses = numbers(step.get("losses"))
        units, kept = number(step.get("units")), step.get("kept")
        if not units or not isinstance(kept, list):
            continue
        name, why = str(step.get("group")), str(step.get("stopped"))
        smallest = number(step.get("smallest"))
        # Curves of the closed form end with all units; those of the loop begin with none.
        first = int(units) - len(losses) + 1 if smallest is None else int(smallest)
        points = [(float(first + i), loss) for i, loss in enumerate(losses)]
        mark = next((p for p in points if p[0] == len(kept)), None)
        said = f"{name}: {len(kept)} of {int(units)} kept; stopped because {STOPS.get(why, why)}"
        said += f"; loss {mark[1]:.4g}" if mark else ""
        norms = numbers(step.get("norms"))
        groups.append(
            {
                "name": name,
                "units": int(units),
                "kept": len(kept),
                "loss": mark[1] if mark else None,
                "stopped": STOPS.get(why, why),
                "dead": step.get("dead", 0),
                "chart": _small([charts.Curve(name, points, mark, said)], said, "loss"),
                "norms": _norms(name, norms),
            }
        )
    if not groups:
        return None
    facts = conditions.facts(record.lineage("prune"))
    return {
        "groups": groups,
        "facts": [f"{key} {value}" for key, value in facts.items()],
        "has_curves": any(g["chart"] for g in groups),
        "has_marks": any(g["loss"] is not None for g in groups),
        "has_norms": any(g["norms"] for g in groups),
        # Only the closed form of our own method leaves norms to be had by its loop.
        "lacks_norms": facts.get("solver") == "gram" and facts.get("method") == "dcp",
    }


def _norms(name: str, norms: Sequence[float]) -> Any:
    if not norms:
        return ""
    points = [(float(i + 1), norm) for i, norm in enumerate(norms)]
    said = f"{name}: gradient norm of each channel when it was chosen, {norms[0]:.3g} first"
    return _small([charts.Curve(name, points, None, said)], said, "gradient norm")


def _small(lines: Sequence[charts.Curve], title: str, y_name: str) -> Any:
    return charts.curves(
        lines,
        title=title,
        x_name="channels",
        y_name=y_name,
        width=300,
        height=170,
        counts=True,
    )


def training(record: Record) -> Context | None:
    """Loss and accuracy over the steps of a fine-tune."""

    def line(key: str, name: str) -> charts.Curve:
        pairs = [(number(row.get("step")), number(row.get(key))) for row in record.metrics]
        return charts.Curve(name, [(x, y) for x, y in pairs if x is not None and y is not None])

    # Where val could not choose, images of train did, and are what the curve is of.
    by_train = record.lineage("finetune").get("chosen_by") == "train"
    chosen = "some train images," if by_train else "validation"
    loss = [line("loss", "train loss"), line("val_loss", f"{chosen} loss")]
    accuracy = [line("train_top1", "train top-1"), line("val_top1", f"{chosen} top-1")]
    rate = [line("lr", "learning rate")]
    charts_made = [
        charts.curves(
            [c for c in some if c.points], title=title, x_name="step", y_name=unit, counts=True
        )
        for some, title, unit in (
            (loss, "Loss during training", "loss"),
            (accuracy, "Accuracy during training", "top-1 %"),
            (rate, "Learning rate", "learning rate"),
        )
    ]
    shown = [chart for chart in charts_made if chart]
    return {"charts": shown} if shown else None


def classes(record: Record) -> Context | None:
    """The classes that gained and lost most."""
    names, dense, slim = (record.classes.get(key) for key in ("names", "dense", "slim"))
    if not (isinstance(names, list) and isinstance(dense, list) and isinstance(slim, list)):
        return None
    rows: list[Context] = []
    for name, old, new in zip(names, dense, slim, strict=False):
        before, after = number(old), number(new)
        if before is not None and after is not None:
            change = after - before
            rows.append({"name": str(name), "dense": before, "slim": after, "change": change})
    rows.sort(key=lambda row: row["change"])
    lost = [row for row in rows[:MOST_CLASSES] if row["change"] < 0]
    gained = [row for row in rows[-MOST_CLASSES:] if row["change"] > 0]
    return {"lost": lost, "gained": gained[::-1], "count": len(rows)} if rows else None


def _row(name: str, dense: str, slim: str, ratio: str) -> Context:
    return {"name": name, "dense": dense or "not known", "slim": slim, "ratio": ratio}


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} %"


def _bytes(value: int | None) -> str:
    return "" if value is None else f"{console.quantity(value)}B"


def _speed(ratio: float) -> str:
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def _general(value: Any) -> str:
    found = number(value)
    return "not measured" if found is None else f"{found:.4g}"
