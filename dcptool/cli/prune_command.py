"""`dcptool prune`: remove channels from a network and write the slim one as an artifact."""

from __future__ import annotations

import math
import shlex
import sys
import time
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcptool import console
from dcptool.cli import app, recorded
from dcptool.cli.app import emit
from dcptool.cli.numbers import FiniteRange
from dcptool.cli.options import (
    augment_options,
    data_options,
    machine_options,
    model_options,
    output_options,
    runs_option,
    update_options,
)
from dcptool.cli.selection_options import condition_of, selection_options, settings_of
from dcptool.errors import UsageError

if TYPE_CHECKING:
    from dcptool.network.base import Network
    from dcptool.selection.settings import Selection
    from dcptool.training.data import Data
    from dcptool.training.dist import Dist


@click.command("prune")
@click.argument("model", required=False, metavar="MODEL|ARTIFACT")
@selection_options
@click.option("--no-training", is_flag=True, help="No labels, no optimizer: solve, do not train.")
@click.option(
    "--stage-steps",
    type=click.IntRange(0),
    help="Updates of the network before each stage; at 0 its head alone is fitted.  "
    "[default: 0; with --solver sgd an epoch, at most 100]",
)
@click.option("--stage-epochs", type=FiniteRange(0), help="The same in passes over train.")
@click.option(
    "--stage-lr",
    type=FiniteRange(0, min_open=True),
    default=0.005,
    show_default=True,
    help="Peak learning rate of the stages.",
)
@click.option(
    "--sweeps",
    type=click.IntRange(0, 10),
    default=0,
    show_default=True,
    help="Solve the slim network again so often, as long as it helps on held-out images.",
)
@click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Images at once.",
)
@click.option(
    "--min-agreement",
    type=FiniteRange(0, 100),
    help="Fail (exit 4) when fewer held-out images get the dense network's answer, in percent.",
)
@update_options
@data_options
@augment_options
@machine_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder of the result."
)
@click.option("--force", is_flag=True, help="Replace a result that exists.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Go on with a run that was stopped, with the options it was started with.",
)
@model_options
@runs_option
@output_options
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **options: Any) -> int | None:
    """Remove channels from MODEL and write the slim network as an artifact.

    MODEL is a name (resnet50, timm:..., torchvision:..., zoo:...) or an artifact folder, which is
    then pruned further. Without data the built-in digits are used. The label-based losses of DCP
    are made for classification; --no-training needs no labels at all.

    \b
        dcptool prune resnet50 --rate 0.3
        dcptool prune resnet50 --rate 0.3 --no-training --images photos
        dcptool prune resnet50 --epsilon 0.01 --data-dir imagenet
        dcptool prune --resume runs/resnet50-dcp-001
    """
    from dcptool.cli import launch

    if options["nproc_per_node"] > 1 and not launch.is_launched():
        return launch.through_torchrun(options["nproc_per_node"])
    resume: Path | None = options["resume"]
    if resume is not None:
        options = recorded.read(ctx, options, resume, OPTIONS_FILE, PATHS)
        _refuse_finished(resume)
    if options["model"] is None:
        raise UsageError(
            "MODEL is missing",
            why="a name or an artifact folder says what to prune",
            try_="dcptool prune resnet50 --rate 0.3",
        )
    if options["selection"]["provider"] != "cpu":
        from dcptool.deploy import session

        session.choose((options["selection"]["provider"],))
    settings = settings_of(
        options["selection"],
        options["seed"],
        training=not options["no_training"],
    )
    document = _work(options["model"], settings, options, resume)
    if document is not None:
        emit("prune", document, _text(document), as_json=as_json)
    return None


OPTIONS_FILE = "prune.json"
PATHS = frozenset(("data_dir", "images", "checkpoint", "plan", "reuse", "output", "runs_dir"))


def _refuse_finished(run: Path) -> None:
    from dcptool.network import artifact

    if recorded.is_finished(run, OPTIONS_FILE, artifact.MANIFEST):
        raise UsageError(
            f"{run} is finished already",
            why="there is nothing to go on with",
            try_=f"dcptool export {shlex.quote(str(run))} --onnx",
        )


