"""Many processes as one: what torchrun says in the environment, and the few collectives used.

Every rank trains on its share of each batch; rank 0 alone writes. `SINGLE` is the same
interface for one process, where each of these is free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from dcptool.errors import EnvironmentFault, InputError

Value = TypeVar("Value")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Dist:
    """This process among its equals."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    backend: str = ""

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files and prints results."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all ranks, in place."""
        if self.world > 1:
            _guard(lambda: torch.distributed.all_reduce(tensor))
        return tensor

    def largest(self, value: float) -> float:
        """The largest of one number over all ranks."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device())
        _guard(lambda: torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX))
        return float(tensor.item())

    def broadcast(self, value: Value) -> Value:
        """What rank 0 holds, on every rank."""
        if self.world == 1:
            return value
        box: list[Value] = [value]
        _guard(lambda: torch.distributed.broadcast_object_list(box, src=0))
        return box[0]

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Make tensors on every rank equal to those of rank 0, in place."""
        if self.world > 1:
            for tensor in tensors:
                _guard(lambda one=tensor: torch.distributed.broadcast(one.data, src=0))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            _guard(torch.distributed.barrier)

    def agree(self, facts: Mapping[str, str]) -> None:
        """Refuse to go on when ranks differ on something that must be the same."""
        if self.world == 1:
            return
        found: list[Mapping[str, str]] = [{}] * self.world
        _guard(lambda: torch.distributed.all_gather_object(found, dict(facts)))
        differ = [
            f"{key}: rank 0 has {found[0].get(key)}, rank {rank} {one.get(key)}"
            for rank, one in enumerate(found)
            for key in sorted({*found[0], *one})
            if one.get(key) != found[0].get(key)
        ]
        if differ:
            raise InputError(
                f"the processes disagree on {differ[0].partition(':')[0]}",
                why="\n".join(differ[:8]),
                try_="give every node the same files, options and version",
            )

    def _device(self) -> str:
        return f"cuda:{self.local_rank}" if self.backend == "nccl" else "cpu"


SINGLE = Dist()


def _guard(collective: object) -> None:
    try:
        collective()  # type: ignore[operator]
    except (RuntimeError, torch.distributed.DistError) as err:
        first = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise EnvironmentFault(
            "another process of this run is gone or hangs",
            why=first,
            try_="look at the messages of the other ranks, then run again with --resume",
        ) from err


def is_launched() -> bool:
    """Whether torchrun (or something that speaks like it) started this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def start(device: str = "cpu") -> Dist:
    """Join the process group that the environment describes; one process needs none."""
    if not is_launched():
        return SINGLE
    timeout_s = float(os.environ.get("DCPTOOL_DIST_TIMEOUT", TIMEOUT_S))
    if torch.distributed.is_initialized():
        backend = str(torch.distributed.get_backend())
    else:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        if backend == "nccl":
            # Collectives of objects go through the current device, which is the first otherwise.
            torch.cuda.set_device(device)
        try:
            torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as err:
            raise EnvironmentFault(
                "cannot join the other processes", why=str(err).splitlines()[0]
            ) from err
    return Dist(
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        backend=backend,
    )


def stop() -> None:
    """Leave the process group, if there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
