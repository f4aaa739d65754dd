"""`dcptool analyze`: what a network consists of, what can be cut, and what a rate would leave."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from dcptool import console
from dcptool.cli import idle
from dcptool.cli.app import emit
from dcptool.cli.options import model_options, output_options


@click.command("analyze")
@click.argument("model", required=False, metavar="MODEL|ARTIFACT")
@click.option(
    "--recipe",
    metavar="NAME|FILE.toml",
    help="Instead of MODEL: params and MACs of every point of a recipe, beside the paper's.",
)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    metavar="R",
    help="Predict the cost at this pruning rate; repeatable.  [default: 0.3, 0.5, 0.7]",
)
@click.option(
    "--scope",
    type=click.Choice(["paper", "all"]),
    default="paper",
    show_default=True,
    help="Which groups the predictions cut: the paper's, or all that are not coupled.",
)
@click.option("--losses", type=click.IntRange(1, 16), help="Show where this many losses would go.")
@click.option(
    "--prune-residual", is_flag=True, help="For --emit-plan: open groups coupled by residual adds."
)
@click.option(
    "--emit-plan",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a plan (JSON) to edit and give to `prune --plan`.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw MACs and params of each layer, dense and at each rate (.png or .svg).",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@model_options
@output_options
def command(
    model: str | None,
    recipe: str | None,
    rates: tuple[str, ...],
    scope: str,
    losses: int | None,
    prune_residual: bool,
    emit_plan: Path | None,
    plot: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show every conv and linear layer of MODEL, which channels live and die together, what is
    locked and why, and the cost at each rate.

    MODEL is a name (resnet50, timm:..., torchvision:..., zoo:...) or an artifact folder. Weights
    are never fetched. MACs are multiply-accumulates of conv and linear layers, for one image.
    """
    from dcptool import files
    from dcptool.errors import UsageError

    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise UsageError(f"cannot draw {plot}", why="a plot is a .png or .svg file")
    for path in (emit_plan, plot):
        if path is not None:
            files.require_new(path, force=force)

    if recipe is not None:
        from dcptool.cli import analyze_recipe

        given = [name for name, value in (("MODEL", model), ("--emit-plan", emit_plan)) if value]
        if given:
            raise UsageError(f"{given[0]} and --recipe exclude each other")
        own = ("rates", "scope", "losses", "prune_residual", *options)
        idle.refuse(own, "beside --recipe, which says it", "a recipe of your own, or MODEL")
        analyze_recipe.show(recipe, plot, as_json=as_json)
        return
    if model is None:
        raise UsageError(
            "MODEL is missing",
            why="a name, an artifact folder or --recipe NAME says what to look at",
            try_="dcptool analyze resnet50",
        )

    from dcptool.deploy.granularity import auto
    from dcptool.network.artifact import open_target
    from dcptool.pipeline.analysis import analyze, plan_document
    from dcptool.selection.budget import parse_rate

    rates = rates or ("0.3", "0.5", "0.7")
    for rate in rates:
        parse_rate(rate)
    options["pretrained"] = False
    network = open_target(model, **options)
    analysis = analyze(network, rates=rates, scope=scope, losses=losses, round_to=auto())
    if emit_plan is not None:
        plan = plan_document(analysis, rate=rates[0], scope=scope, prune_residual=prune_residual)
        files.publish_json(emit_plan, plan)
        console.note(f"plan written to {emit_plan}; then: dcptool prune {model} --plan {emit_plan}")
    if plot is not None:
        from dcptool.report.plots import draw_cost

        draw_cost(network, analysis.graph, rates, scope, plot)
        console.note(f"plot written to {plot}")
    emit("analyze", analysis.document, _text(analysis.document), as_json=as_json)


def _text(document: dict[str, Any]) -> str:
    dense = document["dense"]
    groups = {group["name"]: group for group in document["groups"]}
    rows = []
    for layer in document["layers"]:
        share = 100 * layer["macs"] / max(dense["macs"], 1)
        group = groups.get(layer["group"] or "")
        rows.append(
            [
                layer["name"],
                layer["kind"],
                str(layer["in"]),
                str(layer["out"]),
                f"{layer['params']:,}",
                console.quantity(layer["macs"]),
                f"{share:.1f}",
                _verdict(group, layer["name"]),
            ]
        )
    headers = ["layer", "kind", "in", "out", "params", "MACs", "%", "output channels"]
    # Reasons are cut only where a terminal would wrap them; files and pipes get them whole.
    width = max(shutil.get_terminal_size().columns, 80) if sys.stdout.isatty() else None
    size = "x".join(str(n) for n in document["input_size"])
    counts = [f"{sum(g['status'] == s for g in groups.values())} {s}" for s in _STATUSES]
    lines = [
        console.table(headers, rows, align="<<>>>>><", width=width),
        "",
        f"{document['model']} at {size}: {dense['params']:,} params, {dense['macs']:,} MACs "
        "(conv + linear, one image)",
        f"groups: {', '.join(counts)}",
        f"losses would go after: {', '.join(document['pivots']) or 'nowhere'}",
        f"not counted: {', '.join(document['uncounted']) or 'nothing'}",
        "",
        _predictions(document),
    ]
    if all(g["status"] != "prunable" for g in groups.values()):
        lines += ["", _what_opens(groups.values())]
    return "\n".join(lines)


_STATUSES = ("prunable", "coupled", "outside", "locked")


def _verdict(group: dict[str, Any] | None, name: str) -> str:
    if group is None:
        return "carried with its input"
    if group["status"] == "prunable":
        mine = name in group["producers"]
        text = "prunable" if mine else f"carried with {group['name']}"
        units = group["units"]
        return text if units == group["channels"] else f"{text}, {units} units"
    if group["status"] == "coupled" and name != group["name"]:
        return f"coupled with {group['name']}"
    words = {"coupled": "coupled: ", "outside": "outside: ", "locked": "locked: "}
    return f"{words[group['status']]}{group['reason']}"


def _predictions(document: dict[str, Any]) -> str:
    dense = document["dense"]
    rows = [["dense", "", "", f"{dense['params']:,}", "", f"{dense['macs']:,}", ""]]
    for entry in document["rates"]:
        rows.append(
            [
                f"rate {entry['rate']:g}",
                "with --prune-residual" if entry["prune_residual"] else "",
                "exact" if entry["round_to"] == 1 else f"multiples of {entry['round_to']}",
                f"{entry['params']:,}",
                f"{dense['params'] / entry['params']:.2f}x",
                f"{entry['macs']:,}",
                f"{dense['macs'] / max(entry['macs'], 1):.2f}x",
            ]
        )
    headers = ["", "", "widths", "params", "smaller", "MACs", "fewer"]
    return console.table(headers, rows, align="<<<>>>>")


def _what_opens(groups: Any) -> str:
    statuses = {group["status"] for group in groups}
    if "outside" in statuses:
        return "nothing is prunable as it is; --scope all opens the groups marked outside"
    if "coupled" in statuses:
        return "nothing is prunable as it is; --prune-residual opens the coupled groups"
    return "nothing can be pruned: every group is locked, for the reasons above"
