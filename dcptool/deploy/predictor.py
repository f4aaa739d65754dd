"""An .onnx file as something that turns images into class scores.

The file is scanned and met by a child process first, like every foreign file. What it says
of its own input (size, mean, std, embedded preprocessing) is how it is fed; what makes no
sense there is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dcptool import console
from dcptool.deploy import guard, onnx_graph, onnx_scan
from dcptool.deploy.session import feed_of, open_session
from dcptool.errors import InputError, UsageError
from dcptool.network.models import Base, Input, Network

LARGEST_SIDE = 16384
MOST_CLASSES = 1_000_000
CHANNELS = (1, 3)
KINDS = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
}
DEFAULT = Input((3, 224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class OnnxNetwork:
    """A file ready to answer, described as a network whose module is never run."""

    network: Network
    predict: Callable[[Tensor], Tensor]
    batch_size: int | None
    normalises: bool = False


def open_onnx(path: Path, *, threads: int = 0, img_size: int | None = None) -> OnnxNetwork:
    """Check and load a file; exit 3 says what is wrong with it."""
    scanned = onnx_scan.scan(path)
    facts = onnx_graph.metadata(scanned.proto)
    feed = feed_of(scanned.proto)
    if feed.kind not in KINDS:
        raise InputError(f"{path} takes no images", why=f"its input is a {feed.kind}")
    kind = KINDS[feed.kind]
    embedded = kind is np.uint8
    if len(feed.shape) != 4:
        raise InputError(f"{path} takes no images", why=f"its input has shape {list(feed.shape)}")
    is_last = _channels_last(feed.shape, embedded=embedded)
    sides = feed.shape[1:3] if is_last else feed.shape[2:]
    channels = feed.shape[3] if is_last else feed.shape[1]
    if img_size is not None and any(side not in (None, img_size) for side in sides):
        raise UsageError(
            f"{path} takes images of {sides[0]} x {sides[1]} px only, not of {img_size}",
            try_="no --img-size, or a file that was exported with --dynamic size",
        )
    seen = _input(path, facts, (channels, *sides), embedded=embedded, img_size=img_size)
    fixed = feed.shape[0]
    guard.visit(path, batch_size=fixed or 1, size=seen.size[1])
    session = open_session(scanned.data, threads=threads, folder=scanned.folder)
    output = session.get_outputs()[0]
    classes = _said(path, facts, "classes", _names)
    last = output.shape[-1] if output.shape else None
    count = last if isinstance(last, int) else _said(path, facts, "num_classes", _count) or 0
    if len(output.shape) != 2 or count < 1:
        raise InputError(f"{path} is no classifier", why=f"its output has shape {output.shape}")
    is_probability = facts.get("output") == "probabilities"

    def predict(images: Tensor) -> Tensor:
        missing = max(0, (fixed or 0) - len(images))
        batch: np.ndarray[Any, Any]
        if embedded:
            images = (images * 255).round().clamp(0, 255)
        if is_last:
            images = images.permute(0, 2, 3, 1)
        batch = images.contiguous().cpu().numpy().astype(kind)
        if missing:
            batch = np.concatenate([batch, np.zeros((missing, *batch.shape[1:]), batch.dtype)])
        try:
            found = session.run(None, {feed.name: batch})[0]
        except Exception as err:  # onnxruntime's classes share no public base
            raise InputError(
                f"cannot run {path} on a batch of {' x '.join(map(str, batch.shape))}",
                why=str(err).strip().partition("\n")[0][:300],
                try_="another --img-size or --batch-size",
            ) from err
        scores = torch.from_numpy(found)[: len(images)].float()
        return scores.clamp_min(1e-38).log() if is_probability else scores

    base = Base("onnx", path.name, count)
    network = Network(torch.nn.Identity(), base, seen, classes)
    return OnnxNetwork(network, predict, fixed, embedded)


def _channels_last(shape: tuple[int | None, ...], *, embedded: bool) -> bool:
    """Where the channels stand; where the shape does not tell, as our own exports have it."""
    if shape[1] in CHANNELS and shape[3] not in CHANNELS:
        return False
    return embedded or (shape[3] in CHANNELS and shape[1] not in CHANNELS)


def _input(
    path: Path,
    facts: dict[str, str],
    fixed: tuple[int | None, ...],
    *,
    embedded: bool,
    img_size: int | None,
) -> Input:
    """How images become its input; `fixed` are channels, height and width where it says them."""
    known = _said(path, facts, "input_size", _size)
    if known is None:
        console.note(f"{path} does not say how it was fed: ImageNet's mean and std unless given")
    channels, height, width = (
        a or b or c
        for a, b, c in zip(fixed, (None, img_size, img_size), known or DEFAULT.size, strict=True)
    )
    mean = _said(path, facts, "mean", _numbers) or DEFAULT.mean
    std = _said(path, facts, "std", _numbers) or DEFAULT.std
    if embedded:
        mean, std = (0.0,) * channels, (1.0,) * channels
    return Input(
        (channels, height, width),
        mean,
        std,
        _said(path, facts, "interpolation", _interpolation) or DEFAULT.interpolation,
        _said(path, facts, "crop_pct", _share) or DEFAULT.crop_pct,
    )


Found = TypeVar("Found")


def _said(
    path: Path, facts: Mapping[str, str], key: str, parse: Callable[[str], Found]
) -> Found | None:
    """What a file's metadata say under `key`, or None; exit 3 when it makes no sense."""
    if key not in facts:
        return None
    try:
        return parse(facts[key])
    except (ValueError, TypeError, RecursionError) as err:
        raise InputError(
            f"refused {path}",
            why=f"its metadata say {facts[key][:60]!r} for {key}",
            try_="export it again, or remove that entry from the file",
        ) from err


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _names(text: str) -> tuple[str, ...]:
    found = json.loads(text)
    _require(isinstance(found, list) and 0 < len(found) <= MOST_CLASSES)
    _require(all(isinstance(name, str) for name in found))
    return tuple(found)


def _count(text: str) -> int:
    found = int(text)
    _require(0 < found <= MOST_CLASSES)
    return found


def _size(text: str) -> tuple[int, ...]:
    found = json.loads(text)
    _require(isinstance(found, list) and len(found) == 3)
    _require(all(type(side) is int and 0 < side <= LARGEST_SIDE for side in found))
    return tuple(found)


def _numbers(text: str) -> tuple[float, ...]:
    found = json.loads(text)
    _require(isinstance(found, list) and 0 < len(found) <= 4)
    _require(all(type(one) in (int, float) and math.isfinite(one) for one in found))
    return tuple(float(one) for one in found)


def _interpolation(text: str) -> str:
    _require(text in ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming", "random"))
    return text


def _share(text: str) -> float:
    found = float(text)
    _require(0 < found <= 1)
    return found
