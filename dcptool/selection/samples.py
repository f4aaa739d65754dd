"""Calibration images in batches; over several processes each holds its rows of every batch.

Because a batch is shared and not dealt out, sums over processes are sums over the same batch,
and the choice does not depend on how many processes there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dcptool.training.dist import SINGLE, Dist
from dcptool.training.layout import laid_out


@dataclass(frozen=True)
class Samples:
    """This process's rows of each batch, and the size of each whole batch."""

    batches: Sequence[Tensor]
    sizes: Sequence[int]
    dist: Dist = SINGLE
    device: str = "cpu"

    @property
    def images(self) -> int:
        """Number of images over all processes."""
        return sum(self.sizes)

    @property
    def share(self) -> slice:
        """The rows of a batch that are this process's."""
        return slice(self.dist.rank, None, self.dist.world)


def share(batches: Sequence[Tensor], dist: Dist = SINGLE, device: str = "cpu") -> Samples:
    """The samples of this process, from batches that every process has read."""
    rows = [laid_out(batch[dist.rank :: dist.world]) for batch in batches]
    return Samples(rows, [len(batch) for batch in batches], dist, device)
