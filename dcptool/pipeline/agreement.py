"""How far a slim network answers as the dense one, on images that selection has not seen.

Needs no labels. The images are split: one half chooses (whether fresh batch-norm statistics
help), the other reports, so that the number published is not the one that was chosen by.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy
import torch
from torch import nn

from dcptool import console
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.evaluate import predictor
from dcptool.training.loader import Batches, ImageSet, loader
from dcptool.training.norms import reestimate_norms

# Small, because the first maps of a network at 224 px take 5 MB and more for each image.
BATCH = 64


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
    for batch, _ in loader(images, BATCH, workers=workers, device=device, dist=dist):
        wanted, given = predictor(dense)(batch).double(), predictor(slim)(batch).double()
        found[0] += (wanted.argmax(1) == given.argmax(1)).sum()
        log_wanted, log_given = wanted.log_softmax(1), given.log_softmax(1)
        found[1] += (log_wanted.exp() * (log_wanted - log_given)).sum()
        found[2] += len(batch)
    dense.cpu()
    slim.cpu()
    same, divergence, count = dist.sum(found).tolist()
    return Agreement(100 * same / max(count, 1), divergence / max(count, 1), int(count))


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
    """Give the slim network the weights that were tried, if they bring it nearer to the dense."""
    before = agree(dense, slim, images, workers=workers, device=device, dist=dist)
    after = agree(dense, tried, images, workers=workers, device=device, dist=dist)
    helps = after.kl < before.kl
    word = "kept" if helps else "not kept"
    console.detail(
        f"{what}: KL {before.kl:.4f} -> {after.kl:.4f}, {word} ({before.images} held-out images)"
    )
    if helps:
        slim.load_state_dict(tried.cpu().state_dict())
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
