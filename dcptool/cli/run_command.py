"""`dcptool run`: a recipe from the network to the numbers, every step done once."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcptool import console
from dcptool.cli import app
from dcptool.cli.options import output_options, runs_option
from dcptool.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from dcptool.selection.settings import Selection


def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Names of recipes for the shell."""
    from dcptool.pipeline import recipe

    return [name for name in recipe.shipped() if name.startswith(incomplete)]


@click.command("run")
@click.argument("recipe", metavar="NAME|FILE.toml", shell_complete=complete)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Change one value of the recipe, e.g. prune.rate=0.5; repeatable.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="SECTION[.KEY]",
    help="Leave a step or a key of the recipe out; repeatable.",
)
@click.option("--resume", is_flag=True, help="Go on in the middle of a step that was stopped.")
@click.option(
    "--dry-run", is_flag=True, help="Show steps, files, disk and time; measure, write nothing."
)
@runs_option
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    recipe: str,
    changes: tuple[str, ...],
    without: tuple[str, ...],
    resume: bool,
    dry_run: bool,
    runs_dir: Path | None,
    as_json: bool,
) -> None:
    """Do all that a recipe says: analyze, prune, finetune, export, bench, whichever it has.

    A step whose result is there, and whose settings and inputs are the same, is not done again.
    Exits with 4 when a gate of the recipe does not hold.

    \b
        dcptool run quickstart
        dcptool run quickstart --set prune.rate=0.5 --dry-run
        dcptool run mine.toml --resume
    """
    from dcptool.cli import sections
    from dcptool.pipeline import recipe as recipes
    from dcptool.pipeline import rundir

    found = recipes.read(recipe, sections.schema(), changes, without)
    runs = rundir.runs_folder(runs_dir)
    words = ["dcptool", "run", recipe]
    words += [word for change in changes for word in ("--set", change)]
    words += [word for place in without for word in ("--without", place)]
    words += ["--runs-dir", str(runs_dir)] if runs_dir is not None else []
    if found.has("sweep"):
        from dcptool.cli import study_run

        if dry_run:
            study_run.dry_run(found, runs, as_json=as_json)
        else:
            study_run.run(
                found, runs, words, resume=resume, common=common_words(ctx), as_json=as_json
            )
        return
    steps = check(found)
    if dry_run:
        from dcptool.pipeline import estimate

        document = estimate.estimate(found, steps)
        app.emit("run", document, estimate.text(document, runs), as_json=as_json)
        return
    from dcptool.pipeline import run

    again = shlex.join([*words, "--resume"])
    try:
        document, failure = run.run(
            found,
            invoke=app.invoke,
            runs=runs,
            resume=resume,
            again=again,
            common=common_words(ctx),
        )
    except KeyboardInterrupt as err:
        raise Interrupted(getattr(err, "number", signal.SIGINT), try_=again) from err
    if document["artifact"]:
        from dcptool.cli import recorded
        from dcptool.report import page

        folder = Path(document["run"])
        kept = {key: document[key] for key in ("recipe", "summary", "gates", "seconds")}
        page.after(folder, "run", kept, recorded.typed())
    if found.has("paper"):
        from dcptool.cli import study_run

        study_run.write_one(found, document)
    app.emit("run", document, _text(document), as_json=as_json, failure=failure)


def check(recipe: Any) -> dict[str, dict[str, Any]]:
    """The options of every step, defaults included; raises what the commands would."""
    from dcptool.cli import faults
    from dcptool.pipeline import run

    found: dict[str, dict[str, Any]] = {}
    wrong = _combinations(recipe)
    nameless = _unknown_model(recipe)
    with click.Context(app.group, info_name="dcptool") as parent:
        for step in run.steps_of(recipe):
            target = str(recipe.get("model", "name"))
            on_artifact = step.takes != "name" and bool(found.keys() & {"baseline", "prune"})
            words = run.words_of(recipe, step, target, on_artifact)
            one = app.group.get_command(parent, step.command)
            assert one is not None
            try:
                with one.make_context(step.command, list(words), parent=parent) as context:
                    found[step.name] = dict(context.params)
                _fit_together(step.command, found[step.name])
            except click.ClickException as err:
                fault = faults.of_usage(err, [step.command, *words])
                wrong.append(f"[{step.name}]: {fault.message}: {fault.why}")
            except UsageError as err:
                wrong.append(f"[{step.name}]: {err.why or err.message}")
    if nameless is not None and not wrong:
        raise nameless
    if wrong:
        wrong += [f"model.name: {nameless.message}: {nameless.why}"] if nameless else []
        raise UsageError(
            f"the recipe {recipe.name} cannot work",
            why="\n".join(wrong),
            try_="dcptool recipe show quickstart, which is a recipe that works",
        )
    return found


