"""`dcptool run` on a recipe with a section [sweep]: every point of it, and one table."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcptool import console
from dcptool.cli import app
from dcptool.errors import Interrupted

if TYPE_CHECKING:
    from dcptool.pipeline.recipe import Recipe
    from dcptool.pipeline.study import Measured, Point


def check(recipe: Recipe) -> list[tuple[Point, dict[str, dict[str, Any]]]]:
    """Every point of a study with the options of its steps; raises what the commands would."""
    from dcptool.cli import run_command
    from dcptool.pipeline import study

    points = study.points_of(recipe)
    return [(point, run_command.check(study.recipe_at(recipe, point))) for point in points]


def dry_run(recipe: Recipe, runs: Path, *, as_json: bool) -> None:
    """Tell what every point would cost; a step that points share is counted once."""
    from dcptool.pipeline import estimate, study

    checked = check(recipe)
    speeds: dict[str, estimate.Speed] = {}
    documents, seen = [], set()
    for point, params in checked:
        document = estimate.estimate(study.recipe_at(recipe, point), params, speeds)
        for row in document["steps"]:
            # Points differ from each other in and after what they vary, mostly the pruning.
            shared = row["name"] in ("analyze", "baseline")
            again = shared and repr(sorted(params[row["name"]].items(), key=str)) in seen
            row["seconds"] = 0.0 if again else row["seconds"]
            seen.add(repr(sorted(params[row["name"]].items(), key=str)))
        known = [row["seconds"] for row in document["steps"]]
        whole = None if None in known else round(sum(known), 1)
        documents.append({"name": point.name, **document, "seconds": whole})
    total = [one["seconds"] for one in documents]
    summary = {
        "recipe": recipe.name,
        "dry_run": True,
        "points": documents,
        "bytes": sum(one["bytes"] for one in documents),
        "seconds": None if None in total else round(sum(total), 1),
    }
    rows = [
        [
            one["name"],
            " ".join(row["name"] for row in one["steps"]),
            f"{one['bytes'] / 1e6:.1f} MB",
            "?" if one["seconds"] is None else console.clock(one["seconds"]),
        ]
        for one in documents
    ]
    missing = sorted({one["data_missing"] for one in documents if one["data_missing"]})
    clock = "unknown" if summary["seconds"] is None else console.clock(summary["seconds"])
    lines = [
        console.table(["point", "steps", "disk", "about"], rows, align="<<>>"),
        "",
        *(f"no images: {why}" for why in missing),
        f"in all: {len(rows)} points, {summary['bytes'] / 1e6:.1f} MB in "
        f"{runs / recipe.name}, about {clock}",
    ]
    app.emit("run", summary, "\n".join(lines), as_json=as_json)


def run(
    recipe: Recipe,
    runs: Path,
    words: Sequence[str],
    *,
    resume: bool,
    common: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run all points in a folder of the recipe's name and print their table."""
    from dcptool import files
    from dcptool.pipeline import study

    check(recipe)
    folder = runs / recipe.name
    files.make_folder(folder)
    again = shlex.join([*words, "--resume"])
    points = study.points_of(recipe)

    try:
        measured = study.run_study(
            recipe,
            points,
            folder,
            invoke=app.invoke,
            resume=resume,
            again=again,
            common=common,
        )
    except KeyboardInterrupt as err:
        raise Interrupted(getattr(err, "number", signal.SIGINT), try_=again) from err
    document: dict[str, object] = {
        "recipe": recipe.name,
        "run": str(folder),
        "points": [{**one.plain(), "document": one.document} for one in measured],
        "gates": [],
    }
    failure = study.failure_of(measured)
    app.emit("run", document, _text(measured, folder), as_json=as_json, failure=failure)


def _text(measured: Sequence[Measured], folder: Path) -> str:
    rows = [
        [
            one.point.name,
            "-" if one.accuracy is None else f"{one.accuracy:.2f} %",
            "-" if one.params is None else f"{one.params:,.0f}",
            "-" if one.macs is None else f"{one.macs:,.0f}",
            "-" if one.latency_ms is None else f"{one.latency_ms:.2f} ms",
        ]
        for one in measured
    ]
    headers = ["point", "top-1", "params", "MACs", "latency"]
    return f"{console.table(headers, rows, align='<>>>>')}\n\n{folder}"
