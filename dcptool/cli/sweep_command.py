"""`dcptool sweep`: one network at several settings, and the trade-off between them."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcptool import console
from dcptool.cli import app
from dcptool.cli.options import output_options, runs_option
from dcptool.errors import EnvironmentFault, Interrupted, UsageError

if TYPE_CHECKING:
    from dcptool.pipeline.recipe import Recipe
    from dcptool.pipeline.study import Measured, Point

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
TABLE = "sweep.csv"
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
    was stopped, and with further values it adds them. A recipe instead of MODEL gives its steps.

    \b
        dcptool sweep resnet50 --over prune.target_macs=0.3,0.5,0.7
        dcptool sweep zoo:resnet20 --over prune.rate=0.3,0.5 --set finetune.steps=50
    """
    from dcptool import files
    from dcptool.cli.run_command import check, common_words
    from dcptool.pipeline import rundir, study

    points = study.points_over(_values(model, over))
    base = _base(model, over, changes, name)
    each = [study.recipe_at(base, point) for point in points]
    named = [replace(one, name=f"{base.name} at {one.name}") for one in each]
    checked = [check(one) for one in named]
    _check_reach(ctx, points, each, checked)
    folder = rundir.runs_folder(runs_dir) / base.name
    try:
        files.make_folder(folder)
    except EnvironmentFault as err:
        err.try_ = f"the same command with --runs-dir DIR, or DCPTOOL_RUNS=DIR; {err.try_}"
        raise
    again = shlex.join(["dcptool", "sweep", *_typed(ctx)])
    _check_table(folder, points)

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
    newest = next((one for one in reversed(measured) if one.failure is None), None)
    link = newest.run.parent / rundir.LATEST if newest is not None else None
    if link is not None and link.is_symlink():
        # The newest of all runs is now one of these.
        files.point_link(folder.parent / rundir.LATEST, f"{folder.name}/{link.readlink()}")
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
    words += ["--runs-dir", str(ctx.params["runs_dir"])] if ctx.params["runs_dir"] else []
    return words


def _check_reach(
    ctx: click.Context,
    points: Sequence[Point],
    each: Sequence[Recipe],
    checked: Sequence[dict[str, dict[str, Any]]],
) -> None:
    """Refuse targets that no widths can meet, all at once, before the first point is run."""
    from dcptool.cli.run_command import selection_of

    targets = {f"target_{kind}" for kind in ("macs", "params", "latency")}
    pruning = [
        (point, str(one.get("model", "name")), steps["prune"])
        for point, one, steps in zip(points, each, checked, strict=True)
        if targets & one.sections.get("prune", {}).keys()
    ]
    if not pruning:
        return
    from dcptool.pipeline import reach

    asked = [
        reach.Asked(point.name, model, options, selection_of(options))
        for point, model, options in pruning
    ]
    wrong = reach.faults(asked)
    if wrong:
        raise UsageError(
            f"out of reach: {', '.join(wrong)}, of {len(points)} points",
            why="\n".join(f"{name}: {err.message}: {err.why}" for name, err in wrong.items()),
            try_=_within_reach(ctx, points, wrong),
        )


def _within_reach(
    ctx: click.Context, points: Sequence[Point], wrong: Mapping[str, UsageError]
) -> str:
    """The same command without the values that only points out of reach have."""
    over = []
    for text in ctx.params["over"]:
        key, _, _ = text.partition("=")
        good = {str(p.changes[key]): None for p in points if p.name not in wrong}
        if good:
            over.append(f"{key}={','.join(good)}")
    if over:
        ctx.params["over"] = tuple(over)
        return shlex.join(["dcptool", "sweep", *_typed(ctx)])
    # `prune` says which target there is, in words of its own.
    near = re.match(r"--(target-\w+) ([0-9.]+)", next(iter(wrong.values())).try_)
    if near is None:
        return EXAMPLE
    key = f"prune.{near[1].replace('-', '_')}"
    option = "--over" if any(text.startswith(f"{key}=") for text in ctx.params["over"]) else "--set"
    return f"the same command with {option} {key}={near[2]}"


def _check_table(folder: Path, points: Sequence[Point]) -> None:
    """Refuse to leave out points that the table of an earlier sweep has."""
    import csv

    path = folder / TABLE
    if not path.is_file():
        return
    with path.open(newline="") as stream:
        known = [row.get("point") or "" for row in csv.DictReader(stream)]
    missing = sorted(set(known) - {point.name for point in points} - {""})
    if missing:
        raise UsageError(
            f"{path} has points that this sweep leaves out: {'; '.join(missing[:5])}",
            why="it would be written anew without them",
            try_="their values in --over, too (what is done is not done again), or --name ANOTHER",
        )


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


def _values(model: str, over: Sequence[str]) -> dict[str, list[object]]:
    """The values of each key, as a recipe would read them."""
    from dcptool.cli import sections
    from dcptool.pipeline import recipe as recipes

    found: dict[str, list[object]] = {}
    for text in over:
        key, sign, values = text.partition("=")
        if not sign or not values:
            raise UsageError(f"--over {text!r} is no SECTION.KEY=V1,V2", try_=EXAMPLE)
        if "." not in key:
            having = [name for name, one in sections.schema().items() if key in one.keys]
            meant = text if having else "rate=0.3,0.5"
            section = "prune" if "prune" in having or not having else having[0]
            raise UsageError(
                f"--over {text} names no section",
                why="a key is SECTION.KEY, as in a recipe",
                try_=shlex.join(["dcptool", "sweep", model, "--over", f"{section}.{meant}"]),
            )
        found[key] = [
            recipes.value_of(f"{key}={one}", option="--over") for one in values.split(",")
        ]
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
    files.publish(folder / TABLE, stream.getvalue().encode())
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
            dense=_dense(measured, timed=timed),
        )
        files.publish(folder / "sweep.svg", charts.standalone(picture))


def _dense(measured: Sequence[Measured], *, timed: bool) -> list[tuple[float, float, str]]:
    """The network that all points were cut from, as one of them saw it."""
    for one in measured:
        top1, cost = one.figures["dense_top1"], one.figures["dense_macs"]
        if timed:
            cost = (one.latency_ms or 0.0) * (one.figures["speedup"] or 0.0)
        if cost and top1 is not None:
            return [(cost, top1, "dense")]
    return []


def _text(measured: Sequence[Measured], best: set[str], folder: Path) -> str:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    rows: list[list[str]] = []
    first = next((one.figures for one in measured if one.figures["dense_macs"]), None)
    if first is not None:
        params, macs = first["dense_params"], first["dense_macs"]
        top1 = cell(first["dense_top1"], "{:.2f} %")
        timed = next((one for one in measured if one.latency_ms and one.figures["speedup"]), None)
        took = ""
        if timed is not None:
            took = f"{(timed.latency_ms or 0) * (timed.figures['speedup'] or 0):.2f} ms"
        rows.append(["dense", top1, f"{macs:,.0f}", f"{params:,.0f}", took, "", ""])
    for one in measured:
        rows.append(
            [
                one.point.name,
                cell(one.accuracy, "{:.2f} %"),
                cell(one.macs, "{:,.0f}"),
                cell(one.params, "{:,.0f}"),
                cell(one.latency_ms, "{:.2f} ms"),
                cell(one.figures["speedup"], "{:.2f}x"),
                "failed" if one.failure else "best" if one.point.name in best else "",
            ]
        )
    headers = ["point", "top-1", "MACs", "params", "latency", "faster", "Pareto"]
    table = console.table(headers, rows, align="<>>>>><")
    return f"{table}\n\n{folder / TABLE}, {folder / 'sweep.svg'}"
