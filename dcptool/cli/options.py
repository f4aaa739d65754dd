"""Option sets that several commands share, so that each thing has one spelling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dcptool import console
from dcptool.cli.numbers import FiniteRange

Function = TypeVar("Function", bound=Callable[..., Any])
# NumPy's generators take no more.
LARGEST_SEED = 2**32 - 1


def stack(*decorators: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """One decorator made of several, the first one listed first in --help."""

    def apply(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def reporting_options(function: Function) -> Function:
    """`--json -q -v --debug`; passes `as_json` on and sets up the console."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="Say nothing but results and warnings.")
    @click.option("-v", "--verbose", is_flag=True, help="Say more.")
    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(function)
    def wrapper(*args: Any, as_json: bool, quiet: bool, verbose: bool, **kwargs: Any) -> Any:
        kwargs.pop("debug")
        # The same options may stand before the command.
        before = click.get_current_context().find_root().params
        console.configure(
            quiet=quiet or bool(before.get("quiet")), verbose=verbose or bool(before.get("verbose"))
        )
        return function(*args, as_json=as_json or bool(before.get("as_json")), **kwargs)

    return wrapper  # type: ignore[return-value]


def output_options(function: Function) -> Function:
    """The reporting options of a command that works with the dependencies, which it checks."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from dcptool.cli import requirements

        requirements.check()
        return function(*args, **kwargs)

    return reporting_options(wrapper)  # type: ignore[return-value]


model_options = stack(
    click.option(
        "--no-pretrained",
        "pretrained",
        flag_value=False,
        default=True,
        help="Random weights, drawn from --seed.",
    ),
    click.option(
        "--checkpoint",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Weights: safetensors, or a torch file read without running its code.",
    ),
    click.option("--num-classes", type=click.IntRange(1), help="Size of the classifier."),
    click.option("--img-size", type=click.IntRange(8, 4096), help="Input height and width."),
    click.option(
        "--seed",
        type=click.IntRange(0, LARGEST_SEED),
        default=0,
        show_default=True,
        help="Seed of all that is random.",
    ),
    click.option(
        "--offline", is_flag=True, envvar="DCPTOOL_OFFLINE", help="Never use the network."
    ),
)


def packed(name: str, *decorators: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """A set of options that reaches the command as one dictionary called `name`."""

    def apply(function: Function) -> Function:
        keys: set[str] = set()

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            values = {key: kwargs.pop(key) for key in keys if key in kwargs}
            return function(*args, **{name: values}, **kwargs)

        before = {p.name for p in getattr(wrapper, "__click_params__", [])}
        result = stack(*decorators)(wrapper)
        parameters = getattr(result, "__click_params__", [])
        keys.update(str(p.name) for p in parameters if p.name not in before)
        return result  # type: ignore[return-value]

    return apply


data_options = packed(
    "data",
    click.option(
        "--data-dir",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Images: train/ and val/ or test/ with class folders, or class folders alone.",
    ),
    click.option(
        "--dataset",
        metavar="NAME",
        help="A data set by timm's prefix: torch/cifar10, hfds/NAME, wds/ (with --data-dir).",
    ),
    click.option(
        "--images",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Images without labels, at any depth.",
    ),
    click.option("--train-split", default="train", show_default=True, help="Name of the split."),
    click.option("--val-split", help="Name of the split that choices are made on."),
    click.option(
        "--val-fraction",
        type=FiniteRange(0, 0.9, min_open=True),
        default=0.1,
        show_default=True,
        help="Share of train held out when there is no val; at most 5,000 images.",
    ),
    click.option("--dataset-download", is_flag=True, help="Let torch/ data sets be downloaded."),
    click.option(
        "--mean",
        type=FiniteRange(0, 1),
        nargs=3,
        metavar="R G B",
        help="Mean of the pixels, 0 to 1.",
    ),
    click.option(
        "--std",
        type=FiniteRange(0, min_open=True),
        nargs=3,
        metavar="R G B",
        help="Their standard deviation.",
    ),
    click.option(
        "--interpolation",
        type=click.Choice(["bilinear", "bicubic", "nearest", "lanczos"]),
        help="How images are resized.",
    ),
    click.option(
        "--crop-pct",
        type=FiniteRange(0, 1, min_open=True),
        help="Share of the resized image that the centre crop keeps.",
    ),
    click.option(
        "--skip-bad",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="Leave out up to N unreadable images instead of stopping.",
    ),
)

machine_options = stack(
    click.option("--device", help="cpu, cuda, cuda:1 ...; the GPU if there is one."),
    click.option(
        "-j", "--workers", type=click.IntRange(0, 64), help="Processes that read large images."
    ),
    click.option("--amp", is_flag=True, help="Mixed precision."),
    click.option(
        "--amp-dtype",
        type=click.Choice(["auto", "float16", "bfloat16"]),
        default="auto",
        help="Its type: float16 on a GPU, bfloat16 on a CPU.",
    ),
    click.option(
        "--nproc-per-node",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        help="Start that many processes through torchrun.",
    ),
)

augment_options = packed(
    "augment",
    click.option("--no-aug", "off", is_flag=True, help="No augmentation of training images."),
    click.option("--hflip", type=FiniteRange(0, 1), help="Chance of a mirror image (0.5)."),
    click.option("--pad", type=click.IntRange(0), help="Shift small images by up to so many px."),
    click.option(
        "--scale",
        type=FiniteRange(0, 1, min_open=True),
        nargs=2,
        metavar="LOW HIGH",
        help="Area of random crops.",
    ),
    click.option(
        "--ratio",
        type=FiniteRange(0, min_open=True),
        nargs=2,
        metavar="LOW HIGH",
        help="Aspect of random crops.",
    ),
    click.option("--color-jitter", type=FiniteRange(0), help="Strength of colour changes."),
    click.option(
        "--aa", metavar="POLICY", help="AutoAugment or RandAugment, e.g. rand-m9-mstd0.5."
    ),
    click.option("--reprob", type=FiniteRange(0, 1), default=0.0, help="Random erasing."),
)

# How weights change, wherever they do.
_UPDATES = (
    click.option("--opt", default="sgd", show_default=True, help="Optimizer, by timm's name."),
    click.option(
        "--sched",
        type=click.Choice(["cosine", "step", "constant", "exponential"]),
        default="cosine",
        show_default=True,
        help="How the learning rate falls.",
    ),
    click.option(
        "--decay-rate",
        type=FiniteRange(0, 1, min_open=True),
        default=0.1,
        show_default=True,
        help="Factor of --sched step at each milestone, of exponential at each step.",
    ),
    click.option(
        "--momentum",
        type=FiniteRange(0, 1),
        default=0.9,
        show_default=True,
        help="Share of the last step that the next one keeps.",
    ),
    click.option(
        "--weight-decay",
        type=FiniteRange(0),
        default=1e-4,
        show_default=True,
        help="Pull of the weights towards zero.",
    ),
    click.option("--no-decay-norms", is_flag=True, help="No weight decay on norms and biases."),
    click.option("--clip-grad", type=FiniteRange(0, min_open=True), help="Largest norm."),
    click.option("--smoothing", type=FiniteRange(0, 1), default=0.0, help="Label smoothing."),
    click.option("--mixup", type=FiniteRange(0), default=0.0, help="Mixup alpha."),
    click.option("--cutmix", type=FiniteRange(0), default=0.0, help="CutMix alpha."),
    click.option(
        "--loss",
        type=click.Choice(["cross-entropy", "angular"]),
        default="cross-entropy",
        show_default=True,
        help="What the classifier is trained by; angular is SphereFace's, with margin 4.",
    ),
    click.option(
        "--head-loss",
        type=click.Choice(["cross-entropy", "angular"]),
        default="cross-entropy",
        show_default=True,
        help="What the heads of extra losses are trained by.",
    ),
    click.option(
        "--norms",
        type=click.Choice(["train", "eval"]),
        default="train",
        show_default=True,
        help="Batch norms learn statistics, or keep theirs.",
    ),
    click.option(
        "--channels-last",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Memory layout; auto measures.",
    ),
)

update_options = packed("training", *_UPDATES)

training_options = packed(
    "training",
    click.option("-b", "--batch-size", type=click.IntRange(1), help="Images per step and process."),
    click.option("--epochs", type=FiniteRange(0), help="Passes over the training images."),
    click.option("--steps", type=click.IntRange(0), help="Updates, instead of --epochs."),
    click.option("--max-time", metavar="TIME", help="End after 90s, 20m, 3h."),
    *_UPDATES,
    click.option(
        "--lr",
        type=FiniteRange(0, min_open=True),
        help="Peak learning rate (trained weights: measured, at most 0.005; fresh ones: 0.05).",
    ),
    click.option("--warmup-epochs", type=FiniteRange(0), help="Linear warm-up (5 % of the whole)."),
    click.option(
        "--decay-milestones",
        metavar="E,E,...",
        help="Epochs at which --sched step lowers the rate.",
    ),
    click.option(
        "--sparsity",
        type=FiniteRange(0),
        default=0.0,
        help="L1 pull on the scales of batch norms, for `prune --method slimming`.",
    ),
    click.option(
        "--losses",
        "extra_losses",
        type=click.IntRange(0, 16),
        default=0,
        help="Extra losses, evenly over the depth, while training (wm+).",
    ),
    click.option("--model-ema-decay", type=FiniteRange(0, 1), help="Average the weights."),
    click.option(
        "--log-interval",
        type=click.IntRange(1),
        default=10,
        show_default=True,
        help="Steps between records of the loss.",
    ),
    click.option(
        "--save-every",
        type=FiniteRange(0),
        default=60.0,
        show_default=True,
        help="Seconds between checkpoints within an epoch.",
    ),
    click.option("--report-to", default="", metavar="NAME,...", help="tensorboard, wandb, mlflow."),
)

runs_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the runs (runs, or $DCPTOOL_RUNS).",
)
