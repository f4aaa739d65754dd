"""`dcptool recipe`: what recipes there are, what they say, and whether one of yours is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dcptool import console
from dcptool.cli.app import emit
from dcptool.cli.options import reporting_options
from dcptool.cli.run_command import complete

argument = click.argument("name", metavar="NAME|FILE.toml", shell_complete=complete)


@click.group("recipe")
def command() -> None:
    """List, show, copy and check recipes.

    A recipe is a TOML file: its sections are commands, its keys are their options with
    underscores. `dcptool run NAME` does what it says.
    """


@command.command("list")
@reporting_options
def list_(as_json: bool) -> None:
    """Show the recipes that came with dcptool."""
    from dcptool.pipeline import recipe

    found = [
        {"name": name, "purpose": recipe.purpose(recipe.read_text(path)), "file": str(path)}
        for name, path in recipe.shipped().items()
    ]
    table = console.table(["recipe", "purpose"], [[one["name"], one["purpose"]] for one in found])
    emit("recipe", {"recipes": found}, f"{table}\n\nthen: dcptool run NAME", as_json=as_json)


@command.command("show")
@argument
@reporting_options
def show(name: str, as_json: bool) -> None:
    """Print a recipe."""
    from dcptool.pipeline import recipe

    path = recipe.find(name)
    text = recipe.read_text(path)
    emit("recipe", {"name": path.stem, "file": str(path), "text": text}, text, as_json=as_json)


@command.command("copy")
@argument
@click.argument("target", required=False, type=click.Path(path_type=Path), metavar="[FILE.toml]")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@reporting_options
def copy(name: str, target: Path | None, force: bool, as_json: bool) -> None:
    """Write a recipe into a file of your own, to be changed."""
    from dcptool import files
    from dcptool.pipeline import recipe

    path = recipe.find(name)
    place = target or Path(path.name)
    if place.is_dir():
        place /= path.name
    other = f"dcptool recipe copy {name} OTHER.toml"
    files.require_new(place, force=force, instead=other)
    files.publish(place, recipe.read_text(path).encode())
    text = f"{place}; then: dcptool run {place if '/' in str(place) else f'./{place}'}"
    emit("recipe", {"name": path.stem, "file": str(place)}, text, as_json=as_json)


@command.command("validate")
@click.argument("names", nargs=-1, required=True, metavar="NAME|FILE.toml...")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Check with one value changed; repeatable.",
)
@reporting_options
def validate(names: tuple[str, ...], changes: tuple[str, ...], as_json: bool) -> None:
    """Check recipes without running them; all that is wrong is listed at once."""
    from dcptool.cli import run_command, sections, study_run
    from dcptool.pipeline import recipe, run

    schema = sections.schema()
    found: list[dict[str, Any]] = []
    for name in names:
        one = recipe.read(name, schema, changes)
        points = []
        if one.has("sweep"):
            points = [point.name for point, _ in study_run.check(one)]
        else:
            run_command.check(one)
        steps = [step.name for step in run.steps_of(one)]
        settings = recipe.plain(one.sections)
        found.append({"name": one.name, "steps": steps, "points": points, "settings": settings})
    lines = [
        f"{one['name']}: right, {' -> '.join(one['steps'])}"
        + (f", {len(one['points'])} points" if one["points"] else "")
        for one in found
    ]
    emit("recipe", {"recipes": found}, "\n".join(lines), as_json=as_json)
