"""What the closed form can be asked: how wide a layer may be, and which choices go by the loop."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dcptool.errors import InputError
from dcptool.network.graph import Group
from dcptool.selection.methods import METHODS
from dcptool.selection.settings import Selection

# Methods that the paper trains channel by channel; the others have a closed form of their own.
LOOPED = ("dcp", "random")
# Columns of a layer that the closed form still takes: four matrices of this size are 5 GB.
MOST_COLUMNS = 12288


def columns_of(layer: nn.Module) -> int:
    """Inputs that a layer weighs at one position."""
    weight = layer.weight
    return weight[0].numel() if isinstance(weight, Tensor) else 0


def is_looped(settings: Selection) -> bool:
    """Whether channels are chosen by the paper's loop."""
    return settings.solver == "sgd" and settings.method in LOOPED


def too_wide(settings: Selection, groups: Sequence[Group], module: nn.Module) -> InputError | None:
    """What is to be said of groups whose readers are all too wide for the closed form.

    Where widths come from curves, these are in closed form, whatever chooses the channels.
    """
    by_curves = settings.budget is not None or settings.widths == "curves"
    if not by_curves and (not METHODS[settings.method].needs_data or is_looped(settings)):
        return None
    wide: dict[str, str] = {}
    for group in groups:
        columns = {name: columns_of(module.get_submodule(name)) for name in group.consumers}
        if settings.kept(group) != len(group.units) and min(columns.values()) > MOST_COLUMNS:
            name = min(columns, key=columns.__getitem__)
            wide[group.name] = f"{name} reads {columns[name]} columns"
    if not wide:
        return None
    keep = " ".join(f"--keep {name}" for name in wide)
    return InputError(
        f"cannot choose channels of {', '.join(wide)} in closed form",
        why=f"{', '.join(wide.values())}; {MOST_COLUMNS} is the most",
        try_=keep if by_curves else f"{keep}, --solver sgd, or --method l1",
    )
