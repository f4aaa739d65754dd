"""Features of all samples, in chunks: in memory while they fit, on disk above a limit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


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
    _files: dict[int, Path] = field(default_factory=dict, repr=False)

    def keep(self, tensor: Tensor) -> Tensor:
        """The same values, in memory or in a file."""
        size = tensor.numel() * tensor.element_size()
        if self.used + size <= self.limit_bytes:
            self.used += size
            return tensor
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix=".features-", dir=self.folder)
        self._count += 1
        path = Path(self._scratch.name) / f"{self._count}.bin"
        array = np.memmap(path, dtype=_numpy_type(tensor), mode="w+", shape=tuple(tensor.shape))
        array[...] = tensor.numpy()
        kept = torch.from_numpy(array)
        self._files[kept.data_ptr()] = path
        return kept

    def release(self, tensor: Tensor) -> None:
        """Give the room of a kept tensor back."""
        path = self._files.pop(tensor.data_ptr(), None)
        if path is not None:
            path.unlink(missing_ok=True)
        else:
            self.used -= tensor.numel() * tensor.element_size()

    def close(self) -> None:
        """Remove all files."""
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
            self._files.clear()


def _numpy_type(tensor: Tensor) -> np.dtype:
    return tensor.numpy().dtype


@dataclass
class Store:
    """A list of chunks of one or more tensors each."""

    room: Room
    chunks: list[tuple[Tensor, ...]] = field(default_factory=list)

    def add(self, *tensors: Tensor) -> None:
        """Keep one chunk."""
        self.chunks.append(tuple(self.room.keep(t.detach().cpu().contiguous()) for t in tensors))

    def clear(self) -> None:
        """Give all room back."""
        for chunk in self.chunks:
            for tensor in chunk:
                self.room.release(tensor)
        self.chunks.clear()

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (self.at(number) for number in range(len(self.chunks)))

    def at(self, number: int) -> tuple[Tensor, ...]:
        """One chunk, on the device that the work is done on."""
        return tuple(tensor.to(self.room.device) for tensor in self.chunks[number])

    def __len__(self) -> int:
        return len(self.chunks)
