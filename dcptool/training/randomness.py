"""Every generator that a transform, a dropout or a mixup may draw from, at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


def seed_all(*numbers: int) -> None:
    """Seed python's, numpy's and torch's generators from a few numbers."""
    value = int(numpy.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(value)
    numpy.random.seed(value)
    torch.default_generator.manual_seed(value)
    # Before that, torch would take a stack trace for each call.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Give the caller's generators back as they were."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
