"""Batches: order, augmentation and normalisation, each a function of seed, epoch and image.

Nothing here remembers a position: batch k of epoch e is the same whoever asks, whatever the
number of workers or processes, so that a resumed run sees what an unbroken one would have.
Small images live in memory as bytes and are augmented there; large ones go through worker
processes and timm's transforms.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from dcptool.errors import InputError
from dcptool.network.models import Input
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.images import BadImage
from dcptool.training.sources import Source
from dcptool.training.unreadable import Unreadable

Batch = tuple[Tensor, Tensor]
MEMORY_LIMIT = 1 << 30
SMALL_TRAIN = 64
READ_THREADS = 4

MOST_AT_ONCE = 256
# Six images at 224 px, whose maps are below 32 MB in most networks: the C library gives larger ones
# back to the system after every layer and asks for them again page by page (a third of the time of
# a forward pass on a CPU).
PIXELS_AT_ONCE = 6 * 224 * 224


@dataclass(frozen=True)
class Augment:
    """How training images are varied; the names are timm's."""

    hflip: float | None = None
    pad: int | None = None
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] | None = None
    color_jitter: float | None = None
    aa: str | None = None
    reprob: float = 0.0
    off: bool = False

    @staticmethod
    def none() -> Augment:
        """Training images as they are seen in evaluation."""
        return Augment(off=True)

    @property
    def needs_transforms(self) -> bool:
        """Whether more than shift and mirror is asked for."""
        return bool(self.scale or self.ratio or self.color_jitter or self.aa or self.reprob)


class Store:
    """The images of a source at the network's size, as bytes, read when first wanted."""

    def __init__(
        self, source: Source, seen: Input, *, unreadable: Unreadable | None = None
    ) -> None:
        self.source = source
        self.input = seen
        self.unreadable = unreadable or Unreadable()
        self.bad = self.unreadable.new_table()
        self._pixels: Tensor | None = None
        self._present = numpy.zeros(len(source), dtype=bool)
        self._transform: Any = evaluation_transform(seen)

    @property
    def fits(self) -> bool:
        """Whether all images together stay below the memory limit."""
        return len(self.source) * int(numpy.prod(self.input.size)) <= MEMORY_LIMIT

    @property
    def mode(self) -> str:
        """Pillow's name for the number of channels."""
        return "RGB" if self.input.size[0] == 3 else "L"

    def pixels(self, number: int) -> Tensor:
        """One image as evaluation sees it: uint8, (c, h, w)."""
        image = self.source.read(number, self.mode)
        return torch.as_tensor(self._transform(image))

    def take(self, numbers: numpy.ndarray) -> Tensor:
        """Several images as one uint8 tensor; those that are missing are read first."""
        self.fill(numbers)
        assert self._pixels is not None
        return self._pixels[torch.from_numpy(numbers)]

    def fill(self, numbers: numpy.ndarray) -> None:
        """Read what is not in memory yet; bad images are collected, then judged together."""
        if self._pixels is None:
            self._pixels = torch.empty((len(self.source), *self.input.size), dtype=torch.uint8)
        missing = numbers[~self._present[numbers]]
        if not len(missing):
            return
        pixels = self._pixels

        def read(number: int) -> None:
            try:
                pixels[number] = self.pixels(number)
            except BadImage as err:
                self.bad[number] = f"{err.where}: {err.why}"

        if len(missing) < 32:
            for number in missing.tolist():
                read(number)
        else:
            with ThreadPoolExecutor(READ_THREADS) as pool:
                list(pool.map(read, missing.tolist(), chunksize=32))
        self._present[missing] = True
        self.unreadable.judge()


def all_bad(images: ImageSet) -> InputError:
    """A step without images has no gradient, and ranks would fall out of step."""
    return InputError(
        f"every image of a batch of {images.name} cannot be read",
        why="\n".join(list(images.store.bad.values())[:10]),
        try_="repair or remove them, or a larger --batch-size",
    )


