"""What the page says of time: both networks under each condition, single calls, time by layer.

Reads what `bench` left in a run; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcptool.report import charts
from dcptool.report.record import number, numbers, objects

Context = dict[str, Any]

WHERE = ("provider", "batch_size", "threads")
FIGURES = ("ratio", "low", "high", "macs_ratio", "efficiency")
# The slowest calls are what the machine did meanwhile; they would flatten all else.
MOST_MEDIANS = 3


def pairs(bench: Mapping[str, Any]) -> list[Context]:
    """Median milliseconds of both networks under each condition."""

    def name(row: Mapping[str, Any], model: str) -> tuple[str, ...]:
        return tuple(str(row.get(key)) for key in (model, *WHERE))

    times = {name(row, "model"): number(row.get("p50_ms")) for row in objects(bench.get("rows"))}
    found = []
    for entry in objects(bench.get("speedup")):
        before, after = times.get(name(entry, "baseline")), times.get(name(entry, "model"))
        if before is None or after is None or not number(entry.get("ratio")):
            continue
        figures = {key: number(entry.get(key)) for key in FIGURES}
        model = entry.get("model")
        where = condition(entry) if model == "slim" else f"{condition(entry)}, {model}"
        found.append({"before": before, "after": after, "condition": where, **figures})
    return found


def condition(entry: Mapping[str, Any]) -> str:
    """Where something was timed: provider, batch, threads."""
    threads = entry.get("threads")
    unit = "thread" if threads == 1 else "threads"
    return f"{entry.get('provider')}, batch {entry.get('batch_size')}, {threads} {unit}"


def machine(bench: Mapping[str, Any]) -> str:
    """What was measured on, in one line."""
    facts = bench.get("machine")
    if not isinstance(facts, dict):
        return ""
    words = [str(facts.get("cpu", "")), f"{facts.get('cores', '?')} cores"]
    words.append(f"onnxruntime {facts.get('onnxruntime', '?')}")
    load = number(facts.get("load"))
    return ", ".join([*words, f"load {load:.1f}"] if load is not None else words)


def section(bench: Mapping[str, Any]) -> Context | None:
    """Distributions, the per-layer table, and how much of the saved MACs became time."""
    if not objects(bench.get("rows")):
        return None
    return {
        "pairs": pairs(bench),
        "charts": _distributions(bench),
        "profile": _profile(bench),
        "machine": machine(bench),
    }


def _distributions(bench: Mapping[str, Any]) -> list[Context]:
    """Share of calls that took no longer than so many milliseconds, by condition."""
    found: dict[str, dict[str, list[float]]] = {}
    for entry in objects(bench.get("distribution")):
        times = numbers(entry.get("quantiles_ms"))
        if len(times) > 1:
            found.setdefault(condition(entry), {})[str(entry.get("model"))] = times
    return [_distribution(name, models) for name, models in found.items()]


def _distribution(name: str, models: Mapping[str, Sequence[float]]) -> Context:
    limit = MOST_MEDIANS * max(_median(times) for times in models.values())
    lines, beyond = [], []
    for model, times in models.items():
        shares = [(ms, 100 * i / (len(times) - 1)) for i, ms in enumerate(times)]
        shown = [point for point in shares if point[0] <= limit]
        tip = f"{model}: median {_median(times):.2f} ms"
        lines.append(charts.Curve(model, shown, None, tip, role=model))
        if len(shown) < len(shares):
            beyond.append(f"{100 - shown[-1][1]:.0f} % of {model}" if shown else f"all of {model}")
    chart = charts.curves(
        lines,
        title=f"Latency of single calls, {name}",
        x_name="milliseconds",
        y_name="calls, %",
        height=220,
        y_limits=(0.0, 100.0),
    )
    slower = f"; slower than {limit:.3g} ms: {', '.join(beyond)}" if beyond else ""
    return {"name": name + slower, "chart": chart}


def _median(times: Sequence[float]) -> float:
    return times[len(times) // 2]


def _profile(bench: Mapping[str, Any]) -> Context | None:
    rows = [row for row in objects(bench.get("profile")) if isinstance(row.get("ms"), dict)]
    if not rows:
        return None
    models = [str(model) for model in rows[0]["ms"]]
    table = []
    for row in rows:
        times = [number(row["ms"].get(model)) for model in models]
        table.append({"layer": row.get("layer"), "kind": row.get("kind"), **_saved(times)})
    columns = zip(*(row["ms"] for row in table), strict=True)
    return {
        "models": models,
        "rows": table,
        "total": _saved([sum(ms or 0.0 for ms in column) for column in columns]),
        "two": len(models) == 2,
        # Layers are timed under the first condition alone.
        "condition": condition(objects(bench.get("rows"))[0]),
    }


def _saved(times: list[float | None] | list[float]) -> Context:
    """Times of the models, and what the second saves against the first."""
    saved = (times[0] or 0.0) - (times[1] or 0.0) if len(times) == 2 else None
    return {"ms": times, "saved": saved}
