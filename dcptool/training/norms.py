"""Batch-norm statistics measured anew on the network as it is now."""

from __future__ import annotations

import torch
from torch import nn

from dcptool.training.loader import Batches


def reestimate_norms(model: nn.Module, batches: Batches) -> int:
    """Replace running means and variances by averages over `batches`; returns norms changed.

    Weights do not change. Whether it helps depends on what came before: after a
    least-squares refit it can lose a point or two, so measure before keeping it.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.track_running_stats]
    was_training = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
        norm.train()
    try:
        with torch.no_grad():
            for images, _ in batches.epoch():
                model(images)
    finally:
        for norm in norms:
            norm.momentum = momenta[norm]
        for module, training in was_training.items():
            module.training = training
    return len(norms)
