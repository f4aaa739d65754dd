"""Features of all samples, in chunks: in memory while they fit, on disk above a limit.

What is on disk is read chunk by chunk and not mapped, so that it does not count as memory.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dcptool.errors import EnvironmentFault


@dataclass(frozen=True)
class Spilled:
    """A tensor in a file, with its values in the order that they had in memory."""

    path: Path
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """The values."""
        data = bytearray(self.path.read_bytes())
        flat = torch.frombuffer(data, dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride)


Kept = Tensor | Spilled


def give_back() -> None:
    """Let the C library hand freed memory to the system: blocks of all sizes leave gaps in it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others need not
        if trim is not None:
            trim(0)


@dataclass
class Room:
    """Memory shared by all stores of a run; what does not fit goes to files in `folder`.

    `device` is where the work is done; what is kept stays in main memory.
    """

    limit_bytes: int
    folder: Path | None = None
    device: str = "cpu"
    used: int = 0
    _scratch: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)
    _count: int = 0

    def keep(self, tensor: Tensor) -> Kept:
        """The same values, in memory or in a file."""
        if self.fits(tensor):
            self.used += _size(tensor)
            return tensor
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix=".features-", dir=self.folder)
        self._count += 1
        path = Path(self._scratch.name) / f"{self._count}.bin"
        shape, stride = tuple(tensor.shape), tensor.stride()
        try:
            tensor.as_strided((tensor.numel(),), (1,)).numpy().tofile(path)
        except OSError as err:
            raise EnvironmentFault(
                f"cannot keep features in {path.parent}",
                why=os.strerror(err.errno) if err.errno else f"the disk is full: {err}",
                try_="the same command with TMPDIR=DIR on a disk with room, or a larger --cache-gb",
            ) from err
        return Spilled(path, shape, stride, tensor.dtype)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor would be kept in memory."""
        return self.used + _size(tensor) <= self.limit_bytes or not _size(tensor)

    def release(self, kept: Kept) -> None:
        """Give the room of a kept tensor back."""
        if isinstance(kept, Spilled):
            kept.path.unlink(missing_ok=True)
        else:
            self.used -= _size(kept)

    def close(self) -> None:
        """Remove all files."""
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


@dataclass
class Store:
    """A list of chunks of one or more tensors each."""

    room: Room
    chunks: list[tuple[Kept, ...]] = field(default_factory=list)

    def add(self, *tensors: Tensor) -> None:
        """Keep one chunk."""
        self.chunks.append(self._kept(tensors))

    def replace(self, number: int, *tensors: Tensor) -> None:
        """Keep other tensors in place of one chunk."""
        for kept in self.chunks[number]:
            self.room.release(kept)
        self.chunks[number] = self._kept(tensors)

    def _kept(self, tensors: tuple[Tensor, ...]) -> tuple[Kept, ...]:
        return tuple(self.room.keep(_compact(t.detach().cpu())) for t in tensors)

    def clear(self) -> None:
        """Give all room back."""
        for chunk in self.chunks:
            for kept in chunk:
                self.room.release(kept)
        self.chunks.clear()

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (self.at(number) for number in range(len(self.chunks)))

    def at(self, number: int) -> tuple[Tensor, ...]:
        """One chunk, on the device that the work is done on."""
        found = (k.read() if isinstance(k, Spilled) else k for k in self.chunks[number])
        return tuple(tensor.to(self.room.device) for tensor in found)

    def __len__(self) -> int:
        return len(self.chunks)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _compact(tensor: Tensor) -> Tensor:
    """The same values without gaps; channels stay last where they are."""
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if is_last else tensor.contiguous()
