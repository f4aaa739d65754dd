"""The options that say which channels stay, and what they come to."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcptool.cli import idle
from dcptool.cli.options import packed
from dcptool.errors import InputError, UsageError

if TYPE_CHECKING:
    from fractions import Fraction

    from dcptool.selection.settings import Budget, Selection


LARGEST_MULTIPLE = 256
BUDGETS = ("rate", "epsilon", "plan", "target_macs", "target_params", "target_latency")
SEARCH = ("max_accuracy_drop", "smallest_by")


class CountOrAuto(click.types.StringParamType):
    """A count of at least one, or one of `words`, which come out as they are."""

    name = "count"
    words: tuple[str, ...] = ("auto",)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read what was typed."""
        text = str(value)
        if text in self.words:
            return text
        if not (text.isascii() and text.isdigit() and int(text[:9]) >= 1 and len(text) < 10):
            words = " nor ".join(("a count of at least 1", *self.words))
            self.fail(f"{value!r} is neither {words}.", param, ctx)
        return int(text)


class RoundTo(CountOrAuto):
    """A multiple, `auto` or `measure`."""

    name = "multiple"
    words = ("auto", "measure")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read what was typed."""
        found = super().convert(value, param, ctx)
        if isinstance(found, int) and found > LARGEST_MULTIPLE:
            self.fail(f"{value} is more than {LARGEST_MULTIPLE}.", param, ctx)
        return found


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
        "--target-macs",
        metavar="X",
        help="MACs of the whole network: a share of dense (0.5) or a count (2.1e9).",
    ),
    click.option(
        "--target-params", metavar="X", help="Parameters: a share of dense (0.5) or a count (1e6)."
    ),
    click.option(
        "--target-latency",
        metavar="X",
        help="Measured time in onnxruntime: a share of dense (0.5) or milliseconds (12ms).",
    ),
    click.option(
        "--max-accuracy-drop",
        type=click.FloatRange(0, 100),
        metavar="POINTS",
        help="Find the smallest network that loses at most this much on held-out images.",
    ),
    click.option(
        "--smallest-by",
        type=click.Choice(["macs", "params", "latency"]),
        default="macs",
        show_default=True,
        help="What is to be small with --max-accuracy-drop.",
    ),
    click.option(
        "--provider",
        default="cpu",
        show_default=True,
        help="onnxruntime provider that --round-to and --target-latency are for.",
    ),
    click.option(
        "--latency-batch",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Images at once for --target-latency and --round-to measure.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(0),
        default=0,
        help="Threads of onnxruntime for the same.  [default: all cores]",
    ),
    click.option(
        "--round-to",
        type=RoundTo(),
        default="auto",
        show_default=True,
        metavar="auto|measure|N",
        help="Widths in multiples that the hardware likes: from a table, timed here, or N. "
        "1 keeps exact counts.",
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
        type=click.Choice(["dcp", "random", "l1", "apoz", "thinet", "cp", "slimming", "wm", "wm+"]),
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
        type=click.IntRange(0),
        default=0,
        show_default="1 with --solver sgd, else 0",
        help="Walks of training on the joint loss: after each channel of --solver sgd, or after "
        "each layer that was solved for.",
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
        help="Weight of the discrimination-aware loss; inf leaves it alone. "
        "Without training the network's own loss takes the place of the heads'.  "
        "[default: 1; 0 with --no-training]",
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
        default=128,
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
        default=1.0,
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


def settings_of(given: dict[str, Any], seed: int, *, training: bool) -> Selection:
    """The selection that the options ask for; all that does not fit is said at once."""
    from dcptool.pipeline.prune_record import read_orders
    from dcptool.selection.budget import parse_rate
    from dcptool.selection.settings import Selection

    named = [key.replace("_", "-") for key in (*BUDGETS, SEARCH[0]) if given[key] is not None]
    faults = []
    if len(named) > 1:
        faults.append(f"--{' and --'.join(named)} exclude each other")
    if not named:
        faults.append("one of --rate, --epsilon, --target-macs ... and --plan is needed")
    if given["widths"] == "curves" and given["rate"] is None:
        faults.append("--widths curves spreads the MACs of a --rate")
    if given["widths"] == "curves" and given["rates"]:
        faults.append("--rate-of and --widths curves exclude each other")
    if given["method"] == "slimming" and given["plan"] is None:
        if given["rate"] is None or given["rates"]:
            faults.append("--method slimming has one threshold for all groups, which a --rate sets")
        if given["widths"] == "curves":
            faults.append("--method slimming and --widths curves exclude each other")
    if given["rates"] and given["rate"] is None:
        faults.append("--rate-of needs a --rate for all other groups")
    if given["epsilon"] is not None and not 0 < given["epsilon"] < 1:
        faults.append(f"--epsilon {given['epsilon']:g} is out of range: 0 < epsilon < 1")
    if given["epsilon"] is not None and given["method"] not in ("dcp", "thinet"):
        faults.append(f"--epsilon needs a loss to watch, which --method {given['method']} has not")
    if given["max_accuracy_drop"] is not None and math.isnan(given["max_accuracy_drop"]):
        faults.append("--max-accuracy-drop nan is no limit")
    if given["discrimination"] is not None and math.isnan(given["discrimination"]):
        faults.append("--lambda nan is no weight")
    if not math.isfinite(given["cache_gb"]):
        faults.append(f"--cache-gb {given['cache_gb']:g} is no amount of memory")
    loop = given["solver"] == "sgd"
    defaults = {"target": "conv", "score": "gradient"} if loop else _CLOSED_FORM
    given = {k: defaults[k] if k in defaults and v is None else v for k, v in given.items()}
    if loop and (given["target"], given["score"]) != ("conv", "gradient"):
        faults.append("--solver sgd is the paper's loop: --target conv and --score gradient")
    if loop and given["epsilon"] is not None and given["round_to"] not in ("auto", 1):
        faults.append("--solver sgd with --epsilon keeps exact counts: --round-to 1")
    faults += _idle(given, training=training)
    rate, rates, budget = None, {}, None
    try:
        budget = _budget(given)
        rate = None if given["rate"] is None else parse_rate(given["rate"])
        rates = dict(_rate_of(text) for text in given["rates"])
    except UsageError as err:
        faults.append(f"{err.message}: {err.why}")
    if faults:
        raise UsageError(
            "the options of prune do not fit",
            why="\n".join(faults),
            try_=_example(given),
        )
    apart = (*BUDGETS, *SEARCH, "rates", "reuse", "provider", "latency_batch", "threads")
    chosen = {k: v for k, v in given.items() if k not in apart}
    chosen["epsilon"] = given["epsilon"]
    if chosen["discrimination"] is None:
        chosen["discrimination"] = 1.0 if training else 0.0
    chosen["round_to"] = _multiple(given, loop=loop)
    chosen["samples"] = None if given["samples"] == "auto" else given["samples"]
    plan = _plan(given["plan"]) if given["plan"] is not None else None
    reuse = read_orders(given["reuse"], given["method"]) if given["reuse"] is not None else {}
    return Selection(
        rate=rate,
        rates=rates,
        plan=plan,
        budget=budget,
        reuse=reuse,
        seed=seed,
        **chosen,
    )


def _idle(given: dict[str, Any], *, training: bool) -> list[str]:
    """Options that were typed and play no part; a recipe may set them for all its variants."""
    context = click.get_current_context(silent=True)
    if context is None or context.info_name != "prune":
        return []
    searches = given["max_accuracy_drop"] is not None
    times = (
        given["target_latency"] is not None
        or given["round_to"] == "measure"
        or (searches and given["smallest_by"] == "latency")
    )
    known = given["discrimination"]
    is_aware = given["method"] == "dcp" and (training if known is None else known > 0)
    timing = "--target-latency, --round-to measure or --smallest-by latency"
    parts = (
        ("smallest_by", searches, "--max-accuracy-drop"),
        ("latency_batch", times, timing),
        ("threads", times, timing),
        ("loop_epochs", given["solver"] == "sgd" or is_aware, "--solver sgd or a --lambda"),
    )
    return [
        f"{flag} does nothing without {what}"
        for name, has_part, what in parts
        if not has_part
        for flag in idle.typed((name,))
    ]


def _example(given: dict[str, Any]) -> str:
    """A command that works on the model that was typed; a rate above 1 was meant in percent."""
    context = click.get_current_context(silent=True)
    model = context.params.get("model") if context else None
    try:
        percent = float(given["rate"] or 0)
    except ValueError:
        percent = 0.0
    rate = f"{percent / 100:g}" if 1 < percent < 100 else "0.3"
    return shlex.join(["dcptool", "prune", model or "resnet50", "--rate", rate])


def condition_of(given: dict[str, Any]) -> Budget:
    """How milliseconds are meant."""
    from dcptool.selection.settings import Budget

    return Budget("latency", 1.0, True, given["provider"], given["latency_batch"], given["threads"])


def _budget(given: dict[str, Any]) -> Budget | None:
    """One limit for the whole network, as it was written."""
    for kind in ("macs", "params", "latency"):
        text = given[f"target_{kind}"]
        if text is None:
            continue
        number = str(text)
        is_time = kind == "latency" and number.endswith("ms")
        try:
            value = float(number.removesuffix("ms") if is_time else number)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf or (kind == "latency" and not is_time and value >= 1):
            example = "0.5 or 12ms" if kind == "latency" else "0.5 (a share) or 2.1e9"
            raise UsageError(f"--target-{kind} {text} is no target", why=f"e.g. {example}")
        return replace(
            condition_of(given), kind=kind, value=value, is_share=not is_time and value <= 1
        )
    return None


def _multiple(given: dict[str, Any], *, loop: bool) -> int:
    """The multiple of widths; one that is to be measured is not known yet."""
    if isinstance(given["round_to"], int):
        return given["round_to"]
    if loop or given["round_to"] == "measure":
        return 1
    from dcptool.deploy.granularity import auto

    return auto(given["provider"])


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