def _work(
    model: str, settings: Selection, options: dict[str, Any], resume: Path | None
) -> dict[str, Any] | None:
    from dcptool import files
    from dcptool.cli import launch
    from dcptool.network import artifact
    from dcptool.pipeline import prune as pipeline
    from dcptool.pipeline import prune_record, rundir, widths
    from dcptool.pipeline.job import Job
    from dcptool.training import dist as processes
    from dcptool.training.classes import check_classes
    from dcptool.training.device import amp_dtype, choose_device
    from dcptool.training.settings import training_of

    if options["stage_steps"] is not None and options["stage_epochs"] is not None:
        raise UsageError("--stage-steps and --stage-epochs say the same thing twice")
    for key in ("stage_epochs", "stage_lr", "min_agreement"):
        if options[key] is not None and not math.isfinite(options[key]):
            raise UsageError(
                f"--{key.replace('_', '-')} {options[key]:g} is no number to work with"
            )
    training = training_of(options["training"])
    device = choose_device(options["device"], launch.local_rank())
    with ExitStack() as stack:
        dist = stack.enter_context(launch.together(device))
        if options["output"] is not None and resume is None and dist.is_writer:
            files.require_new(options["output"], force=options["force"])
        network, data, is_bare = _open(model, options)
        if data.labelled:
            check_classes(network, data)
        settings = _rounded(network, data, settings, options, dist)
        training_wanted = not options["no_training"]
        pipeline.check(network, data, settings, training=training_wanted, processes=dist.world)
        widths.check_reach(network, settings, dist)
        baseline_s = 0.0
        if is_bare:
            began = time.monotonic()
            network = _fitted(network, data, options, device, dist)
            baseline_s = time.monotonic() - began
        made = None
        if dist.is_writer:
            made = resume or _folder(model, settings, options)
        folder = dist.broadcast(made)
        assert folder is not None
        launch.record_in(folder)
        console.note(f"pruning {network.base} ({network.weights}) on {data.source} in {folder}")
        if settings.could_spread and app.is_typed():
            console.note("one rate for all groups; --widths curves takes longer, mostly loses less")
        if dist.is_writer:
            stack.enter_context(files.lock_folder(folder))
            if resume is None:
                prune_record.clear(folder)
            if resume is None or not prune_record.has_state(folder):
                lasting = Path(model) if artifact.is_artifact(model) else model
                plain = recorded.plain({**options, "model": lasting})
                old = recorded.replaced(folder, artifact.MANIFEST)
                files.publish_json(folder / OPTIONS_FILE, {**plain, **old})
        job = Job(
            settings,
            training=not options["no_training"],
            stage_steps=options["stage_steps"],
            stage_epochs=options["stage_epochs"],
            stage_lr=options["stage_lr"],
            sweeps=options["sweeps"],
            options=training,
            amp=amp_dtype(options["amp_dtype"] if options["amp"] else None, device),
            batch_size=options["batch_size"],
            device=device,
            workers=options["workers"],
            min_agreement=options["min_agreement"],
            **_ancestry(model, network, folder),
            resume_command=launch.resume_command("prune", folder),
        )
        drop = options["selection"]["max_accuracy_drop"]
        if drop is None:
            document = pipeline.prune(network, data, job, folder, dist)
        else:
            from dcptool.pipeline import search

            kind = options["selection"]["smallest_by"]
            goal = search.Goal(drop, kind, condition_of(options["selection"]))
            document = search.smallest(network, data, job, goal, folder, dist)
        processes.stop()
        if not dist.is_writer:
            return None
        spent = document["seconds"]
        spent["baseline"] = round(baseline_s, 2)
        spent["total"] = round(spent["total"] + baseline_s, 2)
        is_latest = folder.parent == rundir.runs_folder(options["runs_dir"])
        if is_latest:
            rundir.set_latest(folder)
        from dcptool.report import page

        kept = {**document, "artifact": folder.name}
        page.after(folder, "prune", kept, recorded.typed())
        if app.is_typed():
            console.note(prune_record.next_commands(folder, is_latest=is_latest))
        return document


def _rounded(
    network: Network, data: Data, settings: Selection, options: dict[str, Any], dist: Dist
) -> Selection:
    """Settings with the multiple that this machine likes; options name it from now on."""
    from dataclasses import replace

    from dcptool.pipeline.widths import measure_multiple

    given = options["selection"]
    if given["round_to"] == "measure":
        network.input = data.input
        asked = settings if settings.rate else replace(settings, rate=Fraction(3, 10))
        found = measure_multiple(network, asked, condition_of(given)) if dist.is_writer else 1
        settings = replace(settings, round_to=dist.broadcast(found))
    options["selection"] = {**given, "round_to": settings.round_to}
    return settings


def _ancestry(model: str, network: Network, folder: Path) -> dict[str, Any]:
    """Where the network comes from; of an artifact its lineage, and what it was made from."""
    from dcptool.network import artifact, manifest
    from dcptool.pipeline import ancestry

    if not artifact.is_artifact(model):
        return {"lineage": {"source": model if ":" in model else str(network.base)}}
    known = manifest.dense_weights(Path(model), artifact.read(Path(model)).lineage)
    return {"lineage": ancestry.lineage_from(model, network, folder), "ancestor": known}


def _open(model: str, options: dict[str, Any]) -> tuple[Network, Data, bool]:
    """The network, its images, and whether it has no weights for them yet."""
    from dcptool.network import artifact
    from dcptool.pipeline import baseline
    from dcptool.training import data as images

    keys = ("pretrained", "checkpoint", "num_classes", "img_size", "seed", "offline")
    options["data"] = recorded.data_of(model, options["data"])
    spec = images.spec_of(
        options["data"],
        seed=options["seed"],
        img_size=options["img_size"],
        offline=options["offline"],
        augment=options["augment"],
    )
    if spec.is_named or options["checkpoint"] or artifact.is_artifact(model):
        network = artifact.open_target(model, **{key: options[key] for key in keys})
        return network, images.open_data(spec, network), False
    network = baseline.load_for_builtin(
        model,
        classes=10,
        pretrained=options["pretrained"],
        seed=options["seed"],
        offline=options["offline"],
    )
    return network, images.open_data(spec, network), True


