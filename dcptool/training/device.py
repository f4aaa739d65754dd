"""Which device computes, and in which precision."""

from __future__ import annotations

import torch

from dcptool.errors import EnvironmentFault, UsageError


def choose_device(name: str | None, local_rank: int = 0) -> str:
    """The device asked for, or a GPU where there is one; exit 5 when it is not there."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as err:
        raise UsageError(f"unknown device {name!r}", try_="--device cpu") from err
    if kind == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault(
            f"there is no GPU for --device {name}",
            why="torch finds no CUDA device",
            try_="--device cpu",
        )
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"cannot train on {name!r}", why="cpu and cuda are supported")
    if name == "cuda":
        return f"cuda:{local_rank}"
    if kind == "cuda" and int(name.partition(":")[2]) >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"there is no GPU number {name.partition(':')[2]}",
            why=f"torch finds {torch.cuda.device_count()}",
            try_="--device cuda",
        )
    return name


def amp_dtype(name: str | None, device: str) -> torch.dtype | None:
    """The type for mixed precision, None for none; `auto` takes what the device has."""
    if name is None:
        return None
    if name == "auto":
        name = "float16" if device.startswith("cuda") else "bfloat16"
    if name == "float16" and not device.startswith("cuda"):
        raise EnvironmentFault(
            "float16 needs a GPU", why=f"the device is {device}", try_="--amp-dtype bfloat16"
        )
    return torch.float16 if name == "float16" else torch.bfloat16
