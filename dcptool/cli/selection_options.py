"""The options that say which channels stay, and what they come to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcptool.cli.options import packed
from dcptool.errors import InputError, UsageError

if TYPE_CHECKING:
    from fractions import Fraction

    from dcptool.selection.settings import Selection


class CountOrAuto(click.types.StringParamType):
    """A count of at least one, or `auto`, which comes out as it is."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read what was typed."""
        text = str(value)
        if text == "auto":
            return text
        if not (text.isascii() and text.isdigit() and int(text[:9]) >= 1 and len(text) < 10):
            self.fail(f"{value!r} is neither a count of at least 1 nor auto.", param, ctx)
        return int(text)


selection_options = packed(
    "selection",
    click.option("--rate", metavar="R", help="Share of channels to remove, 0 <= R < 1."),
    click.option(
        "--rate-of",
        "rates",
        multiple=True,
        metavar="PATTERN=R",
        help="Another rate for groups of this name, e.g. 'layer1.*=0.1'; repeatable.",
    ),
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
        "--widths",
        type=click.Choice(["uniform", "curves"]),
        default="uniform",
        show_default=True,
        help="The rate in every group, or at the same MACs where it loses least.",
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
        "--loop-epochs",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Passes of --solver sgd over the samples after each channel.",
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
        help="Weight of the discrimination-aware loss; inf leaves it alone.",
    ),
    click.option(
        "--samples",
        type=CountOrAuto(),
        default="512",
        show_default=True,
        metavar="N|auto",
        help="Training images that channels are chosen on; auto stops when more change little.",
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
        default=2.0,
        show_default=True,
        help="Features above this much memory go to disk.",
    ),
    click.option(
        "--reuse",
        type=click.Path(path_type=Path),
        metavar="RUN",
        help="Take the orders that an earlier prune recorded, where they hold.",
    ),
)

_CLOSED_FORM = {"target": "block", "score": "rise"}


def settings_of(given: dict[str, Any], seed: int, batch_size: int) -> Selection:
    """The selection that the options ask for; all that does not fit is said at once."""
    from dcptool.pipeline.prune_record import read_orders
    from dcptool.selection.budget import parse_rate
    from dcptool.selection.settings import Selection

    named = [key for key in ("rate", "epsilon", "plan") if given[key] is not None]
    faults = []
    if len(named) > 1:
        faults.append(f"--{' and --'.join(named)} exclude each other")
    if not named:
        faults.append("one of --rate, --epsilon and --plan is needed")
    if given["widths"] == "curves" and given["rate"] is None:
        faults.append("--widths curves spreads the MACs of a --rate")
    if given["rates"] and given["rate"] is None:
        faults.append("--rate-of needs a --rate for all other groups")
    if given["epsilon"] is not None and not 0 < given["epsilon"] < 1:
        faults.append(f"--epsilon {given['epsilon']:g} is out of range: 0 < epsilon < 1")
    if given["epsilon"] is not None and given["method"] not in ("dcp", "thinet"):
        faults.append(f"--epsilon needs a loss to watch, which --method {given['method']} has not")
    if math.isnan(given["discrimination"]):
        faults.append("--lambda nan is no weight")
    if not math.isfinite(given["cache_gb"]):
        faults.append(f"--cache-gb {given['cache_gb']:g} is no amount of memory")
    loop = given["solver"] == "sgd"
    defaults = {"target": "conv", "score": "gradient"} if loop else _CLOSED_FORM
    given = {k: defaults[k] if k in defaults and v is None else v for k, v in given.items()}
    if loop and (given["target"], given["score"]) != ("conv", "gradient"):
        faults.append("--solver sgd is the paper's loop: --target conv and --score gradient")
    rate, rates = None, {}
    try:
        rate = None if given["rate"] is None else parse_rate(given["rate"])
        rates = dict(_rate_of(text) for text in given["rates"])
    except UsageError as err:
        faults.append(f"{err.message}: {err.why}")
    if faults:
        raise UsageError(
            "the options of prune do not fit",
            why="\n".join(faults),
            try_="dcptool prune resnet50 --rate 0.3",
        )
    chosen = {k: v for k, v in given.items() if k not in ("rate", "rates", "plan", "reuse")}
    chosen["samples"] = None if given["samples"] == "auto" else given["samples"]
    plan = _plan(given["plan"]) if given["plan"] is not None else None
    reuse = read_orders(given["reuse"]) if given["reuse"] is not None else {}
    return Selection(
        rate=rate,
        rates=rates,
        plan=plan,
        reuse=reuse,
        seed=seed,
        batch_size=batch_size,
        **chosen,
    )


def _rate_of(text: str) -> tuple[str, Fraction]:
    from dcptool.selection.budget import parse_rate

    pattern, sign, rate = text.rpartition("=")
    if not sign or not pattern:
        raise UsageError(f"--rate-of {text!r} is no PATTERN=R", why="e.g. 'layer1.*=0.1'")
    return pattern, parse_rate(rate)


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