def _fitted(
    network: Network, data: Data, options: dict[str, Any], device: str, dist: Dist
) -> Network:
    """The network with weights for the built-in images, once it is sure that a run can follow."""
    from dcptool import files
    from dcptool.pipeline import baseline, rundir

    runs = rundir.runs_folder(options["runs_dir"])
    if dist.is_writer and options["output"] is not None:
        files.make_folder(options["output"])
    elif dist.is_writer:
        rundir.make_runs(options["runs_dir"])
    again = shlex.join(["dcptool", *sys.argv[1:]])
    return baseline.fit_baseline(
        network,
        data,
        seed=options["seed"],
        device=device,
        runs=runs,
        resume_command=again,
        dist=dist,
    )


def _folder(model: str, settings: Selection, options: dict[str, Any]) -> Path:
    from dcptool import files
    from dcptool.pipeline import rundir

    if options["output"] is not None:
        files.make_folder(options["output"])
        return Path(options["output"])
    resolved = Path(model).resolve()
    stem = resolved.name if resolved.is_dir() else model.replace(":", "-").replace("/", "-")
    return rundir.new_run(options["runs_dir"], f"{stem}-{settings.method}")


def _text(document: dict[str, Any]) -> str:
    dense, slim = document["dense"], document["slim"]
    rows = [
        [
            "params",
            f"{dense['params']:,}",
            f"{slim['params']:,}",
            f"{dense['params'] / slim['params']:.2f}x fewer",
        ],
        [
            "MACs",
            f"{dense['macs']:,}",
            f"{slim['macs']:,}",
            f"{dense['macs'] / slim['macs']:.2f}x fewer",
        ],
    ]
    if dense["top1"] is not None and slim["top1"] is not None:
        change = slim["top1"] - dense["top1"]
        rows.append(["top-1", f"{dense['top1']:.2f} %", f"{slim['top1']:.2f} %", f"{change:+.2f}"])
    target = document.get("target")
    if target and target["kind"] == "latency":
        ratio = target["dense"] / target["reached"]
        times = [f"{target[key]:.2f} ms" for key in ("dense", "reached")]
        rows.append(["onnxruntime", *times, f"{ratio:.2f}x faster"])
    agreement = document["agreement"]
    seconds = document["seconds"]
    lines = [
        *_trials(document.get("trials", [])),
        console.table(["", "dense", "slim", ""], rows, align="<>>>"),
        "",
        *_judged(document),
        *_this_cut(document),
        f"agrees with the {'network before' if 'before' in document else 'dense network'} on "
        f"{agreement['top1']:.1f} % of {agreement['images']} held-out images",
        f"proved: cut equals mask to {document['proof']['difference']:.1e}",
        f"{document['artifact']}, {console.clock(seconds['total'])} ({_parts(seconds)})",
    ]
    return "\n".join(lines)


def _parts(seconds: dict[str, float]) -> str:
    """Where the time went; the rest is reading images, checks and measurements."""
    named = ("baseline", "selection", "training")
    rest = max(0.0, seconds["total"] - sum(seconds[key] for key in named))
    parts = [(key, seconds[key]) for key in named if seconds[key]] + [("checks", rest)]
    return ", ".join(f"{key} {console.clock(spent)}" for key, spent in parts)


def _this_cut(document: dict[str, Any]) -> list[str]:
    """Of a network that had been cut before: what this cut alone took."""
    if "before" not in document:
        return []
    before, slim = document["before"], document["slim"]
    text = f"this cut alone: {before['macs']:,} -> {slim['macs']:,} MACs"
    if before["top1"] is not None:
        change = slim["top1"] - before["top1"]
        text += f", top-1 {before['top1']:.2f} % -> {slim['top1']:.2f} % ({change:+.2f})"
    return [text]


def _judged(document: dict[str, Any]) -> list[str]:
    """What a search decided by, which is not what the table above was measured on."""
    judged = document.get("judged")
    if not judged:
        return []
    return [
        f"judged on {judged['images']:,} held-out images: {judged['drop']:.2f} points lost, "
        f"limit {document['max_accuracy_drop']:g}"
    ]


def _trials(trials: list[dict[str, Any]]) -> list[str]:
    """What a search tried."""
    if not trials:
        return []
    rows = [
        [f"{t['share']:g}", f"{t['macs']:,}", f"{t['drop']:.2f}", "yes" if t["ok"] else "no"]
        for t in trials
    ]
    return [console.table(["tried", "MACs", "points lost", "holds"], rows, align=">>><"), ""]
