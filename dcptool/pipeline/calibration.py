"""The images that channels are chosen on: how many, and in which batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor

from dcptool import console
from dcptool.errors import EnvironmentFault
from dcptool.network.base import Network
from dcptool.pipeline.job import Job
from dcptool.selection.enough import PLENTY, enough, useful
from dcptool.training import room
from dcptool.training.data import Data, samples
from dcptool.training.dist import Dist
from dcptool.training.loader import ImageSet, at_once, loader

FEWEST_SAMPLES = 64
# KL 0.111 -> 0.093 on ResNet-56 at rate 0.5 with 500 images; twice the time.
MIRRORED_BELOW = 1000
# Of every image, as numbers: as it was read, and in the layout that the network likes.
COPIES = 2


def images_for(network: Network, data: Data, job: Job, dist: Dist) -> ImageSet:
    """The calibration images: as many as asked and of use, or as are needed."""
    settings = job.selection
    if settings.samples is not None:
        count = min(settings.samples, len(data.train))
        most = count if settings.solver == "sgd" else useful(network, settings)
        if count > most:
            console.note(f"{most:,} of {count:,} samples are taken: more would change little")
        return samples(data, min(count, most), settings.seed)

    def blocks() -> Iterator[list[Tensor]]:
        seen: set[int] = set()
        count = FEWEST_SAMPLES
        while not seen or len(seen) < min(count, PLENTY, len(data.train)):
            grown = samples(data, min(count, PLENTY), settings.seed)
            fresh = [i for i, n in enumerate(grown.numbers.tolist()) if n not in seen]
            part = grown.subset(numpy.array(fresh), "samples")
            yield [x for x, _ in loader(part, job.batch_size, workers=job.workers)]
            seen |= set(grown.numbers.tolist())
            count *= 2

    found = enough(network, blocks(), settings, job.device) if dist.is_writer else 0
    count = dist.broadcast(found)
    console.note(f"{count} images are enough to choose channels on")
    return samples(data, count, settings.seed)


def require_memory(chosen: ImageSet, job: Job) -> None:
    """Refuse more images than the memory holds: they stay there, in two layouts, to the end."""
    free = room.free_bytes()
    each = COPIES * 4 * math.prod(chosen.store.input.size)
    if job.device != "cpu" or free is None or len(chosen) * each <= free:
        return
    raise EnvironmentFault(
        f"{len(chosen):,} samples would run out of memory",
        why=f"they take {len(chosen) * each / 1e9:.1f} GB, {free / 1e9:.1f} GB can be had",
        try_=f"the same command with --samples {max(1, free // (2 * each))}",
    )


def may_mirror(data: Data, chosen: ImageSet) -> bool:
    """Whether mirror images are worth their time: they are images, too, where there are few."""
    augment = data.train.augment
    return len(chosen) < MIRRORED_BELOW and not augment.off and augment.hflip != 0.0


def batches_of(chosen: ImageSet, job: Job, dist: Dist) -> list[tuple[Tensor, Tensor]]:
    """Batches of which every process gets a row: less than half a batch joins the one before.

    However many processes there are, the loop takes a step for each batch.
    """
    size = max(at_once(chosen, job.device, job.batch_size), dist.world)
    batches = list(loader(chosen, size, workers=job.workers))
    if len(batches) > 1 and len(batches[-1][0]) < max(dist.world, size // 2):
        (images, labels), (more, others) = batches[-2:]
        return [*batches[:-2], (torch.cat([images, more]), torch.cat([labels, others]))]
    return batches
