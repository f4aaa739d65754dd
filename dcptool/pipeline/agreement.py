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

# Standard errors by which a change must help.
SURE = 2.0
TEMPERATURES = tuple(1.1**power for power in range(-8, 9))


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
    console.note(f"comparing with the dense network on {len(images):,} held-out images")
    found = torch.zeros(3, dtype=torch.float64, device=device)
    dense, slim = dense.to(device), slim.to(device)
    batches = loader(images, workers=workers, device=device, dist=dist)
    with console.progress("comparing", len(batches)) as task:
        for batch, _ in batches:
            wanted, given = predictor(dense)(batch), predictor(slim)(batch)
            found[0] += (wanted.argmax(1) == given.argmax(1)).sum()
            found[1] += _divergence(wanted, given).sum()
            found[2] += len(batch)
            task.advance()
    dense.cpu()
    slim.cpu()
    same, divergence, count = dist.sum(found).tolist()
    return Agreement(100 * same / max(count, 1), divergence / max(count, 1), int(count))


def _divergence(wanted: Tensor, given: Tensor) -> Tensor:
    """KL divergence from what is wanted, for each image."""
    log_wanted, log_given = wanted.double().log_softmax(1), given.double().log_softmax(1)
    return (log_wanted.exp() * (log_wanted - log_given)).sum(1)


def _at_temperatures(wanted: Tensor, given: Tensor) -> Tensor:
    """KL divergence of each image (rows) with the scores given at each temperature."""
    return torch.stack([_divergence(wanted, given / t) for t in TEMPERATURES], dim=1)


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

    They must do so by more than twice the standard error over the images: of a few dozen, some
    always speak for a change. Each is judged at the temperature that suits it: what is solved for
    is a little too cautious, and a change that only makes it bolder would win over better answers.
    """
    dense, slim, tried = dense.to(device), slim.to(device), tried.to(device)
    # For each pair of temperatures: sums of the first, of the gain, and of its square.
    found = torch.zeros(3, len(TEMPERATURES), len(TEMPERATURES), dtype=torch.float64)
    total = torch.zeros(1, dtype=torch.float64)
    for batch, _ in loader(images, workers=workers, device=device, dist=dist):
        wanted = predictor(dense)(batch)
        before, after = (_at_temperatures(wanted, predictor(m)(batch)) for m in (slim, tried))
        gain = before[:, :, None] - after[:, None, :]
        first = before[:, :, None].expand_as(gain)
        found += torch.stack([first, gain, gain.square()]).sum(1).cpu()
        total += len(batch)
    for module in (dense, slim, tried):
        module.cpu()
    found, count = dist.sum(found.to(device)).cpu(), max(float(dist.sum(total.to(device))), 1.0)
    first, gain, squares = found / count
    now, then = int(first[:, 0].argmin()), int((first - gain)[0].argmin())
    mean, spread = float(gain[now, then]), float(squares[now, then])
    doubt = math.sqrt(max(spread - mean**2, 0.0) / max(count - 1, 1.0))
    helps = mean > SURE * doubt
    was = float(first[now, 0])
    word = "kept" if helps else "not kept"
    console.detail(
        f"{what}: KL {was:.4f} -> {was - mean:.4f} (+-{doubt:.4f}), {word} "
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

    Without a refit it does by far; after one it often does harm. One image has no statistics.
    """
    if len(samples.images) < 2:
        return False
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
