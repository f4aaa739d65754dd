"""Memory that training will take, held against what this machine has, before hours are spent.

The estimate is of what a backward pass keeps: the outputs of all layers for one batch, and the
weights with gradients, momentum and a copy. Layers that work in place make it smaller than
that, so only twice what can be had is refused, and less is told.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch
from torch import Tensor, nn

from dcptool import console
from dcptool.errors import EnvironmentFault
from dcptool.network.trace import meta_copy

COPIES = 4


def bytes_of(module: nn.Module) -> int:
    """What the weights take, in memory and on the disk."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def kept_per_image(module: nn.Module, size: tuple[int, ...]) -> int:
    """Bytes of the outputs of all layers for one image."""
    copy = meta_copy(module).eval()
    total = [0]

    def count(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            total[0] += output.numel() * output.element_size()

    leaves = [one for one in copy.modules() if not any(True for _ in one.children())]
    handles = [one.register_forward_hook(count) for one in leaves]
    try:
        with torch.no_grad():
            copy(torch.empty((1, *size), device="meta"))
    finally:
        for handle in handles:
            handle.remove()
    return total[0]


def free_bytes() -> int | None:
    """What this process may still take: of the machine, its container and its own limit."""
    found = [*_of_machine(), *_of_container(), *_of_process()]
    return max(0, min(found)) if found else None


def _of_machine() -> list[int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]


def _of_container() -> list[int]:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / f"memory.{n}").read_text().strip() for n in ("max", "current"))
        return [int(limit) - int(used)] if limit.isdigit() else []
    except (OSError, ValueError):
        return []


def _of_process() -> list[int]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return []
    return [limit - pages * resource.getpagesize()]


def require_memory(module: nn.Module, size: tuple[int, ...], batch_size: int) -> None:
    """Refuse batches that cannot fit into memory, and name a size that can."""
    free = free_bytes()
    if free is None:
        return
    try:
        image = kept_per_image(module, size)
    except Exception as err:  # a forward that needs numbers tells nothing without them
        console.detail(f"memory is not estimated: {err}")
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fixed, each = COPIES * bytes_of(module) * ranks, image * ranks
    need = fixed + batch_size * each
    if need <= free:
        return
    fits = max(1, (free - fixed) // max(each, 1))
    fits = 1 << (min(fits, batch_size).bit_length() - 1)
    told = f"about {_gb(need)} are needed, {_gb(free)} can be had"
    if need <= 2 * free:
        console.warn(f"batches of {batch_size} may run out of memory: {told}")
        return
    raise EnvironmentFault(
        f"batches of {batch_size} would run out of memory",
        why=told,
        try_=f"the same command with --batch-size {fits}",
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
