"""Forward and backward time in PyTorch, networks beside each other in random blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn

from dcptool import console
from dcptool.deploy import timing
from dcptool.network.models import Network


@dataclass(frozen=True)
class TorchRow:
    """Median milliseconds of one network."""

    model: str
    batch_size: int
    threads: int
    forward_ms: float
    backward_ms: float

    def document(self) -> dict[str, object]:
        """The row by field name."""
        return asdict(self)


def measure(
    networks: Mapping[str, Network],
    *,
    batch_size: int,
    threads: int,
    warmup: int,
    duration_s: float,
    seed: int = 0,
) -> list[TorchRow]:
    """Median times of copies: forward in eval mode, backward as what it adds in train mode."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runners: dict[str, Callable[[], object]] = {}
        for name, network in networks.items():
            # Training moves the statistics of norms, and the caller's network is not ours.
            module = copy.deepcopy(network.module)
            images = torch.randn(
                batch_size, *network.input.size, generator=torch.Generator().manual_seed(seed)
            )
            runners[f"{name}|forward"] = _forward(module, images)
            runners[f"{name}|train"] = _train_forward(module, images)
            runners[f"{name}|both"] = _both(module, images)
        schedule = timing.plan(runners, warmup=warmup, duration_s=duration_s, iterations=None)
        with console.progress("bench in torch", schedule.rounds) as task:
            found = timing.interleave(runners, schedule, np.random.default_rng(seed), task.advance)
    finally:
        torch.set_num_threads(before)
    rows = []
    for name in networks:
        medians = {
            k: float(np.median(found[f"{name}|{k}"])) * 1e3 for k in ("forward", "train", "both")
        }
        backward = max(medians["both"] - medians["train"], 0.0)
        rows.append(TorchRow(name, batch_size, threads, medians["forward"], backward))
    return rows


def _forward(module: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        module.eval()
        with torch.inference_mode():
            return module(images)

    return run


def _train_forward(module: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        _train(module, len(images))
        return module(images).sum()

    return run


def _both(module: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        _train(module, len(images))
        module.zero_grad(set_to_none=True)
        return module(images).sum().backward()

    return run


def _train(module: nn.Module, batch_size: int) -> None:
    """Train mode; norms cannot take statistics from one image, and stay in eval mode then."""
    module.train()
    if batch_size == 1:
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()
