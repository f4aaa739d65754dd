"""The discrimination-aware term in closed form: a second-order view of `L_S` at a layer's output.

One backward pass over the samples gives `g`, the gradient of each image's loss at each output
position. With `D = E[u g^T]` and `F = E[g g^T]` the joint loss is again a least-squares problem:
`Omega = I/n + lambda h w F` weighs errors and `D` moves the target.
"""

from __future__ import annotations

import math
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
        self.d += (u.T @ gradients).double().cpu()
        self.f += (gradients.T @ gradients).double().cpu()
        self.rows += len(rows)
        self.positions = positions


def join(
    moments: Moments, slopes: Slopes, weights: Tensor, strength: float
) -> tuple[Moments, Tensor]:
    """Moments of the joint loss, with targets moved by `L_S`, and the metric on outputs.

    `weights` are the layer's present ones (columns x outputs), about which `L_S` is expanded.
    """
    outputs = moments.c.shape[1]
    d, f = slopes.d / max(slopes.rows, 1), slopes.f / max(slopes.rows, 1)
    plain, factor = 1.0 / outputs, strength * slopes.positions
    if math.isinf(strength):
        # The head's loss alone; its curvature has few directions, so a trace of the other stays.
        factor = float(slopes.positions)
        plain = 1e-3 * factor * float(f.diagonal().mean())
    metric = plain * torch.eye(outputs, dtype=torch.float64) + factor * f
    pull = plain * moments.c + factor * (moments.s @ weights @ f - d)
    moved = torch.linalg.solve(metric, pull.T).T
    # The energy of the moved target is not known exactly; it only shifts all losses alike.
    energy = moments.energy + ((moved[-1] - moments.c[-1]) ** 2)
    return Moments(moments.s, moved, energy, moments.unit, moments.rows), metric


def weigh(moments: Moments, metric: Tensor) -> Moments:
    """Rotate the outputs so that plain squares measure errors in `metric`."""
    values, vectors = torch.linalg.eigh(metric)
    root = vectors * values.clamp_min(0).sqrt()
    energy = (root.square() * moments.energy[:, None]).sum(0)
    return Moments(moments.s, moments.c @ root, energy, moments.unit, moments.rows)
