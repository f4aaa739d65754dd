"""`dcptool export`: a checked ONNX file."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click

from dcptool import console, files
from dcptool.cli import idle, recorded
from dcptool.cli.app import emit
from dcptool.cli.numbers import FiniteRange
from dcptool.cli.options import data_options, model_options, output_options, runs_option
from dcptool.errors import UsageError


@click.command("export")
@click.argument("target", required=False, metavar="[ARTIFACT|MODEL]")
@click.option(
    "--onnx",
    "onnx_file",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[FILE]",
    help="Write an ONNX file (the default); FILE is model.onnx inside the artifact unless given.",
)
@click.option(
    "--safetensors",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the plain weights as safetensors instead, or as well with --onnx.",
)
@click.option(
    "--opset", type=click.IntRange(18, 23), default=18, show_default=True, help="ONNX opset."
)
@click.option(
    "--dynamic",
    type=click.Choice(["batch", "size", "none"]),
    default="batch",
    show_default=True,
    help="Which dimensions of the input stay free: batch; batch, height and width; none.",
)
@click.option(
    "--with-preprocessing",
    is_flag=True,
    help="Take uint8 RGB images, batch x height x width x 3, of the right size; normalise inside.",
)
@click.option("--softmax", is_flag=True, help="Return probabilities instead of logits.")
@click.option(
    "--fp16", is_flag=True, help="Compute in 16-bit floats; input and output stay as they are."
)
@click.option("--atol", type=FiniteRange(0), help="Absolute tolerance of parity (1e-5; fp16 1e-3).")
@click.option("--rtol", type=FiniteRange(0), help="Relative tolerance of parity (1e-4; fp16 2e-2).")
@click.option("--int8", "as_int8", is_flag=True, help="Static INT8 (QDQ, one scale per channel).")
@click.option(
    "--calibration",
    type=click.Choice(["minmax", "entropy", "percentile"]),
    default="minmax",
    show_default=True,
    help="How ranges are found for --int8.",
)
@click.option(
    "--int8-skip",
    default="",
    metavar="auto|NAMES",
    help="Layers left in float, separated by commas; auto finds those that hurt.",
)
@click.option(
    "--max-accuracy-drop",
    type=FiniteRange(0),
    metavar="POINTS",
    help="Exit 4, and write nothing, when --int8 loses more top-1 than this.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Images to calibrate --int8 with.",
)
@data_options
@runs_option
@click.option("--force", is_flag=True, help="Replace files that exist.")
@model_options
@output_options
def command(
    target: str | None,
    onnx_file: str | None,
    safetensors: Path | None,
    opset: int,
    dynamic: str,
    with_preprocessing: bool,
    softmax: bool,
    fp16: bool,
    atol: float | None,
    rtol: float | None,
    as_int8: bool,
    calibration: str,
    int8_skip: str,
    max_accuracy_drop: float | None,
    samples: int,
    data: dict[str, Any],
    runs_dir: Path | None,
    force: bool,
    as_json: bool,
    **model: Any,
) -> None:
    """Write a checked ONNX file of an artifact or a model.

    Without a target the newest run is exported into its own folder. The file is published
    only when it computes what torch computes.

    \b
        dcptool export
        dcptool export runs/latest --onnx slim.onnx --with-preprocessing --softmax
        dcptool export resnet18 --no-pretrained --onnx resnet18.onnx
    """
    if not as_int8 and (int8_skip or max_accuracy_drop is not None):
        raise UsageError("--int8-skip and --max-accuracy-drop are for --int8", try_="add --int8")
    if not as_int8:
        idle.refuse(("calibration", "samples"), "without --int8", "add --int8")
    if as_int8 and fp16:
        raise UsageError("--int8 and --fp16 exclude each other")
    from dcptool.network.artifact import is_artifact
    from dcptool.pipeline import rundir

    # All that can be wrong with the command line, before a library is loaded.
    if onnx_file:
        _refuse_folder(target, onnx_file)
    target = target or str(rundir.latest(runs_dir))
    if os.path.isfile(target):  # noqa: PTH113 - never raises
        raise UsageError(
            f"{target} is a file, not a model or an artifact",
            try_="dcptool export MODEL --checkpoint FILE for a file of weights",
        )
    artifact = is_artifact(target)
    path = _output(target, onnx_file, artifact)
    with_onnx = onnx_file is not None or not safetensors
    for option, wanted in (("--onnx", path if with_onnx else None), ("--safetensors", safetensors)):
        if wanted:
            files.require_new(wanted, force=force, instead=f"another file with {option} FILE")

    from dcptool.deploy import export as exporting
    from dcptool.deploy import int8, targets

    network = targets.open_network(target, **model)
    document: dict[str, Any] = {}
    if safetensors:
        document["safetensors"] = targets.publish_weights(network, safetensors, force=force)
    if with_onnx:
        settings = int8.Settings(
            calibration,
            tuple(name.strip() for name in int8_skip.split(",") if name.strip()),
            max_accuracy_drop,
        )
        options = exporting.Options(
            opset=opset,
            dynamic=dynamic,
            with_preprocessing=with_preprocessing,
            softmax=softmax,
            fp16=fp16,
            int8=settings if as_int8 else None,
            atol=atol,
            rtol=rtol,
            seed=model["seed"],
        )
        facts = targets.facts_of(Path(target)) if artifact else {}
        parity, images = None, None
        if as_int8:
            data = recorded.data_of(target, data)
        if as_int8 or data["data_dir"] or data["dataset"] or data["images"]:
            from dcptool.deploy import samples as sampling
            from dcptool.training.data import spec_of

            spec = spec_of(data, seed=model["seed"], offline=model["offline"])
            opened = sampling.open_images(spec, network)
            parity = sampling.parity_batches(opened, model["seed"])
            if as_int8:
                images = sampling.calibration_images(opened, network, samples, model["seed"])
        console.note(f"exporting {network.base} to {path}")
        result = exporting.export(
            network, path, options, facts=facts, samples=parity, images=images, force=force
        )
        document |= result.document()
    emit("export", document, _text(document), as_json=as_json)


def _refuse_folder(target: str | None, onnx_file: str) -> None:
    """A folder after --onnx is mostly what was to be exported."""
    path = Path(onnx_file)
    if not path.is_dir():
        return
    meant = [target, "--onnx", str(path / "model.onnx")] if target else [onnx_file, "--onnx"]
    raise UsageError(
        f"{path} is a folder, and --onnx names the file to write",
        try_=shlex.join(["dcptool", "export", *meant]),
    )


def _output(target: str, onnx_file: str | None, artifact: bool) -> Path:
    if onnx_file:
        path = Path(onnx_file)
    elif artifact:
        path = Path(target) / "model.onnx"
    else:
        path = Path(target.replace(":", "_").replace("/", "_") + ".onnx")
    if path.suffix != ".onnx":
        raise UsageError(f"{path} does not end in .onnx", try_=f"--onnx {path}.onnx")
    return path


def _text(document: dict[str, Any]) -> str:
    lines = []
    if "safetensors" in document:
        weights = document["safetensors"]
        lines.append(f"{weights['file']}: {weights['bytes'] / 1e6:.1f} MB, plain weights")
    if "file" in document:
        parity = document["parity"]
        lines += [
            f"{document['file']}: {document['bytes'] / 1e6:.1f} MB, opset {document['opset']}, "
            f"exporter {document['exporter']}",
            f"parity: {parity['samples']} samples, max difference {parity['max_abs']:.2g} "
            f"(relative {parity['max_rel']:.2g}), same top-1 on {parity['top1_agreement']:.1f} %",
        ]
        if document["labels"]:
            lines.append(f"labels: {document['labels']}")
        if document["subnormal_flushed"]:
            lines.append(f"{document['subnormal_flushed']} subnormal weights set to zero")
        if "int8" in document:
            lines += _int8_lines(document["int8"])
    return "\n".join(lines)


def _int8_lines(found: dict[str, Any]) -> list[str]:
    line = f"int8: {found['layers']} layers, {found['calibration']} on {found['images']} images, "
    if found["top1_before"] is not None:
        line += f"top-1 {found['top1_before']:.2f} before, {found['top1_after']:.2f} after, "
    lines = [line + f"same top-1 as float on {found['agreement']:.1f} % of these images"]
    if found["skipped"]:
        lines.append(f"left in float: {', '.join(found['skipped'])}")
    return lines
