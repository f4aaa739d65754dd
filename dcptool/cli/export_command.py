"""`dcptool export`: a checked ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dcptool import console
from dcptool.cli.app import emit
from dcptool.cli.options import model_options, output_options
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
@click.option(
    "--atol", type=click.FloatRange(0), help="Absolute tolerance of parity (1e-5; fp16 1e-3)."
)
@click.option(
    "--rtol", type=click.FloatRange(0), help="Relative tolerance of parity (1e-4; fp16 2e-2)."
)
@click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the runs, for the default target (runs, or $DCPTOOL_RUNS).",
)
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
    from dcptool.deploy import export as exporting
    from dcptool.deploy import targets
    from dcptool.pipeline import rundir

    target = target or str(rundir.latest(runs_dir))
    artifact = targets.is_artifact(target)
    if onnx_file:
        path = Path(onnx_file)
    elif artifact:
        path = Path(target) / targets.EXPORT_FILE
    else:
        path = Path(target.replace(":", "_").replace("/", "_") + ".onnx")
    if path.suffix != ".onnx":
        raise UsageError(f"{path} does not end in .onnx", try_=f"--onnx {path}.onnx")
    network = targets.open_network(target, **model)
    facts = targets.facts_of(Path(target)) if artifact else {}
    options = exporting.Options(
        opset=opset,
        dynamic=dynamic,
        with_preprocessing=with_preprocessing,
        softmax=softmax,
        fp16=fp16,
        atol=atol,
        rtol=rtol,
        seed=model["seed"],
    )
    console.note(f"exporting {network.base} to {path}")
    result = exporting.export(network, path, options, facts=facts, force=force)
    emit("export", result.document(), _text(result.document()), as_json=as_json)


def _text(document: dict[str, Any]) -> str:
    parity = document["parity"]
    lines = [
        f"{document['file']}: {document['bytes'] / 1e6:.1f} MB, opset {document['opset']}, "
        f"exporter {document['exporter']}",
        f"parity: {parity['samples']} samples, max difference {parity['max_abs']:.2g} "
        f"(relative {parity['max_rel']:.2g}), same top-1 {parity['top1_agreement']:.1f} %",
    ]
    if document["labels"]:
        lines.append(f"labels: {document['labels']}")
    if document["subnormal_flushed"]:
        lines.append(f"{document['subnormal_flushed']} subnormal weights set to zero")
    return "\n".join(lines)
