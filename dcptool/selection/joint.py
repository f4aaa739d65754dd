"""The discrimination-aware term in closed form: how much an error counts in each direction.

One backward pass over the samples gives `g`, the gradient of each image's head loss at each
output position. About fine-tuned weights its mean vanishes but for noise, and what is left of
`L_S` to second order is the metric `F = E[g g^T]` on errors, beside the one of reconstruction.
Both are taken with a trace of one, so that lambda 1 gives them the same say: by its own scale
either would drown the other, depending on how far the network has converged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcptool.selection.gram import Moments


def metric(plain: Tensor, slopes: Tensor, strength: float) -> Tensor:
    """The metric of the joint loss on outputs.

    `plain` weighs errors of each output in the reconstruction, `slopes` is `F`. A strength of
    infinity leaves `F`; it has few directions, so a trace of the other decides among the rest.
    """
    size = float(slopes.trace())
    own = torch.diag(plain.square() / plain.square().sum().clamp_min(1e-300))
    if not size > 0:
        return own
    head = slopes / size
    return head + 1e-3 * own if math.isinf(strength) else own + strength * head


def weigh(moments: Moments, metric: Tensor) -> Moments:
    """Rotate the outputs so that plain squares measure errors in `metric`."""
    values, vectors = torch.linalg.eigh(metric)
    root = vectors * values.clamp_min(0).sqrt()
    energy = (root.square() * moments.energy[:, None]).sum(0)
    return Moments(moments.s, moments.c @ root, energy, moments.unit, moments.rows)
