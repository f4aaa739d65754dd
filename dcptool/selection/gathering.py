"""Rows of a layer on their way into moments: of each half of the images, and some to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dcptool.selection.gram import Moments
from dcptool.selection.rectify import Sample
from dcptool.selection.targets import Bounds, is_erased

# Adds tensors up over all processes, in place.
AddUp = Callable[..., None]
ROWS_AT_ONCE = 4096


class Gathering:
    """Takes rows batch by batch; `keep` of each of the `images` to come are kept as they are."""

    def __init__(self, units: Tensor, outputs: int, keep: int, images: int) -> None:
        self.halves = Moments.empty(units, outputs), Moments.empty(units, outputs)
        self.keep = keep
        self._images = images
        self._kept: tuple[Tensor, ...] = ()
        self._filled = 0

    def add(self, rows: Tensor, targets: Tensor, zeros: Tensor, images: int, cut: int) -> None:
        """Take the rows of a batch of `images`; the first `cut` are of the first half."""
        if self.keep:
            self._take([_of_each(x, images, self.keep) for x in (rows, targets, zeros)])
        for moments, part in zip(self.halves, (slice(cut), slice(cut, None)), strict=True):
            if len(rows[part]):
                moments.add(rows[part], targets[part])

    def _take(self, parts: Sequence[Tensor]) -> None:
        # In place: pieces that are joined at the end would be there twice.
        if not self._kept:
            count = self.keep * self._images
            self._kept = tuple(part.new_empty(count, part.shape[1]) for part in parts)
        end = self._filled + len(parts[0])
        for whole, part in zip(self._kept, parts, strict=True):
            whole[self._filled : end] = part
        self._filled = end

    def finish(self, add_up: AddUp) -> Moments:
        """Mean moments of all rows, with those of the first half of the images."""
        first, second = self.halves
        for moments in self.halves:
            _add_up(moments, add_up)
        second.s += first.s
        second.c += first.c
        second.energy += first.energy
        second.rows += first.rows
        second.half = first
        return second.mean()

    def sample(self, scale: Tensor, bounds: Bounds, add_up: AddUp) -> Sample:
        """The rows that were kept, for a norm of this scale and the activation after it."""
        rows, targets, zeros = (whole[: self._filled] for whole in self._kept)
        count = torch.tensor([float(len(rows))], dtype=torch.float64)
        add_up(count)
        scale = torch.where(is_erased(scale), 0.0, scale).to(rows.device)
        return Sample(rows, targets, zeros, scale, bounds, int(count))


def of_sample(moments: Moments, sample: Sample, add_up: AddUp) -> Moments:
    """Moments of the rows that were kept, in place of those of all."""
    if sample.count == moments.rows:
        return moments
    found = Moments.empty(moments.unit[:-1], sample.targets.shape[1])
    for begin in range(0, len(sample.rows), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        found.add(sample.rows[part], sample.targets[part])
    _add_up(found, add_up)
    return found.mean()


def _add_up(moments: Moments, add_up: AddUp) -> None:
    moments.settle()
    rows = torch.tensor([float(moments.rows)], dtype=torch.float64)
    add_up(moments.s, moments.c, moments.energy, rows)
    moments.rows = int(rows)


def _of_each(rows: Tensor, images: int, count: int) -> Tensor:
    """The first rows of each image."""
    return rows.view(images, -1, rows.shape[1])[:, :count].flatten(0, 1)
