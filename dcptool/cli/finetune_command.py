"""`dcptool finetune`: train a slim network (or any other) and keep the best of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dcptool import console
from dcptool.cli import recorded
from dcptool.cli.app import emit
from dcptool.cli.numbers import FiniteRange
from dcptool.cli.options import (
    augment_options,
    data_options,
    machine_options,
    model_options,
    output_options,
    runs_option,
    training_options,
)
from dcptool.errors import UsageError

OPTIONS_FILE = "finetune.json"
RESULT_FILE = "result.json"


@click.command("finetune")
@click.argument("target", required=False, metavar="[ARTIFACT|MODEL]")
@data_options
@training_options
@augment_options
@click.option("--reset-head", is_flag=True, help="A fresh classifier for the classes of the data.")
@click.option(
    "--kd/--no-kd",
    default=None,
    help="Learn from the dense network too; on when its weights are there.",
)
@click.option("--teacher", metavar="TARGET", help="Who teaches: a model or an artifact.")
@click.option(
    "--teacher-checkpoint", type=click.Path(path_type=Path), metavar="FILE", help="Its weights."
)
@click.option("--kd-weight", type=FiniteRange(0, 1), default=0.5, help="The teacher's share.")
@click.option("--kd-temperature", type=FiniteRange(0, min_open=True), default=2.0, help="Softness.")
@click.option(
    "--kd-maps",
    type=FiniteRange(0),
    default=20.0,
    show_default=True,
    help="What the dense network's maps between blocks count, where it teaches a slim one.",
)
@click.option("--reestimate-norms", is_flag=True, help="Measure batch-norm statistics first.")
@click.option("--min-top1", type=FiniteRange(0, 100), help="Fail (exit 4) below this top-1.")
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
@machine_options
@model_options
@runs_option
@output_options
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **options: Any) -> int | None:
    """Train a slim network and keep the best weights by the validation images.

    Without a target the newest run is taken; without data the built-in digits are used. The
    result is a new artifact in a run folder of its own. Where the validation images were taken
    out of train and the dense network has learnt from them before, images of train choose.

    \b
        dcptool finetune --data-dir photos --epochs 20
        dcptool finetune runs/latest --data-dir photos --lr 0.01 --max-time 2h
        dcptool finetune --resume runs/resnet50-finetune-001
    """
    from dcptool.cli import launch

    if options["nproc_per_node"] > 1 and not launch.is_launched():
        return launch.through_torchrun(options["nproc_per_node"])
    resume: Path | None = options["resume"]
    if resume is not None:
        options = recorded.read(ctx, options, resume, OPTIONS_FILE, PATHS)
        if recorded.is_finished(resume, OPTIONS_FILE, RESULT_FILE):
            from dcptool import files

            console.note(f"{resume} is finished already")
            finished = files.read_json(resume / RESULT_FILE, what="the result")
            finished["artifact"] = str(resume)
            finished.pop("typed", None)
            emit("finetune", finished, _text(finished), as_json=as_json)
            return None
    document = _work(options, resume)
    if document is not None:
        emit("finetune", document, _text(document), as_json=as_json)
    return None


PATHS = frozenset(("data_dir", "images", "checkpoint", "teacher_checkpoint", "output", "runs_dir"))


def _work(options: dict[str, Any], resume: Path | None) -> dict[str, Any] | None:
    from dcptool import files
    from dcptool.cli import launch
    from dcptool.network import artifact
    from dcptool.pipeline import ancestry, rundir
    from dcptool.pipeline import finetune as pipeline
    from dcptool.report import page, record
    from dcptool.training import data as images
    from dcptool.training import dist as processes
    from dcptool.training.classes import check_classes, reset_head
    from dcptool.training.device import amp_dtype, choose_device
    from dcptool.training.metrics import check_trackers
    from dcptool.training.settings import training_of

    training = training_of(options["training"])
    named = options["kd"] or options["teacher"] or options["teacher_checkpoint"]
    pipeline.check_loss(training, wants_teacher=bool(named) and options["kd"] is not False)
    check_trackers(training.report_to)
    device = choose_device(options["device"], launch.local_rank())
    target = options["target"] or str(rundir.latest(options["runs_dir"]))
    model = {key: options[key] for key in MODEL_KEYS}
    with ExitStack() as stack:
        dist = stack.enter_context(launch.together(device))
        options = {**options, "data": recorded.data_of(target, options["data"])}
        spec = images.spec_of(
            options["data"],
            seed=options["seed"],
            img_size=options["img_size"],
            offline=options["offline"],
            augment=options["augment"],
        )
        network = artifact.open_target(target, **model)
        found = images.open_data(spec, network)
        teacher = _teacher(options, target, network)
        if options["reset_head"]:
            network = reset_head(network, found, seed=options["seed"])
        check_classes(network, found)
        if teacher is not None and teacher.base.num_classes != network.base.num_classes:
            raise UsageError(
                f"the teacher has {teacher.base.num_classes} classes, "
                f"the network {network.base.num_classes}",
                why="it can only teach the classes that it knows",
                try_="--no-kd, or --teacher with a network of the same classes",
            )
        pipeline.check(
            found, taught=teacher is not None, min_top1=options["min_top1"], training=training
        )
        folder = dist.broadcast(_folder(options, resume, target) if dist.is_writer else None)
        assert folder is not None
        launch.record_in(folder)
        if dist.is_writer:
            stack.enter_context(files.lock_folder(folder))
            if resume is None:
                pipeline.clear_checkpoints(folder)
                named = {"target": _lasting(target), "teacher": _lasting(options["teacher"])}
                plain = recorded.plain({**options, **named})
                old = recorded.replaced(folder, RESULT_FILE)
                files.publish_json(folder / OPTIONS_FILE, {**plain, **old})
        console.note(f"fine-tuning {network.base} in {folder}")
        lineage = ancestry.lineage_from(target, network, folder)
        if options["reset_head"]:
            lineage.pop("dense", None)  # it answers for other classes
        fresh = options["reset_head"] or network.weights.startswith("random")
        taught = None
        if teacher is not None:
            is_dense = bool(network.cuts) and teacher.base == network.base
            maps = options["kd_maps"] if is_dense else 0.0
            taught = pipeline.Distillation(
                teacher.module, options["kd_weight"], options["kd_temperature"], maps
            )
        result = pipeline.finetune(
            network,
            found,
            pipeline.Job(
                training=training,
                device=device,
                amp=amp_dtype(options["amp_dtype"] if options["amp"] else None, device),
                workers=options["workers"],
                seed=options["seed"],
                distillation=taught,
                fresh=fresh,
                reestimate=options["reestimate_norms"],
                min_top1=options["min_top1"],
                lineage=lineage,
                resume_command=launch.resume_command("finetune", folder),
            ),
            folder,
            dist,
        )
        processes.stop()
        if not dist.is_writer:
            return None
        document = _document(result, target, found)
        kept = {"artifact": folder.name, "target": _title(target)}
        record.keep_result(folder, "finetune", {**document, **kept}, recorded.typed())
        if result.after is not None:
            before = Path(target) if artifact.is_artifact(target) else None
            record.keep_classes(folder, found.classes, result.after.per_class, before=before)
        pipeline.clear_checkpoints(folder)
        if folder.parent == rundir.runs_folder(options["runs_dir"]):
            rundir.set_latest(folder)
        page.after(folder)
        return document


MODEL_KEYS = ("pretrained", "checkpoint", "num_classes", "img_size", "seed", "offline")


def _teacher(options: dict[str, Any], target: str, network: Any) -> Any:
    """The dense network, where it is named or where the artifact says it can be had."""
    if options["kd"] is False:
        return None
    from dcptool.network import artifact
    from dcptool.network.manifest import dense_weights

    where = options["teacher"]
    checkpoint = options["teacher_checkpoint"]
    if where is None and checkpoint is not None:
        where = str(network.base)
    if where is not None:
        pretrained = checkpoint is None and not artifact.is_artifact(where)
        return artifact.open_target(
            where, pretrained=pretrained, checkpoint=checkpoint, offline=options["offline"]
        )
    if artifact.is_artifact(target):
        path = dense_weights(Path(target), artifact.read(Path(target)).lineage)
        if path is not None and options["reset_head"] and not options["kd"]:
            console.note("no distillation: the dense network knows other classes than the new head")
            return None
        if path is not None and options["training"]["loss"] == "angular":
            console.note("no distillation: --loss angular trains by the labels alone")
            return None
        if path is not None:
            return artifact.load_dense(network.base, network.input, path)
    if options["kd"]:
        raise UsageError(
            "--kd needs the dense weights",
            why=f"{target} does not say where they are",
            try_="--teacher MODEL, or --teacher-checkpoint FILE",
        )
    return None


def _folder(options: dict[str, Any], resume: Path | None, target: str) -> Path:
    from dcptool import files
    from dcptool.pipeline import rundir

    if resume is not None:
        return resume
    if options["output"] is not None:
        files.require_new(options["output"], force=options["force"])
        files.make_folder(options["output"])
        return Path(options["output"])
    resolved = Path(target).resolve()
    stem = resolved.name if resolved.is_dir() else target.replace(":", "-").replace("/", "-")
    return rundir.new_run(options["runs_dir"], f"{stem}-finetune")


def _lasting(target: str | None) -> Path | str | None:
    """A target that means the same from every folder, and when there are newer runs."""
    from dcptool.network import artifact

    return Path(target) if target is not None and artifact.is_artifact(target) else target


def _title(target: str) -> str:
    """A model name as it is, the name of an artifact for its path: a run may be handed on."""
    path = Path(target)
    return path.resolve().name if path.exists() else target


def _document(result: Any, target: str, data: Any) -> dict[str, Any]:
    before, after, agreed = result.before, result.after, result.agreement
    return {
        "artifact": str(result.artifact),
        "target": target,
        "data": data.source,
        "split": data.report.name,
        "before": {"top1": before.top1} if before else None,
        "after": {"top1": after.top1, "top5": after.top5} if after else None,
        "agreement": {"before": asdict(agreed[0]), "after": asdict(agreed[1])} if agreed else None,
        "images": after.images if after else 0,
        "epochs": round(result.fitted.epochs, 4),
        "steps": result.fitted.steps,
        "seconds": round(result.seconds, 3),
        "images_per_second": round(result.fitted.images_per_second, 2),
        "channels_last": result.fitted.channels_last,
        "ended_by": result.fitted.ended_by,
        "skipped": _skipped(data),
        "gates": result.gates,
    }


def _skipped(data: Any) -> int:
    sets = (data.train, data.val, data.test)
    stores = {id(one.store): one.store for one in sets if one is not None}
    return sum(len(store.bad) for store in stores.values())


def _text(document: dict[str, Any]) -> str:
    text = f"{document['artifact']}: {document['epochs']:g} epochs in "
    text += console.clock(document["seconds"])
    if document["after"]:
        text += (
            f"\ntop-1 {document['before']['top1']:.2f} % -> {document['after']['top1']:.2f} %, "
            f"top-5 {document['after']['top5']:.2f} %, {document['images']:,} images"
        )
    if document.get("agreement"):
        before, after = document["agreement"]["before"], document["agreement"]["after"]
        text += (
            f"\nagreement with the teacher {before['top1']:.2f} % -> {after['top1']:.2f} %, "
            f"KL {before['kl']:.4f} -> {after['kl']:.4f}, {after['images']:,} held-out images"
        )
    if document["skipped"]:
        text += f"\n{document['skipped']} unreadable images skipped"
    return text
