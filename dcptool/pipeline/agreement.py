"""How far a slim network answers as the dense one, on images that selection has not seen.

Needs no labels. The images are split: one half chooses (whether fresh batch-norm statistics
help), the other reports, so that the number published is not the one that was chosen by.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn

from dcptool import console
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.evaluate import predictor
from dcptool.training.loader import Batches, ImageSet, loader
from dcptool.training.norms import reestimate_norms


@dataclass(frozen=True)
class Agreement:
    """Top-1 agreement in percent and mean KL divergence from the dense network."""

    top1: float
    kl: float
    images: int


def halves(images: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Images to choose by and images to report on; the same ones where there is but one."""
    if len(images) < 2:
        return images, images
    index = numpy.arange(len(images))
    return images.subset(index[::2], images.name), images.subset(index[1::2], images.name)


def agree(
    dense: nn.Module,
    slim: nn.Module,
    images: ImageSet,
    *,
    workers: int | None = None,
    device: str = "cpu",
    dist: Dist = SINGLE,
) -> Agreement:
    """Compare the answers of two networks."""
    found = torch.zeros(3, dtype=torch.float64, device=device)
    dense, slim = dense.to(device), slim.to(device)
    for batch, _ in loader(images, workers=workers, device=device, dist=dist):
        wanted, given = predictor(dense)(batch), predictor(slim)(batch)
        found[0] += (wanted.argmax(1) == given.argmax(1)).sum()
        found[1] += _divergence(wanted, given).sum()
        found[2] += len(batch)
    dense.cpu()
    slim.cpu()
    same, divergence, count = dist.sum(found).tolist()
    return Agreement(100 * same / max(count, 1), divergence / max(count, 1), int(count))


def _divergence(wanted: Tensor, given: Tensor) -> Tensor:
    """KL divergence from what is wanted, for each image."""
    log_wanted, log_given = wanted.double().log_softmax(1), given.double().log_softmax(1)
    return (log_wanted.exp() * (log_wanted - log_given)).sum(1)


def settle(
    dense: nn.Module,
    slim: nn.Module,
    tried: nn.Module,
    images: ImageSet,
    what: str,
    *,
    workers: int | None = None,
    device: str = "cpu",
    dist: Dist = SINGLE,
) -> bool:
    """Give the slim network the weights that were tried, if they bring it nearer to the dense.

    They must do so by more than the standard error over the images: of a few dozen, some always
    speak for a change.
    """
    dense, slim, tried = dense.to(device), slim.to(device), tried.to(device)
    found = torch.zeros(4, dtype=torch.float64, device=device)
    for batch, _ in loader(images, workers=workers, device=device, dist=dist):
        wanted = predictor(dense)(batch)
        before, after = (_divergence(wanted, predictor(each)(batch)) for each in (slim, tried))
        gain = before - after
        ones = torch.ones_like(gain)
        found += torch.stack([before, gain, gain.square(), ones]).sum(1)
    for module in (dense, slim, tried):
        module.cpu()
    first, total, squares, count = dist.sum(found).tolist()
    count = max(count, 1.0)
    mean = total / count
    doubt = math.sqrt(max(squares / count - mean**2, 0.0) / max(count - 1, 1.0))
    helps = bool(mean > doubt)
    word = "kept" if helps else "not kept"
    console.detail(
        f"{what}: KL {first / count:.4f} -> {first / count - mean:.4f} (+-{doubt:.4f}), {word} "
        f"({count:.0f} held-out images)"
    )
    if helps:
        slim.load_state_dict(tried.state_dict())
    return helps


def settle_norms(
    dense: nn.Module,
    slim: nn.Module,
    samples: Batches,
    images: ImageSet,
    *,
    workers: int | None = None,
    dist: Dist = SINGLE,
) -> bool:
    """Measure batch-norm statistics anew where that brings the slim network nearer to the dense.

    Without a refit it does by far; after one it often does harm.
    """
    tried = copy.deepcopy(slim).to(samples.device)
    if not reestimate_norms(tried, samples):
        return False
    return settle(
        dense,
        slim,
        tried,
        images,
        "batch norms estimated anew",
        workers=workers,
        device=samples.device,
        dist=dist,
    )
