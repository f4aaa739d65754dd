"""A study: one recipe run at several points, each in a folder of its own, measured alike.

Owns the points, the loop over them and the figures taken from each; `run` does the work, so that
a step with the same inputs is done once for all points and a study that was stopped goes on where
it was. Tables and pictures of a study are the report's; how many runs fit a machine is nobody's.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from dcptool import console
from dcptool.errors import DcptoolError, GateFailed, InputError, Interrupted, UsageError
from dcptool.pipeline import recipe as recipes
from dcptool.pipeline import run
from dcptool.pipeline.recipe import Recipe, plain
from dcptool.pipeline.run import Invoke
from dcptool.report.record import evaluated

MOST_POINTS = 1000


@dataclass(frozen=True)
class Point:
    """One variant of a recipe: values laid over it by `section.key`, and keys taken out of it.

    `place` tells where the point stands in a study of two axes: its row and its value.
    """

    name: str
    changes: Mapping[str, object] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    place: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Measured:
    """A point that was run: its folder, its figures by name, and the whole document of `run`."""

    point: Point
    run: Path
    figures: Mapping[str, float | None]
    document: Mapping[str, Any]
    failure: DcptoolError | None = None

    @property
    def accuracy(self) -> float | None:
        """Top-1 of what came out, in percent."""
        return self.figures["top1"]

    @property
    def params(self) -> float | None:
        """Parameters of what came out."""
        return self.figures["params"]

    @property
    def macs(self) -> float | None:
        """Multiply-accumulates of what came out, for one image."""
        return self.figures["macs"]

    @property
    def latency_ms(self) -> float | None:
        """Median latency of what came out, as the first row of [bench] measured it."""
        return self.figures["latency_ms"]

    def plain(self) -> dict[str, Any]:
        """The point as JSON, without the documents of its steps."""
        figures = {"test_error" if k == "error" else k: v for k, v in self.figures.items()}
        return {
            "name": self.point.name,
            "changes": {key: plain(value) for key, value in self.point.changes.items()},
            "run": str(self.run),
            **figures,
            "gates": list(self.document.get("gates", [])),
            "error": None if self.failure is None else self.failure.document(),
        }


def points_over(over: Mapping[str, Sequence[object]]) -> list[Point]:
    """Every combination of the values of some keys, named after the values."""
    faults = [f"{key} has no values" for key, values in over.items() if not values]
    faults += [f"{key} is no SECTION.KEY" for key in over if not all(key.partition("."))]
    if not over or faults:
        why = "\n".join(faults) or "no key is named"
        raise UsageError("there is nothing to vary", why=why, try_="prune.rate=0.3,0.5,0.7")
    found = []
    for values in itertools.product(*over.values()):
        changes = dict(zip(over, values, strict=True))
        many = len(changes) > 1
        words = [
            f"{k.partition('.')[2]} {shown(v)}" if many else shown(v) for k, v in changes.items()
        ]
        found.append(Point(", ".join(words), changes))
    return found


def points_of(recipe: Recipe) -> list[Point]:
    """The points that the section [sweep] of a recipe asks for; none without one.

    `rows` are variants with a name, `over` and `values` vary one key; both together make a grid.
    `names` calls some values otherwise, and `only` takes some points out of all.
    """
    table = recipe.sections.get("sweep")
    if table is None:
        return []
    found = _points(table)
    only = table.get("only")
    if only is None:
        return found
    known = [point.name for point in found]
    wrong = [name for name in only if name not in known]
    if wrong:
        raise UsageError(
            f"{recipe.name} has no point {wrong[0]!r}", why=f"it has {', '.join(known)}"
        )
    return [point for point in found if point.name in only]


def _points(table: Mapping[str, Any]) -> list[Point]:
    rows = [
        Point(str(row["name"]), dict(row.get("set", {})), tuple(row.get("without", ())))
        for row in table.get("rows", [])
    ]
    if "over" not in table:
        return rows
    names = table.get("names", {})
    each = [
        Point(names.get(shown(value), shown(value)), {str(table["over"]): value})
        for value in table["values"]
    ]
    if not rows:
        return each
    return [
        Point(
            f"{row.name}, {one.name}",
            {**row.changes, **one.changes},
            row.without,
            (row.name, one.name),
        )
        for row in rows
        for one in each
    ]


def shown(value: object) -> str:
    """A value as it is called in names and tables."""
    if isinstance(value, float | Decimal) and math.isinf(value):
        return "inf"
    if isinstance(value, list):
        return ", ".join(shown(one) for one in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def recipe_at(base: Recipe, point: Point) -> Recipe:
    """The recipe of one point, checked like any other."""
    tables: dict[str, Any] = {
        key: dict(table) for key, table in base.sections.items() if key != "sweep"
    }
    for key in point.without:
        section, _, name = key.partition(".")
        if name:
            tables.get(section, {}).pop(name, None)
        else:
            tables.pop(section, None)
    for key, value in point.changes.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    text = f"{base.text.rstrip()}\n# This run is the point {point.name!r} of {base.name}.\n"
    where = f"{base.name} at {point.name}"
    return recipes.check(stem(point.name), text, tables, base.schema, where=where)


def stem(name: str) -> str:
    """The name of a point as the name of a folder."""
    plain_name = re.sub(r"[^A-Za-z0-9._]+", "-", name.replace("+", "-plus")).strip("-._")
    return plain_name[:100] or "point"


def run_study(
    base: Recipe,
    points: Sequence[Point],
    folder: Path,
    *,
    invoke: Invoke,
    resume: bool = True,
    again: str = "",
    common: tuple[str, ...] = (),
    after: Callable[[Sequence[Measured]], None] | None = None,
) -> list[Measured]:
    """Run `base` at every point, each in a run folder below `folder`, in the order given.

    What is done is not done again, and a run that was stopped goes on unless `resume` is off. A
    point that fails is kept with its error and stops nothing, unless nothing has been measured
    yet and it is no gate; `after` hears of all points so far.
    """
    known: set[str] = set()
    for point in points:
        if stem(point.name) in known:
            raise UsageError(f"two points of {base.name} are called {point.name!r}")
        known.add(stem(point.name))
    if len(points) > MOST_POINTS:
        raise UsageError(f"{len(points)} points are too many", why=f"at most {MOST_POINTS}")
    # All are checked before the first one costs anything.
    each = [(point, recipe_at(base, point)) for point in points]
    measured: list[Measured] = []
    for number, (point, one) in enumerate(each, 1):
        console.note(f"point {number} of {len(each)}: {point.name}")
        try:
            found = _run(
                point, one, folder, invoke=invoke, resume=resume, again=again, common=common
            )
        except (GateFailed, InputError, UsageError) as err:
            # What the very first point cannot use, the others hardly can.
            if not measured and not isinstance(err, GateFailed):
                err.message = f"{point.name}: {err.message}"
                raise
            console.warn(f"{point.name}: {err.message}")
            found = Measured(point, folder, figures({}), {}, err)
        measured.append(found)
        if after is not None:
            after(measured)
    return measured


def _run(
    point: Point,
    one: Recipe,
    folder: Path,
    *,
    invoke: Invoke,
    resume: bool,
    again: str,
    common: tuple[str, ...],
) -> Measured:
    try:
        document, failure = run.run(
            one,
            invoke=invoke,
            runs=folder,
            resume=resume,
            again=again,
            common=common,
            in_study=True,
        )
    except Interrupted as err:
        err.try_ = again or err.try_
        raise
    return Measured(point, Path(document["run"]), figures(document), document, failure)


def failure_of(measured: Sequence[Measured]) -> DcptoolError | None:
    """One error for all points that failed, of the kind of the first; or none."""
    failed = [(one.point.name, one.failure) for one in measured if one.failure is not None]
    if not failed:
        return None
    kind = type(failed[0][1])
    return kind(
        f"{len(failed)} of {len(measured)} points did not hold",
        why="\n".join(f"{name}: {err.why or err.message}" for name, err in failed),
        try_="other values for these points; what the others have done stays",
    )


def figures(document: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of a run by name: cost, accuracy and errors in percent, milliseconds."""
    steps = {step["name"]: step["document"] for step in document.get("steps", [])}
    pruned, tuned = steps.get("prune", {}), steps.get("finetune", {})
    dense, slim = pruned.get("dense") or {}, pruned.get("slim") or {}
    dense_top1, top1 = run.top1_of(steps)
    dense_top5 = dense.get("top5")
    measured = steps.get("evaluate", {})
    top5 = _first(
        evaluated(steps).get("top5"), (tuned.get("after") or {}).get("top5"), slim.get("top5")
    )
    train = measured.get("top1") if measured.get("split") == "train" else None
    bench = _bench(steps.get("bench", {}))
    return {
        "params": slim.get("params"),
        "macs": slim.get("macs"),
        "dense_params": dense.get("params"),
        "dense_macs": dense.get("macs"),
        "params_ratio": _ratio(dense.get("params"), slim.get("params")),
        "macs_ratio": _ratio(dense.get("macs"), slim.get("macs")),
        "top1": top1,
        "dense_top1": dense_top1,
        "pruned_top1": slim.get("top1"),
        "top5": top5,
        "error": _minus(100.0, top1),
        "dense_error": _minus(100.0, dense_top1),
        "error_gap": _minus(dense_top1, top1),
        "pruned_error": _minus(100.0, slim.get("top1")),
        "pruned_gap": _minus(dense_top1, slim.get("top1")),
        "train_error": _minus(100.0, train),
        "top5_error": _minus(100.0, top5),
        "top5_gap": _minus(dense_top5, top5),
        "verification": measured.get("verification"),
        **bench,
        "seconds": document.get("seconds"),
    }


def _bench(document: Mapping[str, Any]) -> dict[str, float | None]:
    """Median milliseconds and speedup of the first pair that was timed, in torch too."""
    pair = next(iter(document.get("speedup", [])), None)
    name = pair["model"] if pair else None
    mine = [row for row in document.get("rows", []) if name in (None, row["model"])]
    torch = [row for row in document.get("torch", []) if name in (None, row["model"])]
    forward = torch[0]["forward_ms"] if torch else None
    backward = torch[0]["backward_ms"] if torch else None
    return {
        "latency_ms": mine[0]["p50_ms"] if mine else None,
        "speedup": pair["ratio"] if pair else None,
        "forward_ms": forward,
        "backward_ms": backward,
        "total_ms": None if forward is None or backward is None else forward + backward,
    }


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _ratio(dense: float | None, slim: float | None) -> float | None:
    return dense / slim if dense is not None and slim else None


def _minus(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else round(left - right, 4)
