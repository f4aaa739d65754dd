"""The discrimination-aware term in closed form: a second-order view of `L_S` at a layer's output.

One backward pass over the samples gives `g`, the gradient of each image's loss at each output
position. With `D = E[u g^T]` and `F = E[g g^T]` the joint loss is again a least-squares problem:
`Omega = I/n + lambda h w F` weighs errors and `D` moves the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcptool.selection.gram import Moments


@dataclass
class Slopes:
    """Sums over rows of what the backward pass gives at one layer."""

    d: Tensor
    f: Tensor
    rows: int = 0
    positions: int = 1

    @staticmethod
    def empty(columns: int, outputs: int) -> Slopes:
        """Nothing seen yet; `columns` counts the constant too."""
        return Slopes(
            torch.zeros(columns, outputs, dtype=torch.float64),
            torch.zeros(outputs, outputs, dtype=torch.float64),
        )

    def add(self, rows: Tensor, gradients: Tensor, positions: int) -> None:
        """Take rows and the gradients at the same positions in; `positions` is h * w."""
        u = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        self.d += (u.T @ gradients).double()
        self.f += (gradients.T @ gradients).double()
        self.rows += len(rows)
        self.positions = positions


def join(
    moments: Moments, slopes: Slopes, weights: Tensor, strength: float
) -> tuple[Moments, Tensor]:
    """Moments of the joint loss, with targets moved by `L_S`, and the metric on outputs.

    `weights` are the layer's present ones (columns x outputs), about which `L_S` is expanded.
    """
    outputs = moments.c.shape[1]
    factor = strength * slopes.positions
    d, f = slopes.d / max(slopes.rows, 1), slopes.f / max(slopes.rows, 1)
    metric = torch.eye(outputs, dtype=torch.float64) / outputs + factor * f
    pull = moments.c / outputs + factor * (moments.s @ weights @ f - d)
    moved = torch.linalg.solve(metric, pull.T).T
    # The energy of the moved target is not known exactly; it only shifts all losses alike.
    energy = moments.energy + ((moved[-1] - moments.c[-1]) ** 2)
    return Moments(moments.s, moved, energy, moments.unit, moments.rows), metric


def weigh(moments: Moments, metric: Tensor) -> Moments:
    """Rotate the outputs so that plain squares measure errors in `metric`."""
    values, vectors = torch.linalg.eigh(metric)
    root = vectors * values.clamp_min(0).sqrt()
    c = moments.c @ root
    floor = _explained(moments, c)
    return Moments(
        moments.s, c, torch.maximum(_energy(moments, root), floor), moments.unit, moments.rows
    )


def _energy(moments: Moments, root: Tensor) -> Tensor:
    return (root.square() * moments.energy[:, None]).sum(0)


def _explained(moments: Moments, c: Tensor) -> Tensor:
    """What the whole layer can explain: the energy is at least that."""
    size = len(moments.unit)
    ridge = 1e-6 * float(moments.s.diagonal().mean())
    solved: Tensor = torch.linalg.solve(moments.s + ridge * torch.eye(size, dtype=torch.float64), c)
    return (c * solved).sum(0)
