"""Which points of a study ask for more than can be cut, told before the first one costs anything.

Builds networks with random weights and fetches none: what a width costs is not in the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dcptool.errors import UsageError
from dcptool.network import artifact
from dcptool.network.base import Network
from dcptool.pipeline import widths
from dcptool.selection.settings import Selection
from dcptool.training.data import SMALL, DataSpec, effective_input, small_size

BUILTIN_CLASSES = 10


@dataclass(frozen=True)
class Asked:
    """What a point asks of `prune`: its options, and the selection that they come to."""

    point: str
    model: str
    options: Mapping[str, Any]
    selection: Selection


def faults(points: Sequence[Asked]) -> dict[str, UsageError]:
    """The points whose target no widths can meet, each with the reason."""
    found: dict[str, UsageError] = {}
    for asked in _worth_a_look(points):
        try:
            widths.check_reach(_network(asked), asked.selection)
        except UsageError as err:
            found[asked.point] = err
    return found


def _worth_a_look(points: Sequence[Asked]) -> list[Asked]:
    """Points with a target; of milliseconds, which must be measured, only the hardest."""
    found: list[Asked] = []
    timed: dict[float, Asked] = {}
    for asked in points:
        budget = asked.selection.budget
        if budget is not None and budget.kind == "latency":
            timed[budget.value] = asked
        elif budget is not None:
            found.append(asked)
    return found + ([timed[min(timed)]] if timed else [])


def _network(asked: Asked) -> Network:
    """The network as `prune` will see it."""
    options = asked.options
    is_artifact = artifact.is_artifact(asked.model)
    is_named = any(options[key] for key in ("data_dir", "dataset", "images"))
    # Without images of the user's own a network gets a classifier for the built-in ones.
    own = is_named or is_artifact or options["checkpoint"] is not None
    network = artifact.open_target(
        asked.model,
        pretrained=False,
        num_classes=options["num_classes"] if own else BUILTIN_CLASSES,
        img_size=options["img_size"] if own else None,
        offline=options["offline"],
    )
    spec = DataSpec(img_size=options["img_size"])
    if not is_named and spec.img_size is None and max(network.input.size[1:]) > SMALL:
        spec = replace(spec, img_size=small_size(network))
    network.input = effective_input(spec, network)
    return network
