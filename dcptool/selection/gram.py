"""The closed form: order and refit of a layer's inputs from second moments alone.

With rows u (what the layer reads) and targets t, `S = E[u u^T]` and `C = E[u t^T]` hold all that
the squared error depends on. Channels are added or removed by block elimination, one update of
rank `taps` for each; the exact minimiser over what is kept is one solve. No walk over data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-4


@dataclass
class Moments:
    """Second moments of one layer: inputs (p x p), inputs with targets (p x n), target energy.

    The last column is the constant 1, so that a bias is fitted too. `unit` names the unit of
    each column; -1 is never removed.
    """

    s: Tensor
    c: Tensor
    energy: Tensor
    unit: Tensor
    rows: int = 0

    @staticmethod
    def empty(unit: Tensor, outputs: int) -> Moments:
        """Moments of nothing; `unit` has no entry for the constant."""
        columns = len(unit) + 1
        return Moments(
            torch.zeros(columns, columns, dtype=torch.float64),
            torch.zeros(columns, outputs, dtype=torch.float64),
            torch.zeros(outputs, dtype=torch.float64),
            torch.cat([unit, unit.new_tensor([-1])]),
        )

    def add(self, rows: Tensor, targets: Tensor) -> None:
        """Take a batch of rows in."""
        u = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        self.s += (u.T @ u).double()
        self.c += (u.T @ targets).double()
        self.energy += targets.double().square().sum(0)
        self.rows += len(rows)

    def mean(self) -> Moments:
        """Divided by the number of rows."""
        n = max(self.rows, 1)
        return Moments(self.s / n, self.c / n, self.energy / n, self.unit, self.rows)

    @property
    def variance(self) -> float:
        """Energy of the targets about their mean, summed over outputs."""
        return float((self.energy - self.c[-1].square()).sum().clamp_min(1e-30))


@dataclass(frozen=True)
class Ranking:
    """Units from first kept to last, and the loss at each size that was tried, small to large.

    A ranking that was asked for one size need not try the others.
    """

    order: tuple[int, ...]
    losses: tuple[float, ...]


def backward_order(
    problems: Sequence[Moments], units: int, *, count: int = 0, ridge: float = RIDGE
) -> Ranking:
    """Remove, again and again, the unit whose loss the others can make up for best.

    Ends when `count` are left; those come first, in the order in which they would be missed.
    """
    states = [_Inverse(problem, units, ridge) for problem in problems]
    alive = torch.ones(units, dtype=torch.bool)
    removed: list[int] = []
    losses = [sum(state.loss for state in states)]
    rise = torch.zeros(units, dtype=torch.float64)
    for _ in range(units - count):
        rise = sum((state.rises() for state in states), torch.zeros(units, dtype=torch.float64))
        rise[~alive] = torch.inf
        unit = int(rise.argmin())
        for state in states:
            state.remove(unit)
        alive[unit] = False
        removed.append(unit)
        losses.append(losses[-1] + float(rise[unit]))
    left = [u for u in torch.argsort(rise, descending=True, stable=True).tolist() if alive[u]]
    return Ranking((*left, *removed[::-1]), tuple(losses[::-1]))


class _Inverse:
    """Inverse of the regularised moments of one problem, downdated as units go."""

    def __init__(self, moments: Moments, units: int, ridge: float) -> None:
        s = moments.s + _ridge(moments, ridge)
        self.h = torch.cholesky_inverse(torch.linalg.cholesky(s))
        self.w = self.h @ moments.c
        self.loss = float((moments.energy.sum() - (moments.c * self.w).sum()).clamp_min(0))
        # Columns of each unit; every unit has the same number in a problem, or none.
        order = torch.argsort(moments.unit, stable=True)
        kept = order[moments.unit[order] >= 0]
        found = moments.unit[kept]
        self.present = torch.unique(found)
        width = len(kept) // max(len(self.present), 1)
        self.columns = kept.view(len(self.present), width)
        self.slot = torch.full((units,), -1, dtype=torch.long)
        self.slot[self.present] = torch.arange(len(self.present))
        self.units = units
        self.gone = torch.zeros(len(self.present), dtype=torch.bool)

    def rises(self) -> Tensor:
        """How much the loss rises when each unit goes."""
        blocks = self.h[self.columns[:, :, None], self.columns[:, None, :]]
        weights = self.w[self.columns]
        blocks[self.gone] = torch.eye(blocks.shape[-1], dtype=blocks.dtype)
        solved = torch.linalg.solve(blocks, weights)
        rise = (weights * solved).sum((1, 2))
        full = torch.zeros(self.units, dtype=torch.float64)
        full[self.present] = rise
        return full

    def remove(self, unit: int) -> None:
        """Downdate inverse and weights for one unit less."""
        slot = int(self.slot[unit])
        if slot < 0:
            return
        columns = self.columns[slot]
        side = self.h[:, columns]
        block = side[columns]
        solved = torch.linalg.solve(block, torch.cat([side.T, self.w[columns]], dim=1))
        size = self.h.shape[0]
        self.h -= side @ solved[:, :size]
        self.w -= side @ solved[:, size:]
        self.h[columns] = 0
        self.h[:, columns] = 0
        self.w[columns] = 0
        self.gone[slot] = True


def _ridge(moments: Moments, ridge: float) -> Tensor:
    """A share of the mean diagonal; the constant is not penalised."""
    size = len(moments.unit)
    strength = ridge * float(moments.s.diagonal()[:-1].mean())
    diagonal = torch.full((size,), strength, dtype=torch.float64)
    diagonal[-1] = 0.0
    return torch.diag(diagonal)


def forward_order(
    problems: Sequence[Moments],
    units: int,
    *,
    score: str = "drop",
    count: int | None = None,
    ridge: float = RIDGE,
) -> Ranking:
    """Add, again and again, the unit with the largest gradient or the largest drop of the loss."""
    states = [_Residual(problem, units, ridge) for problem in problems]
    free = torch.ones(units, dtype=torch.bool)
    order: list[int] = []
    losses = [sum(state.loss for state in states)]
    for _ in range(count or units):
        zero = torch.zeros(units, dtype=torch.float64)
        drops = sum((state.drops() for state in states), zero)
        values = drops if score == "drop" else sum((s.gradients() for s in states), zero)
        values[~free] = -torch.inf
        unit = int(values.argmax())
        for state in states:
            state.add(unit)
        free[unit] = False
        order.append(unit)
        losses.append(losses[-1] - float(drops[unit]))
    return Ranking(tuple(order), tuple(losses))


class _Residual:
    """Schur complement and residual of one problem, updated as units come."""

    def __init__(self, moments: Moments, units: int, ridge: float) -> None:
        self.p = moments.s + _ridge(moments, ridge)
        self.r = moments.c.clone()
        order = torch.argsort(moments.unit, stable=True)
        kept = order[moments.unit[order] >= 0]
        self.present = torch.unique(moments.unit[kept])
        self.columns = kept.view(len(self.present), -1)
        self.slot = torch.full((units,), -1, dtype=torch.long)
        self.slot[self.present] = torch.arange(len(self.present))
        self.units = units
        self.loss = float(moments.energy.sum())
        self.gone = torch.zeros(len(self.present), dtype=torch.bool)
        self._take(torch.nonzero(moments.unit < 0).flatten())

    def _take(self, columns: Tensor) -> None:
        side = self.p[:, columns]
        both = torch.cat([side.T, self.r[columns]], dim=1)
        solved = torch.linalg.solve(side[columns], both)
        size = self.p.shape[0]
        self.loss -= float((self.r[columns] * solved[:, size:]).sum())
        self.p -= side @ solved[:, :size]
        self.r -= side @ solved[:, size:]

    def drops(self) -> Tensor:
        blocks = self.p[self.columns[:, :, None], self.columns[:, None, :]]
        residual = self.r[self.columns]
        blocks[self.gone] = torch.eye(blocks.shape[-1], dtype=blocks.dtype)
        drop = (residual * torch.linalg.solve(blocks, residual)).sum((1, 2))
        drop[self.gone] = 0
        full = torch.zeros(self.units, dtype=torch.float64)
        full[self.present] = drop
        return full

    def gradients(self) -> Tensor:
        full = torch.zeros(self.units, dtype=torch.float64)
        full[self.present] = self.r[self.columns].square().sum((1, 2))
        return full

    def add(self, unit: int) -> None:
        slot = int(self.slot[unit])
        if slot >= 0:
            self._take(self.columns[slot])
            self.gone[slot] = True


def refit(
    moments: Moments, kept: Tensor, *, ridge: float = RIDGE, toward: Tensor | None = None
) -> Tensor:
    """Weights (p x n, the bias last) that minimise the error with the `kept` columns alone.

    The ridge pulls towards `toward` (p x n) where it is given, else towards zero.
    """
    columns = torch.nonzero(kept).flatten()
    penalty = _ridge(moments, ridge)[columns][:, columns]
    right = moments.c[columns]
    if toward is not None:
        right = right + penalty @ toward[columns]
    solved = torch.linalg.solve(moments.s[columns][:, columns] + penalty, right)
    weights = torch.zeros_like(moments.c)
    weights[columns] = solved
    return weights


def error(moments: Moments, weights: Tensor) -> float:
    """Mean squared error, summed over outputs, of given weights."""
    fitted = (weights * (moments.s @ weights)).sum()
    return float(moments.energy.sum() - 2 * (moments.c * weights).sum() + fitted)
