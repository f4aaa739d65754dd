"""Whether images held out of train are new to a network, or were learnt from before.

Public weights have mostly seen all of train. Images held out of it then speak for whatever stays
nearest to these weights, and cannot choose between a network before and after a long training. It
shows: a network answers images that it has not learnt from less surely than those that it has.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from dcptool.training.data import Data, samples
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.evaluate import predictor
from dcptool.training.loader import ImageSet, loader

# Images of each kind that are looked at, and how many it takes to tell.
MOST, FEWEST = 2000, 500
# Standard errors of the difference by which new images are answered less surely.
SURE = 2.0


def knows_held_out(
    module: nn.Module,
    data: Data,
    *,
    seed: int = 0,
    workers: int | None = None,
    device: str = "cpu",
    amp: torch.dtype | None = None,
    dist: Dist = SINGLE,
) -> bool:
    """Whether val was taken out of train and a network answers both as surely."""
    if not (data.labelled and data.val_is_held_out and len(data.val) >= FEWEST):
        return False
    known, new = samples(data, MOST, seed), _some(data.val)
    found = []
    for images in (known, new):
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for batch, labels in loader(images, workers=workers, device=device, dist=dist):
            scores = predictor(module, amp=amp)(batch).double()
            losses = functional.cross_entropy(scores, labels, reduction="none")
            sums += torch.stack(
                [losses.sum(), losses.square().sum(), losses.new_tensor(len(losses))]
            )
        total, squares, count = dist.sum(sums).tolist()
        mean = total / count
        found.append((mean, max(squares / count - mean**2, 0.0) / count))
    (mean_known, doubt_known), (mean_new, doubt_new) = found
    return bool(mean_new - mean_known <= SURE * math.sqrt(doubt_known + doubt_new))


def _some(images: ImageSet) -> ImageSet:
    """As many of them as are looked at, evenly over the whole."""
    step = max(1, len(images) // MOST)
    positions = torch.arange(0, len(images), step)[:MOST].numpy()
    return images.subset(positions, images.name)