def _unknown_model(recipe: Any) -> UsageError | None:
    """What is wrong with the name of the model, told before a folder is made for it."""
    from dcptool.pipeline import run

    name = str(recipe.get("model", "name"))
    if Path(name).is_dir() or not run.steps_of(recipe):
        return None
    from dcptool.network import names

    try:
        names.resolve(name)
    except UsageError as err:
        if err.instead:
            err.try_ = f"the same command with --set model.name={err.instead[1]}"
        return err
    return None


def _fit_together(command: str, params: dict[str, Any]) -> None:
    """What the commands themselves check first, before hours have gone into earlier steps."""
    if command not in ("prune", "finetune"):
        return
    from dcptool.training.settings import training_of

    if command == "prune":
        selection_of(params)
    training_of(params)


def selection_of(params: dict[str, Any]) -> Selection:
    """What the options of a step [prune] come to."""
    from dcptool.cli.sections import declared
    from dcptool.cli.selection_options import selection_options, settings_of

    given = {str(param.name): params[str(param.name)] for param in declared(selection_options)}
    return settings_of(given, params["seed"], training=not params["no_training"])


def _combinations(recipe: Any) -> list[str]:
    """What sections need of each other."""
    from dcptool.pipeline import run

    wrong = []
    if not run.steps_of(recipe):
        names = ", ".join(f"[{step.name}]" for step in run.STEPS)
        wrong.append(f"it has no step: none of {names}")
    if recipe.get("gates", "min_speedup") is not None and not recipe.has("bench"):
        wrong.append("gates.min_speedup needs a section [bench], which measures it")
    drop = recipe.get("gates", "max_accuracy_drop")
    if drop is not None and not (recipe.has("prune") or recipe.has("finetune")):
        wrong.append("gates.max_accuracy_drop needs a section [prune] or [finetune]")
    if drop is not None and recipe.get("data", "images") is not None:
        wrong.append("gates.max_accuracy_drop needs labels, which data.images has not")
    return wrong


def common_words(ctx: click.Context) -> tuple[str, ...]:
    """How much is said, as it was asked of `run` itself."""
    before = ctx.find_root().params
    names = (("quiet", "--quiet"), ("verbose", "--verbose"))
    return tuple(word for name, word in names if ctx.params.get(name) or before.get(name))


def _text(document: dict[str, Any]) -> str:
    summary = document["summary"]
    dense, slim = summary["dense"], summary["slim"]
    rows = []
    for name, key in (("params", "params"), ("MACs", "macs")):
        if dense[key] and slim[key]:
            ratio = f"{dense[key] / slim[key]:.2f}x fewer"
            rows.append([name, f"{dense[key]:,}", f"{slim[key]:,}", ratio])
    if dense["top1"] is not None and slim["top1"] is not None:
        change = f"{slim['top1'] - dense['top1']:+.2f}"
        rows.append(["top-1", f"{dense['top1']:.2f} %", f"{slim['top1']:.2f} %", change])
    benched = next((s["document"] for s in document["steps"] if s["name"] == "bench"), None)
    if benched is not None:
        rows += _latencies(benched)
    steps = ", ".join(
        f"{step['name']} {'(there)' if step['skipped'] else console.clock(step['seconds'])}"
        for step in document["steps"]
    )
    lines = [console.table(["", "dense", "slim", ""], rows, align="<>>>"), ""] if rows else []
    if document["file"]:
        size = f", {slim['bytes'] / 1e6:.1f} MB" if slim["bytes"] else ""
        lines.append(f"{document['file']}{size}")
    for gate in document["gates"]:
        value = "not measured" if gate["value"] is None else f"{gate['value']:.4g}"
        state = "holds" if gate["ok"] else "FAILS"
        lines.append(f"gate {gate['name']}: {value}, limit {gate['limit']:g}: {state}")
    lines.append(f"{document['run']}, {console.clock(document['seconds'])} ({steps})")
    return "\n".join(lines)


def _latencies(document: dict[str, Any]) -> list[list[str]]:
    """Median milliseconds of both networks for each batch size and thread count."""
    times = {
        (row["model"], row["provider"], row["batch_size"], row["threads"]): row["p50_ms"]
        for row in document["rows"]
    }
    rows = []
    for entry in document["speedup"]:
        where = (entry["provider"], entry["batch_size"], entry["threads"])
        pair = [times.get((entry[side], *where)) for side in ("baseline", "model")]
        if None not in pair:
            rows.append(
                [
                    f"{entry['provider']}, batch {entry['batch_size']}, {entry['threads']} threads",
                    *(f"{value:.2f} ms" for value in pair),
                    _speed(entry["ratio"]),
                ]
            )
    return rows


def _speed(ratio: float) -> str:
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
