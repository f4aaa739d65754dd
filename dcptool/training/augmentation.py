"""Whether the asked augmentation can be made, before the first image is read in a worker."""

from __future__ import annotations

from dcptool.errors import UsageError
from dcptool.network.models import Input
from dcptool.training.loader import Augment, training_transform


def check_augment(augment: Augment) -> None:
    """Refuse ranges without an inside and policies that timm does not know, all at once."""
    faults = [
        f"--{name} {given[0]:g} {given[1]:g}: the low end comes first"
        for name, given in (("scale", augment.scale), ("ratio", augment.ratio))
        if given is not None and given[0] > given[1]
    ]
    if augment.aa and not _is_policy(augment.aa):
        faults.append(f"--aa {augment.aa}: timm has no such policy")
    if faults:
        raise UsageError(
            "training images cannot be varied so",
            why="\n".join(faults),
            try_="--scale 0.5 1, --ratio 0.75 1.33, --aa rand-m9-mstd0.5, augmix-m3 or original",
        )


def _is_policy(text: str) -> bool:
    seen = Input((3, 32, 32), (0.5,) * 3, (0.5,) * 3)
    try:
        training_transform(seen, Augment(aa=text))
    except (AssertionError, KeyError, ValueError, TypeError):  # how timm says no
        return False
    return True
