"""Option sets that several commands share, so that each thing has one spelling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dcptool import console

Function = TypeVar("Function", bound=Callable[..., Any])


def stack(*decorators: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """One decorator made of several, the first one listed first in --help."""

    def apply(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def output_options(function: Function) -> Function:
    """`--json -q -v --debug`; passes `as_json` on and sets up the console."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="Say nothing but results and warnings.")
    @click.option("-v", "--verbose", is_flag=True, help="Say more.")
    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(function)
    def wrapper(*args: Any, quiet: bool, verbose: bool, debug: bool, **kwargs: Any) -> Any:
        console.configure(quiet=quiet, verbose=verbose)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


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
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of all that is random."),
    click.option("--offline", is_flag=True, envvar="DCPTOOL_OFFLINE", help="Never use the network."),
)
