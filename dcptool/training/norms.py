"""Batch-norm statistics measured anew on the network as it is now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dcptool import console
from dcptool.errors import UsageError
from dcptool.training.loader import Batches

# How torch refuses to take the variance of one number.
ONE_VALUE = "Expected more than 1 value per channel"


@contextmanager
def one_value_explained() -> Iterator[None]:
    """Say which option is at fault where a batch norm sees one value in each channel."""
    try:
        yield
    except ValueError as err:
        if ONE_VALUE not in str(err):
            raise
        raise UsageError(
            "batch norms cannot learn from one image at a time in this network",
            why="its maps shrink to one pixel, and one value in a channel has no variance",
            try_="--batch-size 2 or more, or --norms eval",
        ) from err


def _without_single(batches: Batches) -> Iterator[Tensor]:
    """The images of each batch; a last one alone joins the batch before."""
    waiting: Tensor | None = None
    for images, _ in batches.epoch():
        if waiting is not None and len(images) == 1 < len(waiting):
            images = torch.cat([waiting, images])
        elif waiting is not None:
            yield waiting
        waiting = images
    if waiting is not None:
        yield waiting


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
        with (
            torch.no_grad(),
            one_value_explained(),
            console.progress("batch norms", len(batches)) as task,
        ):
            for images in _without_single(batches):
                model(images)
                task.advance()
    finally:
        for norm in norms:
            norm.momentum = momenta[norm]
        for module, training in was_training.items():
            module.training = training
    return len(norms)
