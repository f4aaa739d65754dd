"""`dcptool report`: a run as one page to look at, several runs side by side, a model card."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path

import click

from dcptool import console
from dcptool.cli.app import emit
from dcptool.cli.options import output_options, runs_option
from dcptool.errors import InputError, UsageError

MANIFEST = "manifest.json"
SHOWN = 8


@click.command("report")
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
@click.option("--features", metavar="LAYER", help="Add feature maps of this layer.")
@click.option(
    "--images",
    metavar="DIR|N",
    help="For these images: a folder, or so many of the run's own.  [default: 4]",
)
@click.option("--card", is_flag=True, help="Write a model card (README.md) beside the artifact.")
@click.option(
    "--pictures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the charts as SVG files, too.",
)
@runs_option
@output_options
def command(
    runs: tuple[Path, ...],
    features: str | None,
    images: str | None,
    card: bool,
    pictures: Path | None,
    runs_dir: Path | None,
    as_json: bool,
) -> None:
    """Write report.html into a run: what came out, layer by layer, with all curves.

    Without a RUN the newest one is taken. Of several runs each gets its report, and beside the
    first a comparison.html is written. The pages need no network.

    \b
        dcptool report
        dcptool report runs/resnet50-dcp-001 --features layer1.0.conv1 --images 4
        dcptool report runs/resnet50-dcp-001 runs/resnet50-dcp-002
    """
    if images is not None and features is None:
        raise UsageError("--images needs --features LAYER", try_="dcptool report --features LAYER")
    if len(runs) > 1 and (features or card or pictures):
        raise UsageError("--features, --card and --pictures are for one run")
    from dcptool.pipeline import rundir
    from dcptool.report import page

    for run in runs:
        _refuse_no_run(run)
    if len(runs) > 1:
        document = page.compare(runs)
        best = ", ".join(document["pareto"]) or "none"
        emit("report", document, f"{document['file']}\nbeaten by none: {best}", as_json=as_json)
        return
    run = runs[0] if runs else _newest(rundir.latest(runs_dir))
    if features is not None:
        from dcptool.report.features import keep_features, parse_images
        from dcptool.report.record import collect

        keep_features(collect(run), features, *parse_images(images))
    document = page.write(run, pictures=pictures)
    if card:
        from dcptool.report.card import write_card
        from dcptool.report.record import collect

        document["card"] = str(write_card(collect(run)))
    lines = [f"{document['file']}: {', '.join(document['sections'])}"]
    lines += [f"  {name}: {how}" for name, how in document["missing"].items()]
    lines += [document["card"]] if card else []
    lines += document.get("pictures", [])
    console.detail(f"{document['bytes']:,} bytes")
    emit("report", document, "\n".join(lines), as_json=as_json)


def _refuse_no_run(folder: Path) -> None:
    """Say what is at a place that holds no run: nothing, or runs below it."""
    if not folder.is_dir():
        beside = [path.name for path in folder.parent.glob("*") if path.is_dir()]
        near = difflib.get_close_matches(folder.name, beside, n=1)
        raise InputError(
            f"there is no folder {folder}",
            why=f"{folder.parent} has {', '.join(sorted(beside)[:SHOWN]) or 'no folders'}",
            try_=f"dcptool report {shlex.quote(str(folder.parent / near[0]))}"
            if near
            else "dcptool report, which takes the newest run",
        )
    if (folder / "run.json").is_file() or (folder / MANIFEST).is_file():
        return
    points = [
        str(path)
        for path in sorted(folder.iterdir())
        if not path.is_symlink()
        and any(place.is_file() for place in (path / MANIFEST, *path.glob(f"*/{MANIFEST}")))
    ]
    if points:
        raise InputError(
            f"{folder} is no run, but holds {len(points)}",
            why=", ".join(Path(point).name for point in points[:SHOWN]),
            try_=shlex.join(["dcptool", "report", *points[:SHOWN]]),
        )


def _newest(artifact: Path) -> Path:
    """The run that a newest artifact belongs to: its own folder, or that of a recipe."""
    return artifact.parent if (artifact.parent / "run.json").is_file() else artifact
