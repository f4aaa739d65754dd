"""Accuracy of anything that turns images into class scores.

The predictor is a callable, so a torch module, an artifact and an .onnx file are measured by
the same lines. Over several processes every image counts exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcptool import console
from dcptool.errors import GateFailed
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.layout import laid_out
from dcptool.training.loader import Batches

Predictor = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers in percent, over `images` images."""

    top1: float
    top5: float
    images: int
    images_per_second: float
    loss: float
    per_class: tuple[float | None, ...] | None = None


class Stopped(Exception):
    """The evaluation was asked to end before it was through."""


def predictor(module: nn.Module, *, amp: torch.dtype | None = None) -> Predictor:
    """Scores of a torch module in eval mode, without gradients."""

    def predict(images: Tensor) -> Tensor:
        was_training = module.training
        module.eval()
        try:
            with (
                torch.inference_mode(),
                torch.autocast(
                    images.device.type, dtype=amp or torch.bfloat16, enabled=amp is not None
                ),
            ):
                scores: Tensor = module(laid_out(images))
        finally:
            module.train(was_training)
        return scores

    return predict


def _loss(scores: Tensor, labels: Tensor, wanted: Tensor | None) -> Tensor:
    """Cross-entropy with labels, or the divergence from wanted scores, summed over images."""
    if wanted is None:
        return nn.functional.cross_entropy(scores, labels, reduction="sum")
    given, goal = scores.log_softmax(1), wanted.log_softmax(1)
    return nn.functional.kl_div(given, goal, reduction="sum", log_target=True)


def evaluate(
    predict: Predictor,
    batches: Batches,
    num_classes: int,
    *,
    per_class: bool = False,
    dist: Dist = SINGLE,
    title: str = "evaluate",
    stop: Callable[[], bool] | None = None,
    answers: Predictor | None = None,
) -> Accuracy:
    """Top-1 and top-5 over all images; raises Stopped when `stop` says so.

    Right is what the labels say, or what another predictor `answers` where there are none; then
    the loss is the divergence from its scores.
    """
    device = batches.device
    counts = torch.zeros(4 + 2 * num_classes, dtype=torch.float64, device=device)
    started = time.perf_counter()
    shown = min(5, num_classes)
    with console.progress(title, len(batches)) as task:
        for images, labels in batches.epoch():
            if stop is not None and stop():
                counts[3] += 1
                break
            scores = predict(images).float()
            wanted: Tensor | None = None
            if answers is not None:
                wanted = answers(images).float()
                labels = wanted.argmax(1)
            best = scores.topk(shown, dim=1).indices
            right = best == labels[:, None]
            first = right[:, 0].double()
            counts[0] += first.sum()
            counts[1] += right.sum()
            counts[2] += _loss(scores, labels, wanted).double()
            hits = counts[4:].view(2, num_classes)
            hits[0].index_add_(0, labels, first)
            hits[1].index_add_(0, labels, torch.ones_like(first))
            task.advance(1, f"top-1 {100 * float(hits[0].sum() / hits[1].sum()):.2f}")
    seconds = time.perf_counter() - started
    dist.sum(counts)
    if counts[3]:
        raise Stopped
    hits = counts[4:].view(2, num_classes).cpu()
    seen = int(hits[1].sum())
    top1, top5, loss = (float(value) / seen for value in counts[:3])
    if loss != loss:
        raise GateFailed(
            "the network's scores are not finite",
            why=f"over {seen} images the loss is {loss}",
            try_="other weights with --checkpoint, or --device cpu without --amp",
        )
    return Accuracy(
        top1=100 * top1,
        top5=100 * top5,
        images=seen,
        images_per_second=seen / seconds,
        loss=loss,
        per_class=tuple(100 * float(a / b) if b else None for a, b in hits.T)
        if per_class
        else None,
    )
