"""`dcptool evaluate`: the accuracy of a model, an artifact or an ONNX file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dcptool import console
from dcptool.cli import idle, recorded
from dcptool.cli.app import emit
from dcptool.cli.numbers import FiniteRange
from dcptool.cli.options import (
    data_options,
    machine_options,
    model_options,
    output_options,
    runs_option,
)
from dcptool.errors import GateFailed, UsageError


@click.command("evaluate")
@click.argument("target", required=False, metavar="[ARTIFACT|MODEL|FILE.onnx]")
@data_options
@click.option(
    "--protocol",
    type=click.Choice(["classes", "lfw"]),
    default="classes",
    show_default=True,
    help="Accuracy over classes, or ten-fold verification of the pairs in DIR/pairs.txt.",
)
@click.option(
    "--split",
    type=click.Choice(["auto", "train", "val", "test"]),
    default="auto",
    show_default=True,
    help="Which images; auto is test where there is one, else val.",
)
@click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(1),
    help="Images at once.  [default: 256, fewer of large ones on a CPU]",
)
@click.option("--per-class", is_flag=True, help="The accuracy of every class as well.")
@click.option(
    "--min-top1", type=FiniteRange(0, 100), help="Fail (exit 4) below this top-1 in percent."
)
@machine_options
@model_options
@runs_option
@output_options
def command(
    target: str | None,
    data: dict[str, Any],
    protocol: str,
    split: str,
    batch_size: int | None,
    per_class: bool,
    min_top1: float | None,
    device: str | None,
    workers: int | None,
    amp: bool,
    amp_dtype: str,
    nproc_per_node: int,
    runs_dir: Path | None,
    as_json: bool,
    **model: Any,
) -> int | None:
    """Measure top-1 and top-5 accuracy, and images per second.

    Without a target the newest run is measured; without data the built-in digits are used.

    \b
        dcptool evaluate --data-dir photos
        dcptool evaluate resnet50 --data-dir imagenet --per-class
        dcptool evaluate model.onnx --data-dir photos --json
    """
    from dcptool.cli import launch

    if nproc_per_node > 1 and not launch.is_launched():
        return launch.through_torchrun(nproc_per_node)

    import torch

    from dcptool.pipeline import rundir
    from dcptool.training import data as images
    from dcptool.training import dist as processes
    from dcptool.training.classes import check_classes
    from dcptool.training.device import amp_dtype as precision
    from dcptool.training.device import choose_device
    from dcptool.training.evaluate import evaluate, predictor
    from dcptool.training.loader import loader

    target = target or str(rundir.latest(runs_dir))
    where = choose_device(device, launch.local_rank())
    if protocol == "lfw":
        _verify(target, data["data_dir"], model, where, batch_size, as_json=as_json)
        return None
    with launch.together(where) as dist:
        data = recorded.data_of(target, data, labelled=True)
        spec = images.spec_of(
            data, seed=model["seed"], img_size=model["img_size"], offline=model["offline"]
        )
        if target.endswith(".onnx"):
            from dcptool.deploy.predictor import open_onnx

            own = {"checkpoint", "num_classes", "pretrained", "amp", "amp_dtype"}
            if device != "cpu":
                own.add("device")
            idle.refuse(own, "with an ONNX file, which runs as it is, on the CPU")
            opened = open_onnx(Path(target), img_size=model["img_size"])
            network, predict, where = opened.network, opened.predict, "cpu"
            batch_size = opened.batch_size or batch_size
            # A file has its size; the built-in images are shown at that.
            spec = images.at_own_size(spec)
            if opened.normalises:
                idle.refuse({"mean", "std"}, "with a file that normalises the images itself")
                spec = replace(spec, mean=None, std=None)
        else:
            from dcptool.network import artifact

            network = artifact.open_target(target, **model)
            predict = predictor(
                network.module.to(where), amp=precision(amp_dtype if amp else None, where)
            )
        found = images.open_data(spec, network, need_train=split == "train")
        if not found.labelled:
            raise UsageError(
                "--images has no labels to compare with",
                try_="--data-dir with one folder for each class",
            )
        check_classes(network, found)
        chosen = found.report if split == "auto" else getattr(found, split)
        if chosen is None:
            raise UsageError(f"{found.source} has no {split} images", try_="--split auto")
        dist.agree({"data": f"{found.source} {found.digest[:16]}"})
        accuracy = evaluate(
            predict,
            loader(chosen, batch_size, workers=workers, dist=dist, device=where),
            network.base.num_classes,
            per_class=per_class,
            dist=dist,
        )
        # Every process reads its share of the images.
        skipped = int(dist.sum(torch.tensor(len(chosen.store.bad), device=where)))
        processes.stop()
    if not dist.is_writer:
        return None
    if skipped:
        console.warn(f"{skipped} unreadable image{'s were' if skipped > 1 else ' was'} left out")
    gates = []
    if min_top1 is not None:
        ok = accuracy.top1 >= min_top1
        gates = [{"name": "top1", "limit": min_top1, "value": accuracy.top1, "ok": ok}]
    document: dict[str, object] = {
        "target": target,
        "data": found.source,
        "split": chosen.name,
        "input_size": list(found.input.size),
        "top1": round(accuracy.top1, 4),
        "top5": round(accuracy.top5, 4),
        "loss": accuracy.loss,
        "images": accuracy.images,
        "images_per_second": round(accuracy.images_per_second, 2),
        "skipped": skipped,
        "gates": gates,
    }
    if accuracy.per_class is not None:
        names = found.classes or tuple(str(i) for i in range(len(accuracy.per_class)))
        document["per_class"] = dict(zip(names, accuracy.per_class, strict=True))
    failure = None
    if min_top1 is not None and accuracy.top1 < min_top1:
        failure = GateFailed(
            f"top-1 is {accuracy.top1:.2f} %, below {min_top1:g} %",
            why=f"{accuracy.images} {chosen.name} images of {found.source}",
            try_="dcptool finetune, or a lower --min-top1",
        )
    emit("evaluate", document, _text(document), as_json=as_json, failure=failure)
    return None


def _verify(
    target: str,
    folder: Path | None,
    model: dict[str, Any],
    device: str,
    batch_size: int | None,
    *,
    as_json: bool,
) -> None:
    """Ten-fold verification of faces."""
    from dcptool.network import artifact
    from dcptool.training.verification import BATCH_SIZE, LAYOUT, verify

    if folder is None:
        raise UsageError("--protocol lfw needs --data-dir", try_=LAYOUT)
    if target.endswith(".onnx"):
        raise UsageError(
            "--protocol lfw needs an artifact or a model",
            why="what the classifier reads cannot be had from an ONNX file",
            try_="dcptool evaluate ARTIFACT --protocol lfw --data-dir DIR",
        )
    network = artifact.open_target(target, **model)
    found = verify(network, folder, device=device, batch_size=batch_size or BATCH_SIZE)
    document: dict[str, object] = {
        "target": target,
        "protocol": "lfw",
        "data": folder.name,
        "input_size": list(network.input.size),
        "verification": round(found.accuracy, 4),
        "std": round(found.std, 4),
        "folds": [round(value, 4) for value in found.folds],
        "thresholds": list(found.thresholds),
        "pairs": found.pairs,
        "images": found.images,
        "gates": [],
    }
    text = (
        f"verification {found.accuracy:.2f} % (standard deviation {found.std:.2f} over "
        f"{len(found.folds)} folds)   {found.pairs:,} pairs of {found.images:,} faces"
    )
    emit("evaluate", document, text, as_json=as_json)


def _text(document: dict[str, Any]) -> str:
    lines = [
        f"top-1 {document['top1']:.2f} %   top-5 {document['top5']:.2f} %   "
        f"{document['images']:,} {document['split']} images of {document['data']}   "
        f"{document['images_per_second']:.0f} images/s"
    ]
    if "per_class" in document:
        rows = [
            [name, "-" if value is None else f"{value:.2f}"]
            for name, value in document["per_class"].items()
        ]
        lines.append(console.table(["class", "top-1 %"], rows, align="<>"))
    return "\n".join(lines)