@dataclass(frozen=True)
class ImageSet:
    """Some images of a store, with labels."""

    name: str
    store: Store = field(repr=False)
    numbers: numpy.ndarray = field(repr=False)
    labels: numpy.ndarray = field(repr=False)
    augment: Augment = field(default_factory=Augment)

    def __len__(self) -> int:
        return len(self.numbers)

    def subset(
        self, positions: numpy.ndarray, name: str, augment: Augment | None = None
    ) -> ImageSet:
        """The images at some positions of this set."""
        return dataclasses.replace(
            self,
            name=name,
            numbers=self.numbers[positions],
            labels=self.labels[positions],
            augment=augment or self.augment,
        )

    @property
    def input(self) -> Input:
        """How the network sees these images."""
        return self.store.input


@dataclass(frozen=True)
class Batches:
    """Batches of one process; iterating gives epoch 0."""

    images: ImageSet
    batch_size: int
    train: bool = False
    seed: int = 0
    workers: int = 0
    dist: Dist = SINGLE
    device: str = "cpu"

    def __len__(self) -> int:
        """Batches in one epoch; training leaves out a last one that is not full."""
        whole = self.batch_size * self.dist.world
        if self.train:
            return max(1, len(self.images) // whole)
        mine = len(range(self.dist.rank, len(self.images), self.dist.world))
        return -(-mine // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def order(self, number: int) -> list[numpy.ndarray]:
        """Positions in the set for each batch of epoch `number`, for this process."""
        count, rank, world = len(self.images), self.dist.rank, self.dist.world
        if not self.train:
            mine = numpy.arange(rank, count, world)
            return [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)]
        shuffled = numpy.random.default_rng((self.seed, number)).permutation(count)
        whole = self.batch_size * world
        steps = []
        for step in range(len(self)):
            together = shuffled[step * whole : (step + 1) * whole]
            if len(together) == whole:
                steps.append(together[rank * self.batch_size : (rank + 1) * self.batch_size])
            else:
                # A set smaller than one batch is dealt out evenly.
                steps.append(together[rank::world])
        return steps

    def epoch(self, number: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch `start` on, normalised, on the device."""
        order = self.order(number)[start:]
        store = self.images.store
        transforms = self.train and self.images.augment.needs_transforms
        small = max(store.input.size[1:]) <= SMALL_TRAIN
        plain = not self.train or self.images.augment.off
        if store.fits and not transforms and (small or plain):
            return self._from_memory(order, number)
        return self._from_workers(order, number)

    def _from_memory(self, order: Sequence[numpy.ndarray], number: int) -> Iterator[Batch]:
        images, store = self.images, self.images.store
        normal = Normalise(store.input, self.device)
        shift = None
        if self.train and not images.augment.off:
            shift = Shift.draw(images, self.seed, number)
        if self.train:
            # All at once, so that every bad file is named before the first step.
            store.fill(images.numbers)
        for positions in order:
            numbers = images.numbers[positions]
            raw = store.take(numbers)
            labels = torch.from_numpy(images.labels[positions])
            if store.bad:
                good = numpy.array([n not in store.bad for n in numbers.tolist()])
                if not good.any():
                    raise all_bad(self.images)
                raw, labels = raw[torch.from_numpy(good)], labels[torch.from_numpy(good)]
                positions = positions[good]
            if shift is not None:
                raw = shift.apply(raw, positions)
            yield normal(raw), labels.to(self.device, non_blocking=True)

    def _from_workers(self, order: Sequence[numpy.ndarray], number: int) -> Iterator[Batch]:
        from dcptool.training.workers import read_in_workers

        normal = Normalise(self.images.store.input, self.device)
        for raw, labels in read_in_workers(
            self.images, order, number, seed=self.seed, workers=self.workers, train=self.train
        ):
            yield normal(raw), labels.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Shift:
    """Zero-pad, crop back and mirror, drawn once for every image of an epoch."""

    pad: int
    down: numpy.ndarray
    right: numpy.ndarray
    mirror: numpy.ndarray

    @staticmethod
    def draw(images: ImageSet, seed: int, epoch: int) -> Shift:
        """The draws of one epoch, by position in the set."""
        augment, count = images.augment, len(images)
        pad = augment.pad if augment.pad is not None else images.input.size[1] // 8
        generator = numpy.random.default_rng((seed, epoch, 1))
        down, right = generator.integers(0, 2 * pad + 1, (2, count))
        hflip = 0.5 if augment.hflip is None else augment.hflip
        return Shift(pad, down, right, generator.random(count) < hflip)

    def apply(self, raw: Tensor, positions: numpy.ndarray) -> Tensor:
        """Crop and mirror a batch in one gather; the result is laid out channels last."""
        count, _, height, width = raw.shape
        padded = torch.nn.functional.pad(raw, (self.pad,) * 4)
        rows = torch.from_numpy(self.down[positions])[:, None] + torch.arange(height)
        steps = torch.arange(width).expand(count, width)
        mirror = torch.from_numpy(self.mirror[positions])[:, None]
        columns = torch.where(mirror, width - 1 - steps, steps)
        columns = columns + torch.from_numpy(self.right[positions])[:, None]
        which = torch.arange(count)[:, None, None]
        return padded[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Normalise:
    """From bytes to what the network expects."""

    def __init__(self, seen: Input, device: str) -> None:
        self.device = device
        self.mean = (255 * torch.tensor(seen.mean)).view(1, -1, 1, 1).to(device)
        self.scale = 1 / (255 * torch.tensor(seen.std)).view(1, -1, 1, 1).to(device)

    def __call__(self, raw: Tensor) -> Tensor:
        """A new float tensor on the device, in the layout of `raw`."""
        floats = raw.to(self.device, non_blocking=True).to(torch.float32)
        return floats.sub_(self.mean).mul_(self.scale)


def at_once(images: ImageSet, device: str = "cpu", most: int = MOST_AT_ONCE) -> int:
    """How many images go through a network together where nothing is learnt from them."""
    height, width = images.input.size[1:]
    return most if device != "cpu" else max(1, min(most, PIXELS_AT_ONCE // (height * width)))


def loader(
    images: ImageSet,
    batch_size: int | None = None,
    *,
    train: bool = False,
    seed: int = 0,
    workers: int | None = None,
    dist: Dist = SINGLE,
    device: str = "cpu",
) -> Batches:
    """Batches of a set: shuffled and varied for training, in order and complete otherwise.

    `batch_size` counts the images of one process; without one it is as suits the device.
    """
    if not len(images):
        raise InputError(
            f"there are no {images.name} images",
            why="the data has none, or too few to hold some out",
            try_="more images, or another split of the data",
        )
    if train and len(images) < dist.world:
        raise InputError(
            f"{len(images)} {images.name} images for {dist.world} processes",
            why="every process needs one at least",
            try_="more images, or a smaller --nproc-per-node",
        )
    if workers is None:
        workers = min(4, len(os.sched_getaffinity(0)))
    size = at_once(images, device) if batch_size is None else batch_size
    return Batches(images, size, train, seed, workers, dist, device)


def evaluation_transform(seen: Input) -> Any:
    """timm's transform for evaluation, up to bytes."""
    from timm.data.transforms_factory import create_transform

    return create_transform(
        seen.size,
        is_training=False,
        use_prefetcher=True,
        interpolation=seen.interpolation,
        crop_pct=seen.crop_pct,
    )


def training_transform(seen: Input, augment: Augment) -> Any:
    """timm's transform for training, up to bytes."""
    from timm.data.transforms_factory import create_transform

    hflip = 0.5 if augment.hflip is None else augment.hflip
    return create_transform(
        seen.size,
        is_training=True,
        use_prefetcher=True,
        interpolation=seen.interpolation,
        hflip=hflip,
        scale=augment.scale,
        ratio=augment.ratio,
        color_jitter=0.4 if augment.color_jitter is None else augment.color_jitter,
        auto_augment=augment.aa,
        mean=seen.mean,
        std=seen.std,
    )
