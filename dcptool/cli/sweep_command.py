"""`dcptool sweep`: one network at several settings, and the trade-off between them."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcptool import console
from dcptool.cli import app
from dcptool.cli.options import output_options, runs_option
from dcptool.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from dcptool.pipeline.recipe import Recipe
    from dcptool.pipeline.study import Measured

EXAMPLE = "dcptool sweep resnet50 --over prune.target_macs=0.3,0.5,0.7"
# Steps of a point, where no recipe is named.
PLAIN = """# Points of a trade-off.
[model]
name = "resnet50"
[prune]
[export]
[bench]
batch_size = [1]
"""
SHORT = re.compile(r"[^A-Za-z0-9._-]+")
FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@click.command("sweep")
@click.argument("model", metavar="MODEL|RECIPE")
@click.option(
    "--over",
    multiple=True,
    required=True,
    metavar="SECTION.KEY=V1,V2,...",
    help="Values to try; of several keys every combination.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="A value for all points, e.g. data.data_dir=photos or finetune.epochs=2; repeatable.",
)
@click.option("--name", metavar="NAME", help="Folder below runs/.  [default: MODEL-sweep]")
@runs_option
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    over: tuple[str, ...],
    changes: tuple[str, ...],
    name: str | None,
    runs_dir: Path | None,
    as_json: bool,
) -> None:
    """Prune MODEL at several settings, time each, and show which are worth having.

    Every point is a run of its own below runs/NAME: pruned, fine-tuned where [finetune] is set,
    exported and timed. What is done is not done again: the same line goes on with a sweep that
    was stopped, or adds values to one that is there. A recipe instead of MODEL gives all its steps.

    \b
        dcptool sweep resnet50 --over prune.target_macs=0.3,0.5,0.7
        dcptool sweep zoo:resnet20 --over prune.rate=0.3,0.5 --set finetune.steps=50
    """
    from dcptool import files
    from dcptool.cli.run_command import check, common_words
    from dcptool.pipeline import rundir, study

    points = study.points_over(_values(over))
    base = _base(model, over, changes, name)
    for point in points:
        check(study.recipe_at(base, point))
    folder = rundir.runs_folder(runs_dir) / base.name
    files.make_folder(folder)
    again = shlex.join(["dcptool", "sweep", *_typed(ctx)])

    def keep(measured: Sequence[Measured]) -> None:
        _publish(folder, measured)

    try:
        measured = study.run_study(
            base,
            points,
            folder,
            invoke=app.invoke,
            again=again,
            common=common_words(ctx),
            after=keep,
        )
    except KeyboardInterrupt as err:
        raise Interrupted(getattr(err, "number", signal.SIGINT), try_=again) from err
    best = {one.point.name for one in _front(measured)}
    document: dict[str, object] = {
        "run": str(folder),
        "points": [{**one.plain(), "pareto": one.point.name in best} for one in measured],
        "gates": [],
    }
    text = _text(measured, best, folder)
    app.emit("sweep", document, text, as_json=as_json, failure=study.failure_of(measured))


def _typed(ctx: click.Context) -> list[str]:
    words = [str(ctx.params["model"])]
    words += [word for text in ctx.params["over"] for word in ("--over", text)]
    words += [word for text in ctx.params["changes"] for word in ("--set", text)]
    words += ["--name", ctx.params["name"]] if ctx.params["name"] else []
    return words


def _base(model: str, over: Sequence[str], changes: Sequence[str], name: str | None) -> Recipe:
    """The recipe behind a sweep: one that is named, or a plain one for a model."""
    from dcptool.cli import sections
    from dcptool.pipeline import recipe as recipes

    schema = sections.schema()
    if model in recipes.shipped() or model.endswith(".toml"):
        base = recipes.read(model, schema, changes)
    else:
        # A first value of each key makes the recipe whole; every point has its own.
        first = [text.split(",")[0] for text in over]
        name_of = f"model.name={json.dumps(model)}"
        base = recipes.changed(SHORT.sub("-", model), PLAIN, schema, [name_of, *changes, *first])
    wanted = name or f"{base.name}-sweep"
    if not FOLDER.fullmatch(wanted):
        raise UsageError(f"{wanted!r} is no name for a folder", try_="--name my-sweep")
    return replace(base, name=wanted)


def _values(over: Sequence[str]) -> dict[str, list[object]]:
    """The values of each key, as a recipe would read them."""
    from dcptool.pipeline import recipe as recipes

    found: dict[str, list[object]] = {}
    for text in over:
        key, sign, values = text.partition("=")
        if not sign or not values:
            raise UsageError(f"--over {text!r} is no SECTION.KEY=V1,V2", try_=EXAMPLE)
        found[key] = [recipes.value_of(f"{key}={one}") for one in values.split(",")]
    return found


def _front(measured: Sequence[Measured]) -> list[Measured]:
    """Points that no other beats in cost and accuracy; cost is time where it was measured."""
    known = [one for one in measured if one.accuracy is not None and _cost(one) is not None]
    return [
        one
        for one in known
        if not any(
            (_cost(other) or 0) <= (_cost(one) or 0)
            and (other.accuracy or 0) >= (one.accuracy or 0)
            and ((_cost(other), other.accuracy) != (_cost(one), one.accuracy))
            for other in known
        )
    ]


def _cost(one: Measured) -> float | None:
    return one.latency_ms if one.latency_ms is not None else one.macs


def _publish(folder: Path, measured: Sequence[Measured]) -> None:
    """The points so far as CSV and as a picture."""
    import csv
    import io

    from dcptool import files
    from dcptool.report import charts

    best = {one.point.name for one in _front(measured)}
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    keys = ("top1", "dense_top1", "macs", "params", "latency_ms", "speedup")
    writer.writerow(["point", *keys, "pareto"])
    for one in measured:
        cells = ["" if one.figures[key] is None else one.figures[key] for key in keys]
        writer.writerow([one.point.name, *cells, int(one.point.name in best)])
    files.publish(folder / "sweep.csv", stream.getvalue().encode())
    dots = [
        (float(_cost(one) or 0), float(one.accuracy), one.point.name)
        for one in measured
        if one.accuracy is not None and _cost(one) is not None
    ]
    if dots:
        timed = any(one.latency_ms is not None for one in measured)
        front = sorted((x, y) for x, y, name in dots if name in best)
        picture = charts.points(
            dots,
            front,
            title="What each point costs and keeps",
            x_name="milliseconds" if timed else "MACs",
            y_name="top-1, %",
        )
        files.publish(folder / "sweep.svg", charts.standalone(picture))


def _text(measured: Sequence[Measured], best: set[str], folder: Path) -> str:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    rows: list[list[str]] = []
    first: dict[str, Any] = dict(measured[0].figures) if measured else {}
    if first.get("dense_macs"):
        params, macs = first["dense_params"], first["dense_macs"]
        top1 = cell(first["dense_top1"], "{:.2f} %")
        rows.append(["dense", top1, f"{macs:,.0f}", f"{params:,.0f}", "", "", ""])
    for one in measured:
        rows.append(
            [
                one.point.name,
                cell(one.accuracy, "{:.2f} %"),
                cell(one.macs, "{:,.0f}"),
                cell(one.params, "{:,.0f}"),
                cell(one.latency_ms, "{:.2f} ms"),
                cell(one.figures["speedup"], "{:.2f}x"),
                "best" if one.point.name in best else "",
            ]
        )
    headers = ["point", "top-1", "MACs", "params", "latency", "faster", "Pareto"]
    table = console.table(headers, rows, align="<>>>>><")
    return f"{table}\n\n{folder / 'sweep.csv'}, {folder / 'sweep.svg'}"
