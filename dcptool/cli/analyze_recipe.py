"""`dcptool analyze --recipe`: what the points of a recipe cost, beside what the paper says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcptool import console
from dcptool.cli import app

if TYPE_CHECKING:
    from dcptool.pipeline.complexity import Costed
    from dcptool.pipeline.recipe import Recipe
    from dcptool.pipeline.study import Point

Costs = list[tuple["Point", "Costed", "Mapping[str, int] | None"]]


def show(name: str, plot: Path | None, *, as_json: bool) -> None:
    """Print the complexity of a recipe, and the structure of the network where it tells one."""
    from dcptool.cli import sections
    from dcptool.pipeline import complexity, recipe
    from dcptool.report import paper_table, structure_table

    found = recipe.read(name, sections.schema())
    costs = costs_of(found)
    table = complexity.table(found, costs)
    document: dict[str, object] = {
        "recipe": found.name,
        "model": str(found.get("model", "name")),
        "points": [
            {"name": entry.name, **entry.ours, "quoted": recipe.plain(entry.quoted)}
            for entry in table.entries
        ],
    }
    text = paper_table.text(table)
    paper = found.sections.get("paper", {})
    if "structure" in paper:
        layers = complexity.structure(paper, costs[0][1], None)
        document["structure"] = [vars(layer) for layer in layers]
        title = f"{document['model']}: input channels of each layer"
        text += "\n\n" + structure_table.text(title, layers)
        if plot is not None:
            structure_table.draw(title, layers, plot)
    elif plot is not None:
        paper_table.draw(table, plot)
    if plot is not None:
        console.note(f"plot written to {plot}")
    app.emit("analyze", document, text, as_json=as_json)


def costs_of(recipe: Recipe) -> Costs:
    """Every point of a recipe with its network and the units that it would keep."""
    from dcptool.cli import run_command, study_run
    from dcptool.network.artifact import open_target
    from dcptool.pipeline.complexity import Costed, kept_of
    from dcptool.pipeline.study import Point, recipe_at

    checked = study_run.check(recipe)
    if not recipe.has("sweep"):
        column = recipe.get("paper", "column") or recipe.name
        checked = [(Point(str(column)), run_command.check(recipe))]
    networks: dict[str, Costed] = {}
    found: Costs = []
    for point, steps in checked:
        name = str(recipe_at(recipe, point).get("model", "name"))
        pruning = steps.get("prune")
        first = next(iter(steps.values()))
        classes, size = first.get("num_classes"), first.get("img_size")
        known = f"{name} {classes} {size}"
        if known not in networks:
            network = open_target(
                name, pretrained=False, num_classes=classes, img_size=size, offline=True
            )
            networks[known] = Costed.of(network, recipe.sections.get("paper", {}))
        costed = networks[known]
        kept = None if pruning is None else kept_of(costed.graph, _selection(pruning))
        found.append((point, costed, kept))
    return found


def _selection(params: dict[str, Any]) -> Any:
    from dcptool.cli.sections import declared
    from dcptool.cli.selection_options import selection_options, settings_of

    given = {str(param.name): params[str(param.name)] for param in declared(selection_options)}
    return settings_of(given, params["seed"], training=not params["no_training"])
