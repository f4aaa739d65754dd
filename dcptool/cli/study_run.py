"""`dcptool run` on a recipe with a section [sweep]: every point of it, and one table."""

from __future__ import annotations

import copy
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
    known: dict[str, dict[str, Any]] = {}
    documents, seen = [], set()
    for point, params in checked:
        one = study.recipe_at(recipe, point)
        # What costs no other time and room need not be worked out again.
        alike = repr([one.get("model", "name"), one.get("prune", "rate"), _lengths(params)])
        if alike not in known:
            known[alike] = estimate.estimate(one, params, speeds)
        document = copy.deepcopy(known[alike])
        for row in document["steps"]:
            # Points differ from each other in and after what they vary, mostly the pruning.
            shared = row["name"] in ("analyze", "baseline")
            again = shared and repr(sorted(params[row["name"]].items(), key=str)) in seen
            row["seconds"] = 0.0 if again else row["seconds"]
            seen.add(repr(sorted(params[row["name"]].items(), key=str)))
        costs = [row["seconds"] for row in document["steps"]]
        whole = None if None in costs else round(sum(costs), 1)
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


def _lengths(params: dict[str, dict[str, Any]]) -> list[Any]:
    """What the cost of a point depends on."""
    keys = ("epochs", "steps", "batch_size", "samples", "losses", "stage_epochs", "stage_steps")
    return [(name, [step.get(key) for key in keys]) for name, step in params.items()]


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
    from dcptool.report import paper_table

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
            after=lambda so_far: write(recipe, points, so_far, folder),
        )
    except KeyboardInterrupt as err:
        raise Interrupted(getattr(err, "number", signal.SIGINT), try_=again) from err
    document: dict[str, object] = {
        "recipe": recipe.name,
        "run": str(folder),
        "table": str(folder / "table.md"),
        "points": [{**one.plain(), "document": one.document} for one in measured],
        "gates": [],
    }
    text = f"{paper_table.text(table_of(recipe, points, measured))}\n\n{folder}/table.md"
    app.emit("run", document, text, as_json=as_json, failure=study.failure_of(measured))


def table_of(recipe: Recipe, points: Sequence[Point], measured: Sequence[Measured]) -> Any:
    """The table that a recipe follows, or a plain one, with all points and all quoted figures."""
    from dcptool.report.paper_table import Entry, Table

    paper = recipe.sections.get("paper", {})
    quoted = paper.get("quoted", {})
    known = {one.point.name: one for one in measured}
    entries = [
        Entry(
            point.name,
            known[point.name].figures if point.name in known else {},
            quoted.get(point.name, {}),
            point.place,
        )
        for point in points
    ]
    shown = {entry.name for entry in entries}
    if not recipe.get("sweep", "only"):
        entries += [
            Entry(name, {}, figures, _place(name))
            for name, figures in quoted.items()
            if name not in shown
        ]
    notes = [_baseline(paper, measured)] if measured else []
    notes += [str(paper["note"])] if "note" in paper else []
    measures = paper.get("measures", ["top1", "params", "macs", "latency_ms"])
    title = str(paper.get("table", recipe.name))
    return Table(title, measures, entries, paper.get("layout", "down"), [n for n in notes if n])


def _place(name: str) -> tuple[str, str]:
    series, _, value = name.partition(", ")
    return series, value


def _baseline(paper: Any, measured: Sequence[Measured]) -> str:
    ours = next((one.figures.get("dense_error") for one in measured if one.figures), None)
    theirs = paper.get("baseline", {}).get("error")
    parts = [f"{ours:.2f} % ours"] if ours is not None else []
    parts += [f"{theirs} % quoted"] if theirs is not None else []
    return f"Error of the dense network: {', '.join(parts)}." if parts else ""


def conditions(recipe: Recipe, measured: Sequence[Measured]) -> list[str]:
    """What the figures were made under, as lines."""
    from dcptool.pipeline.recipe import plain

    skipped = ("sweep", "paper", "gates")
    lines = []
    for section, table in recipe.sections.items():
        if section in skipped:
            continue
        # Where files lie on one machine means nothing on another.
        words = [
            f"{k} = {Path(str(v)).name if '/' in str(v) else plain(v)}" for k, v in table.items()
        ]
        lines.append(f"[{section}] {', '.join(words)}" if words else f"[{section}]")
    seconds = sum(one.figures.get("seconds") or 0 for one in measured)
    if seconds:
        lines.append(f"{len(measured)} points in {console.clock(seconds)}")
    return lines


def write(
    recipe: Recipe, points: Sequence[Point], measured: Sequence[Measured], folder: Path
) -> None:
    """The table of a study in its folder, and the structure that a point of it found."""
    from dcptool.cli import analyze_recipe
    from dcptool.pipeline import complexity
    from dcptool.report import paper_table, structure_table

    table = table_of(recipe, points, measured)
    paper_table.write(table, folder, conditions(recipe, measured))
    paper = recipe.sections.get("paper", {})
    if "structure" not in paper:
        return
    column = paper.get("column", points[0].name)
    found = next((one for one in measured if one.point.name == column), None)
    steps = found.document.get("steps", []) if found is not None else []
    kept = next((s["document"]["kept"] for s in steps if s["name"] == "prune"), None)
    costed = analyze_recipe.costs_of(recipe)[0][1]
    layers = complexity.structure(paper, costed, kept)
    title = f"Input channels of each layer, {column}"
    structure_table.write(title, layers, folder)


def write_one(recipe: Recipe, document: dict[str, Any]) -> None:
    """The table of a recipe without a sweep, in its run folder: one column of the paper's."""
    from dcptool.pipeline.study import Measured, Point, figures

    point = Point(str(recipe.get("paper", "column") or recipe.name))
    folder = Path(document["run"])
    write(recipe, [point], [Measured(point, folder, figures(document), document)], folder)
