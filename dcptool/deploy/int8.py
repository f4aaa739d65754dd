"""The INT8 step of `export`: quantize, measure what it costs, judge it.

Accuracy is measured before and after on the same labelled images; where there are none, the
agreement of the two graphs on the calibration images is all that can be said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from dcptool import console
from dcptool.deploy import quantize
from dcptool.deploy.parity import Array, Function
from dcptool.deploy.quantize import predictor
from dcptool.errors import GateFailed, UsageError

AUTO = "auto"


@dataclass(frozen=True)
class Images:
    """Normalised float batches to calibrate with, and how to measure top-1 where labels exist.

    `top1` reports; `choice_top1` is what layers are chosen by, on images of its own.
    """

    batches: Sequence[Array]
    top1: Callable[[Function], float] | None = None
    choice_top1: Callable[[Function], float] | None = None
    source: str = ""


@dataclass(frozen=True)
class Settings:
    """How to quantize, and how much accuracy it may cost in points."""

    calibration: str = "minmax"
    skip: tuple[str, ...] = ()
    max_accuracy_drop: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What quantizing did."""

    top1_before: float | None
    top1_after: float | None
    agreement: float
    calibration: str
    images: int
    skipped: tuple[str, ...]
    quantized: int

    def document(self) -> dict[str, object]:
        """The names of the JSON contract."""
        return {
            "top1_before": self.top1_before,
            "top1_after": self.top1_after,
            "agreement": self.agreement,
            "calibration": self.calibration,
            "images": self.images,
            "layers": self.quantized,
            "skipped": list(self.skipped),
        }


def apply(
    proto: onnx.ModelProto, images: Images, settings: Settings
) -> tuple[onnx.ModelProto, Outcome]:
    """Quantize a finished float graph; exit 4 when it costs more than allowed."""
    if settings.max_accuracy_drop is not None and images.top1 is None:
        raise UsageError(
            "--max-accuracy-drop needs labelled images of the network's classes",
            try_="--data-dir FOLDER with one folder for each class",
        )
    automatic = settings.skip == (AUTO,)
    named = () if automatic else quantize.named_layers(proto, settings.skip)
    before = predictor(proto)
    top1_before = None if images.top1 is None else images.top1(before)
    ranges = quantize.calibrate(proto, images.batches, settings.calibration)
    if automatic:
        limit = quantize.AUTO_LIMIT
        if settings.max_accuracy_drop is not None:
            limit = settings.max_accuracy_drop

        measure = images.choice_top1
        choice_before = None if measure is None else measure(before)

        def drop(model: onnx.ModelProto) -> float:
            if measure is not None and choice_before is not None:
                return choice_before - measure(predictor(model))
            return 100.0 - _agreement(before, predictor(model), images.batches)

        result, skipped = quantize.quantize_auto(ranges, images.batches[0], drop, limit)
    else:
        result, skipped = quantize.quantize(ranges, skip=named), list(named)
    after = predictor(result)
    outcome = Outcome(
        top1_before,
        None if images.top1 is None else images.top1(after),
        _agreement(before, after, images.batches),
        settings.calibration,
        ranges.images,
        tuple(skipped),
        len(quantize.layers(proto)) - len(skipped),
    )
    _judge(outcome, settings.max_accuracy_drop)
    return result, outcome


def _agreement(before: Function, after: Function, batches: Sequence[Array]) -> float:
    same = [
        np.asarray(before(batch)).argmax(-1) == np.asarray(after(batch)).argmax(-1)
        for batch in batches
    ]
    return 100.0 * float(np.concatenate(same).mean())


def _judge(outcome: Outcome, limit: float | None) -> None:
    if outcome.top1_before is None or outcome.top1_after is None:
        console.note("no labels for the network's classes: INT8 is judged by agreement alone")
        return
    lost = outcome.top1_before - outcome.top1_after
    if limit is not None and lost > limit:
        raise GateFailed(
            f"INT8 loses {lost:.2f} points of accuracy; {limit:g} are allowed; nothing was written",
            why=f"top-1 {outcome.top1_before:.2f} before, {outcome.top1_after:.2f} after, "
            f"calibrated by {outcome.calibration} on {outcome.images} images",
            try_="--int8-skip auto, another --calibration, or more --samples",
        )
