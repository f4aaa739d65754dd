"""`dcptool prune`: remove channels from a network and write the slim one as an artifact."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from dcptool import console
from dcptool.cli import recorded
from dcptool.cli.app import emit
from dcptool.cli.options import (
    augment_options,
    data_options,
    model_options,
    output_options,
    packed,
    runs_option,
)
from dcptool.errors import InputError, UsageError

selection_options = packed(
    "selection",
    click.option("--rate", metavar="R", help="Share of channels to remove, 0 <= R < 1."),
    click.option(
        "--epsilon",
        type=float,
        metavar="E",
        help="Stop adding channels when the loss falls by less than this share (DCP-Adapt).",
    ),
    click.option(
        "--plan",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Units to keep of each group, as `analyze --emit-plan` writes it.",
    ),
    click.option(
        "--method",
        type=click.Choice(["dcp", "random", "l1", "apoz", "thinet", "cp"]),
        default="dcp",
        show_default=True,
        help="The rule that orders channels.",
    ),
    click.option(
        "--solver",
        type=click.Choice(["gram", "sgd"]),
        default="gram",
        show_default=True,
        help="Closed form, or the paper's loop: two walks over the samples for each channel.",
    ),
    click.option(
        "--target",
        type=click.Choice(["block", "conv"]),
        help="Reconstruct the next residual sum (gram), or the layer's own output (sgd).",
    ),
    click.option(
        "--score",
        type=click.Choice(["rise", "drop", "gradient"]),
        help="Remove by least rise of the loss (gram), add by drop or by gradient norm (sgd).",
    ),
    click.option(
        "--lambda",
        "discrimination",
        type=click.FloatRange(0),
        default=1.0,
        show_default=True,
        help="Weight of the discrimination-aware loss in the order.",
    ),
    click.option(
        "--samples",
        type=click.IntRange(1),
        default=512,
        show_default=True,
        help="Training images that channels are chosen on.",
    ),
    click.option(
        "--positions",
        type=click.IntRange(1),
        default=64,
        show_default=True,
        help="Random positions of each feature map that enter the solution.",
    ),
    click.option(
        "--scope",
        type=click.Choice(["paper", "all"]),
        default="paper",
        show_default=True,
        help="Groups to cut: the paper's, or all that are not coupled.",
    ),
    click.option("--prune-residual", is_flag=True, help="Cut groups coupled by residual adds too."),
    click.option(
        "--keep", multiple=True, metavar="PATTERN", help="Leave groups of this name whole."
    ),
    click.option("--losses", type=click.IntRange(1, 16), help="Extra losses (2 or 3 by depth)."),
    click.option(
        "--cache-gb",
        type=click.FloatRange(0),
        default=4.0,
        show_default=True,
        help="Features above this much memory go to disk.",
    ),
)


@click.command("prune")
@click.argument("model", required=False, metavar="MODEL|ARTIFACT")
@selection_options
@click.option("--no-training", is_flag=True, help="No labels, no optimizer: solve, do not train.")
@click.option("--stage-steps", type=click.IntRange(0), help="Updates before each stage.")
@click.option(
    "--stage-lr",
    type=click.FloatRange(0, min_open=True),
    default=0.005,
    show_default=True,
    help="Peak learning rate of the stages.",
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
    type=click.FloatRange(0, 100),
    help="Fail (exit 4) when fewer held-out images get the dense network's answer, in percent.",
)
@data_options
@augment_options
@click.option("--device", help="cpu, cuda, cuda:1 ...; the GPU if there is one.")
@click.option("-j", "--workers", type=click.IntRange(0, 64), help="Processes that read images.")
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
def command(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
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
    resume: Path | None = options["resume"]
    if resume is not None:
        options = recorded.read(ctx, options, resume, OPTIONS_FILE, PATHS)
        _refuse_finished(resume)
    if options["model"] is None:
        raise UsageError("MODEL is missing", try_="dcptool prune resnet50 --rate 0.3")
    settings = _settings(options["selection"], options["seed"], options["batch_size"])
    document = _work(options["model"], settings, options, resume)
    emit("prune", document, _text(document), as_json=as_json)


OPTIONS_FILE = "prune.json"
PATHS = frozenset(("data_dir", "images", "checkpoint", "plan", "output", "runs_dir"))


def _refuse_finished(run: Path) -> None:
    from dcptool.network import artifact

    if (run / artifact.MANIFEST).exists():
        raise UsageError(
            f"{run} is finished already",
            why="there is nothing to go on with",
            try_=f"dcptool export {shlex.quote(str(run))} --onnx",
        )


_CLOSED_FORM = {"target": "block", "score": "rise"}


def _settings(given: dict[str, Any], seed: int, batch_size: int) -> Any:
    from dcptool.selection.budget import parse_rate
    from dcptool.selection.settings import Selection

    named = [key for key in ("rate", "epsilon", "plan") if given[key] is not None]
    faults = []
    if len(named) > 1:
        faults.append(f"--{' and --'.join(named)} exclude each other")
    if not named:
        faults.append("one of --rate, --epsilon and --plan is needed")
    if given["epsilon"] is not None and not 0 < given["epsilon"] < 1:
        faults.append(f"--epsilon {given['epsilon']:g} is out of range: 0 < epsilon < 1")
    if given["epsilon"] is not None and given["method"] not in ("dcp", "thinet"):
        faults.append(f"--epsilon needs a loss to watch, which --method {given['method']} has not")
    loop = given["solver"] == "sgd"
    defaults = {"target": "conv", "score": "gradient"} if loop else _CLOSED_FORM
    given = {k: defaults[k] if k in defaults and v is None else v for k, v in given.items()}
    if loop and (given["target"], given["score"]) != ("conv", "gradient"):
        faults.append("--solver sgd is the paper's loop: --target conv and --score gradient")
    rate = None
    if given["rate"] is not None:
        try:
            rate = parse_rate(given["rate"])
        except UsageError as err:
            faults.append(f"{err.message}: {err.why}")
    if faults:
        raise UsageError(
            "the options of prune do not fit",
            why="\n".join(faults),
            try_="dcptool prune resnet50 --rate 0.3",
        )
    chosen = {k: v for k, v in given.items() if k not in ("rate", "plan")}
    plan = _plan(given["plan"]) if given["plan"] is not None else None
    return Selection(rate=rate, plan=plan, seed=seed, batch_size=batch_size, **chosen)


def _plan(path: Path) -> dict[str, int]:
    from dcptool import files

    document = files.read_json(path, what="plan")
    groups = document.get("groups")
    if document.get("dcptool_plan") != 1 or not isinstance(groups, dict):
        raise InputError(
            f"{path} is no plan", try_="dcptool analyze MODEL --emit-plan plan.json makes one"
        )
    plan: dict[str, int] = {}
    for name, entry in groups.items():
        keep = entry.get("keep") if isinstance(entry, dict) else None
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise InputError(f"{path}: keep of {name} must be a count of at least 1")
        plan[name] = keep
    return plan


def _work(
    model: str, settings: Any, options: dict[str, Any], resume: Path | None
) -> dict[str, Any]:
    from dcptool import files
    from dcptool.pipeline import prune as pipeline
    from dcptool.pipeline import rundir
    from dcptool.training.classes import check_classes
    from dcptool.training.device import choose_device

    device = choose_device(options["device"])
    if options["output"] is not None and resume is None:
        files.require_new(options["output"], force=options["force"])
    network, data = _open(model, options, device)
    if data.labelled:
        check_classes(network, data)
    pipeline.check(network, data, settings, training=not options["no_training"])
    folder = resume or _folder(model, settings, options)
    console.note(f"pruning {network.base} ({network.weights}) on {data.source} in {folder}")
    with files.lock_folder(folder):
        if resume is None:
            files.publish_json(folder / OPTIONS_FILE, recorded.plain({**options, "model": model}))
        document = pipeline.prune(
            network,
            data,
            pipeline.Job(
                settings,
                training=not options["no_training"],
                stage_steps=options["stage_steps"],
                stage_lr=options["stage_lr"],
                batch_size=options["batch_size"],
                device=device,
                workers=options["workers"],
                min_agreement=options["min_agreement"],
                lineage={"source": model if ":" in model else str(network.base)},
                resume_command=f"dcptool prune --resume {shlex.quote(str(folder))}",
            ),
            folder,
        )
    if folder.parent == rundir.runs_folder(options["runs_dir"]):
        rundir.set_latest(folder)
    console.note(pipeline.next_commands(document))
    return document


def _open(model: str, options: dict[str, Any], device: str) -> tuple[Any, Any]:
    """The network and its images; with neither data nor weights, a baseline on the built-in set."""
    from dcptool.network import artifact
    from dcptool.pipeline import baseline, rundir
    from dcptool.training import data as images

    keys = ("pretrained", "checkpoint", "num_classes", "img_size", "seed", "offline")
    spec = images.spec_of(
        options["data"],
        seed=options["seed"],
        img_size=options["img_size"],
        offline=options["offline"],
        augment=options["augment"],
    )
    if spec.is_named or options["checkpoint"] or artifact.is_artifact(model):
        network = artifact.open_target(model, **{key: options[key] for key in keys})
        return network, images.open_data(spec, network)
    network = baseline.load_for_builtin(
        model,
        classes=10,
        pretrained=options["pretrained"],
        seed=options["seed"],
        offline=options["offline"],
    )
    data = images.open_data(spec, network)
    runs = rundir.runs_folder(options["runs_dir"])
    again = shlex.join(["dcptool", *sys.argv[1:]])
    fitted = baseline.fit_baseline(
        network, data, seed=options["seed"], device=device, runs=runs, resume_command=again
    )
    return fitted, data


def _folder(model: str, settings: Any, options: dict[str, Any]) -> Path:
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
    if dense["top1"] is not None:
        change = slim["top1"] - dense["top1"]
        rows.append(["top-1", f"{dense['top1']:.2f} %", f"{slim['top1']:.2f} %", f"{change:+.2f}"])
    agreement = document["agreement"]
    seconds = document["seconds"]
    lines = [
        console.table(["", "dense", "slim", ""], rows, align="<>>>"),
        "",
        f"agrees with the dense network on {agreement['top1']:.1f} % of {agreement['images']} "
        "held-out images",
        f"proved: cut equals mask to {document['proof']['difference']:.1e}",
        f"{document['artifact']}, {console.clock(seconds['total'])} "
        f"(selection {console.clock(seconds['selection'])}, "
        f"training {console.clock(seconds['training'])})",
    ]
    return "\n".join(lines)
