"""Large images: decoded and transformed in worker processes, handed over as bytes.

Every image seeds its own draws from seed, epoch and number, so that neither the count of
workers nor a resume changes what is seen. Bad images come back as messages, not exceptions.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dcptool.errors import EnvironmentFault
from dcptool.training.images import BadImage
from dcptool.training.loader import ImageSet, all_bad, evaluation_transform
from dcptool.training.loader import training_transform as make_training_transform
from dcptool.training.randomness import kept_random_state, seed_all

Item = tuple[int, Tensor | str, int]
# Pixels of the images that could be read, their labels, and why the others could not.
Batch = tuple[Tensor | None, list[int], dict[int, str]]
# Open files of one worker: pipes, its end of a queue, batches under way.
FILES_EACH = 12


class _Reader(Dataset[Item]):
    def __init__(self, images: ImageSet, epoch: int, seed: int, *, train: bool) -> None:
        self.images = images
        self.epoch = epoch
        self.seed = seed
        self.varied = train and not images.augment.off
        seen = images.input
        self.transform: Any = (
            make_training_transform(seen, images.augment)
            if self.varied
            else evaluation_transform(seen)
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, position: int) -> Item:
        store = self.images.store
        number = int(self.images.numbers[position])
        try:
            image = store.source.read(number, store.mode)
        except BadImage as err:
            return number, f"{err.where}: {err.why}", -1
        label = int(self.images.labels[position])
        if not self.varied:
            return number, torch.as_tensor(self.transform(image)), label
        with kept_random_state():
            seed_all(self.seed, self.epoch, number)
            return number, torch.as_tensor(self.transform(image)), label


def _together(items: list[Item]) -> Batch:
    """One tensor for a batch: each that goes from process to process takes an open file."""
    good = [(pixels, label) for _, pixels, label in items if isinstance(pixels, Tensor)]
    bad = {number: pixels for number, pixels, _ in items if isinstance(pixels, str)}
    return torch.stack([p for p, _ in good]) if good else None, [label for _, label in good], bad


def _calm_worker(_number: int) -> None:
    """Leave Ctrl-C to the parent, which saves first; end on SIGTERM as processes do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    torch.set_num_threads(1)


def read_in_workers(
    images: ImageSet,
    order: Sequence[numpy.ndarray],
    epoch: int,
    *,
    seed: int,
    workers: int,
    train: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of bytes and labels in the given order; skipped images make a batch smaller."""
    _require_files(workers)
    reader = _Reader(images, epoch, seed, train=train)
    batches: DataLoader[Any] = DataLoader(
        reader,
        batch_sampler=[positions.tolist() for positions in order],
        num_workers=min(workers, len(order)),
        collate_fn=_together,
        worker_init_fn=_calm_worker,
    )
    store = images.store
    try:
        for pixels, labels, bad in batches:
            store.bad.update(bad)
            store.unreadable.judge()
            if pixels is None:
                raise all_bad(images)
            yield pixels, torch.tensor(labels)
    except (RuntimeError, OSError, EOFError) as err:
        raise worker_fault(err, workers) from err


def _require_files(workers: int) -> None:
    """Refuse to start workers that would have no file to open: torch's would wait for ever."""
    try:
        taken = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if workers and limit != resource.RLIM_INFINITY and limit < taken + FILES_EACH * workers:
        raise worker_fault(
            OSError(f"Too many open files: {limit} are allowed, {taken} are open"), workers
        )


def worker_fault(err: Exception, workers: int) -> EnvironmentFault:
    """Say what it means when worker processes, their memory or their handles give out."""
    text = str(err).splitlines()[0] if str(err) else type(err).__name__
    if "shared memory" in text or "shm" in text or "No space left" in text:
        what = "no shared memory for data workers (/dev/shm is full)"
    elif "Too many open files" in text or "open files" in text:
        what = "too many open files for data workers (ulimit -n)"
    elif (
        "killed by signal" in text
        or "exited unexpectedly" in text
        or isinstance(err, (ConnectionError, EOFError))
    ):
        what = "a data worker died, maybe out of memory"
    else:
        what = f"reading images in {workers} workers failed"
    return EnvironmentFault(what, why=text, try_="the same command with --workers 0")
