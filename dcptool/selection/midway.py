"""What the layer looked at last reads, batch by batch: the rest of its segment goes on from there.

Kept in memory alone, and only while it fits beside everything else: from a disk it would take
longer to read than to compute again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx

from dcptool.selection.store import Room


@dataclass
class Midway:
    """Values of one node for some of the batches."""

    room: Room
    node: fx.Node | None = None
    _values: dict[int, Tensor] = field(default_factory=dict)

    def known(self, batch: int) -> Mapping[fx.Node, Tensor]:
        """The node and its value, where it was kept for this batch."""
        if self.node is None or batch not in self._values:
            return {}
        return {self.node: self._values[batch].to(self.room.device)}

    def keep(self, node: fx.Node, batch: int, value: Tensor) -> None:
        """Take a value in the place of what was kept for this batch; of one node at a time."""
        if node is not self.node:
            self.forget()
            self.node = node
        self.drop(batch)
        if self.room.fits(value):
            kept = value.detach().cpu()
            self.room.keep(kept)
            self._values[batch] = kept

    def drop(self, batch: int) -> None:
        """Give back the room of one batch."""
        if batch in self._values:
            self.room.release(self._values.pop(batch))

    def forget(self) -> None:
        """Give all room back."""
        for batch in list(self._values):
            self.drop(batch)
        self.node = None
