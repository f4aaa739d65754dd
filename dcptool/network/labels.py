"""Labels: an integer for every channel, and which labels live and die together.

A label tensor has the shape of an activation; each element names the channel it belongs to.
Labels >= 0 are channels. A negative label marks elements that can never be removed; it is an
index into the list of reasons. Labels that must go together are tied (union-find); a tied set
is a unit. Freezing is a flag with reasons on a unit, never a tie, so reasons are not mixed up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Below this many elements looking for repetition costs more than it saves.
LARGE = 1 << 12

IntArray = npt.NDArray[np.int64]


class Ties:
    """Union-find over labels, with reasons why a unit is frozen and where adds joined it."""

    def __init__(self) -> None:
        self._parent: IntArray = np.zeros(1024, dtype=np.int64)
        self.count = 0
        self.reasons: list[str] = []
        self._frozen: dict[int, list[str]] = {}
        self._added: dict[int, str] = {}

    def fresh(self, count: int) -> Tensor:
        """New labels, each a unit of its own."""
        while self.count + count > len(self._parent):
            self._parent = np.concatenate([self._parent, np.zeros_like(self._parent)])
        start, self.count = self.count, self.count + count
        self._parent[start : self.count] = np.arange(start, self.count)
        return torch.arange(start, self.count)

    def fixed(self, reason: str) -> int:
        """The negative label for elements that can never be removed."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return -1 - self.reasons.index(reason)

    def roots(self, labels: Tensor) -> Tensor:
        """Replace each label by the representative of its unit; negative ones stay."""
        flat = labels.numpy()
        found = self._climb(np.where(flat >= 0, flat, 0))
        return torch.from_numpy(np.where(flat >= 0, found, flat))

    def _climb(self, found: IntArray) -> IntArray:
        while True:
            above = self._parent[found]
            if np.array_equal(above, found):
                return found
            found = above

    def join(self, first: Tensor, second: Tensor, *, added_at: str = "") -> None:
        """Tie two label tensors of equal shape element by element.

        Where one side can never be removed, the other side is frozen for the same reason.
        `added_at` names the addition that makes the tie, if one does.
        """
        # Tables over all labels instead of sorting: these tensors can have millions of elements.
        pairs = torch.stack([first.reshape(-1), second.reshape(-1)]).numpy()
        pairs = self.roots(torch.from_numpy(pairs[:, pairs[0] != pairs[1]])).numpy()
        low, high = pairs.min(axis=0), pairs.max(axis=0)
        is_fixed = low < 0
        for fixed in np.flatnonzero(np.bincount(-1 - low[is_fixed])).tolist():
            for root in self._distinct(high[low == -1 - fixed]):
                self._freeze_root(root, self.reasons[fixed])
        self._unite(low[~is_fixed], high[~is_fixed], added_at)

    def _distinct(self, labels: IntArray) -> list[int]:
        named = np.zeros(self.count, dtype=bool)
        named[labels[labels >= 0]] = True
        found: list[int] = np.flatnonzero(named).tolist()
        return found

    def _unite(self, low: IntArray, high: IntArray, added_at: str) -> None:
        """Join pairs of roots, all at once: each root takes its smallest partner as parent."""
        touched = np.array(self._distinct(high[low != high]), dtype=np.int64)
        while True:
            open_pairs = low != high
            if not open_pairs.any():
                break
            low, high = low[open_pairs], high[open_pairs]
            np.minimum.at(self._parent, high, low)
            low, high = self._climb(low), self._climb(high)
            low, high = np.minimum(low, high), np.maximum(low, high)
        for drop, keep in zip(touched.tolist(), self._climb(touched).tolist(), strict=True):
            for reason in self._frozen.pop(drop, ()):
                self._freeze_root(keep, reason)
            place = self._added.pop(drop, "") or added_at
            if place:
                self._added.setdefault(keep, place)

    def freeze(self, labels: Tensor, reason: str) -> None:
        """Forbid that any unit named in `labels` is removed."""
        for root in torch.unique(self.roots(compact(labels))).tolist():
            if root >= 0:
                self._freeze_root(root, reason)

    def _freeze_root(self, root: int, reason: str) -> None:
        reasons = self._frozen.setdefault(root, [])
        if reason not in reasons:
            reasons.append(reason)

    def frozen(self, root: int) -> list[str]:
        """Why a unit is frozen; empty when it is not."""
        return self._frozen.get(root, [])

    def added(self, root: int) -> str:
        """Where an addition tied this unit to another producer; empty when none did."""
        return self._added.get(root, "")


def spread(vector: Tensor, shape: tuple[int, ...], dim: int) -> Tensor:
    """One label for each channel along `dim`, repeated over all other positions (no copy)."""
    view = [1] * len(shape)
    view[dim] = len(vector)
    return vector.reshape(view).expand(shape)


def compact(labels: Tensor) -> Tensor:
    """Drop repetition that is visible from the strides, so that work stays small."""
    for dim, (size, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        if stride == 0 and size > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def shrink(ties: Ties, labels: Tensor) -> Tensor:
    """`compact`, and for large tensors also where positions differ in labels but not in units."""
    labels = compact(labels)
    if labels.numel() > LARGE:
        labels = ties.roots(labels)
        for dim, size in enumerate(labels.shape):
            first = labels.narrow(dim, 0, 1)
            if size > 1 and bool((labels == first).all()):
                labels = first
    return labels


def is_constant(ties: Ties, labels: Tensor, dims: tuple[int, ...]) -> bool:
    """Whether all positions along `dims` name the same units."""
    small = compact(labels)
    for dim in dims:
        if small.shape[dim] > 1:
            roots = ties.roots(small)
            if not bool((roots == roots.narrow(dim, 0, 1)).all()):
                return False
    return True


def respread(ties: Ties, labels: Tensor) -> Tensor:
    """Make repetition visible to `compact` again after a function copied the labels."""
    for dim in range(2, labels.dim()):
        size = labels.shape[dim]
        if size > 1 and labels.stride(dim) != 0:
            first = labels.narrow(dim, 0, 1)
            if bool((labels == first).all()):
                labels = first.expand(labels.shape)
    return labels
