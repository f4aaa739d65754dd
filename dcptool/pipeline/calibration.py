"""The images that channels are chosen on: how many, in which batches, and the widths they give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from dcptool import console, files
from dcptool.network.base import Network
from dcptool.pipeline.job import Job
from dcptool.selection import curves
from dcptool.selection.enough import enough
from dcptool.selection.settings import Selection
from dcptool.training.data import Data, samples
from dcptool.training.dist import Dist
from dcptool.training.loader import ImageSet, loader

WIDTHS_FILE = "widths.json"
FEWEST_SAMPLES = 64
MOST_SAMPLES = 4096


def with_widths(
    network: Network, images: list[Tensor], job: Job, folder: Path, dist: Dist
) -> Selection:
    """The settings with a width for each group, where they are to come from the curves."""
    settings = job.selection
    if settings.widths != "curves":
        return settings
    path = folder / WIDTHS_FILE
    if dist.broadcast(path.is_file()):
        saved: Any = files.read_json(path, what="the widths of the run")["widths"]
        return replace(settings, plan={str(k): int(v) for k, v in saved.items()})
    found = curves.measure(network, images, settings, dist, job.device)
    widths = curves.widths_at_rate(network, settings, found)
    if dist.is_writer:
        errors = {name: [float(f"{e:.4g}") for e in curve] for name, curve in found.items()}
        files.publish_json(path, {"widths": widths, "curves": errors})
    dist.barrier()
    return replace(settings, plan=widths)


def images_for(network: Network, data: Data, job: Job, dist: Dist) -> ImageSet:
    """The calibration images: as many as asked, or as are needed."""
    settings = job.selection
    if settings.samples is not None:
        return samples(data, settings.samples, settings.seed)

    def blocks() -> Iterator[list[Tensor]]:
        seen: set[int] = set()
        count = FEWEST_SAMPLES
        while not seen or len(seen) < min(count, MOST_SAMPLES, len(data.train)):
            grown = samples(data, min(count, MOST_SAMPLES), settings.seed)
            fresh = [i for i, n in enumerate(grown.numbers.tolist()) if n not in seen]
            part = grown.subset(numpy.array(fresh), "samples")
            yield [x for x, _ in loader(part, job.batch_size, workers=job.workers)]
            seen |= set(grown.numbers.tolist())
            count *= 2

    found = enough(network, blocks(), settings, job.device) if dist.is_writer else 0
    count = dist.broadcast(found)
    console.note(f"{count} images are enough to choose channels on")
    return samples(data, count, settings.seed)


def may_mirror(data: Data) -> bool:
    """Whether a mirror image is as good as an image."""
    augment = data.train.augment
    return not augment.off and augment.hflip != 0.0


def batches_of(chosen: ImageSet, job: Job, dist: Dist) -> list[tuple[Tensor, Tensor]]:
    """Batches of which every process gets a row: one that is too small joins the one before."""
    at_once = max(job.batch_size, dist.world)
    batches = list(loader(chosen, at_once, workers=job.workers))
    if len(batches) > 1 and len(batches[-1][0]) < dist.world:
        (images, labels), (more, others) = batches[-2:]
        return [*batches[:-2], (torch.cat([images, more]), torch.cat([labels, others]))]
    return batches
