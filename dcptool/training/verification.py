"""Are two faces the same person? Ten-fold verification as LFW prescribes it.

Reads `pairs.txt` and aligned faces, embeds every face and its mirror image, averages the two, and
compares by cosine. The threshold for each fold is the best on the nine others. Faces are not found
or aligned here: a size other than the network's is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dcptool import console, files
from dcptool.errors import InputError
from dcptool.network.base import Input, Network
from dcptool.training import images
from dcptool.training.angular import classifier_of, seen_by

BATCH_SIZE = 64
PAIRS = "pairs.txt"
SUFFIXES = (".jpg", ".png", ".jpeg", ".bmp")
LAYOUT = "DIR/pairs.txt and DIR/NAME/NAME_0001.jpg, faces aligned and of the network's size"

Embed = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pair:
    """Two files, whether they show the same person, and the fold they belong to."""

    left: Path
    right: Path
    same: bool
    fold: int


@dataclass(frozen=True)
class Verified:
    """Accuracy in percent, of each fold and over all, and the thresholds that gave it."""

    accuracy: float
    std: float
    folds: tuple[float, ...]
    thresholds: tuple[float, ...]
    pairs: int
    images: int


def read_pairs(root: Path) -> list[Pair]:
    """The pairs of LFW: a line with folds and pairs, then for each fold as many same as not."""
    path = root / PAIRS
    text = files.read_bytes(path, what="list of pairs", limit=16 << 20).decode("utf-8", "replace")
    lines = [line.split() for line in text.splitlines() if line.strip()]
    try:
        folds, half = (int(lines[0][0]), int(lines[0][1])) if len(lines[0]) == 2 else (10, 300)
        body = lines[1:] if len(lines[0]) in (1, 2) else lines
        _check_count(len(body), folds, half)
        return [_pair(root, words, number // (2 * half)) for number, words in enumerate(body)]
    except (ValueError, IndexError) as err:
        raise InputError(f"{path} is no list of pairs", why=str(err), try_=LAYOUT) from err


def _check_count(pairs: int, folds: int, half: int) -> None:
    if folds < 2 or pairs != 2 * folds * half:
        raise ValueError(f"{pairs} pairs where {folds} folds of {2 * half} are wanted")


def _pair(root: Path, words: Sequence[str], fold: int) -> Pair:
    if len(words) == 3:
        name, first, second = words
        return Pair(_face(root, name, first), _face(root, name, second), True, fold)
    if len(words) == 4:
        left, right = _face(root, words[0], words[1]), _face(root, words[2], words[3])
        return Pair(left, right, False, fold)
    raise ValueError(f"a line of {len(words)} words: {' '.join(words)[:60]}")


def _face(root: Path, name: str, number: str) -> Path:
    if "/" in name or name.startswith("."):
        raise ValueError(f"{name} is no name of a person")
    stem = root / name / f"{name}_{int(number):04d}"
    for suffix in SUFFIXES:
        if stem.with_suffix(suffix).is_file():
            return stem.with_suffix(suffix)
    raise InputError(f"there is no face {stem}{SUFFIXES[0]}", why="a pair names it", try_=LAYOUT)


def embedder(network: Network, device: str = "cpu") -> Embed:
    """What a network knows of a face: what its classifier reads, or its output without one."""
    module = network.module.to(device).eval()
    layer = classifier_of(module) if network.base.num_classes else None
    if layer is not None and layer.out_features != network.base.num_classes:
        layer = None

    def embed(faces: Tensor) -> Tensor:
        with torch.inference_mode():
            if layer is None:
                value: Tensor = module(faces.to(device))
                return value.flatten(1).float().cpu()
            with seen_by(layer) as found:
                module(faces.to(device))
            return found[-1].flatten(1).float().cpu()

    return embed


def face_tensor(path: Path, spec: Input) -> Tensor:
    """One face as the network expects it."""
    try:
        picture = images.read(path)
    except images.BadImage as err:
        raise InputError(f"cannot read {path}", why=err.why) from err
    height, width = spec.size[1:]
    if picture.size != (width, height):
        raise InputError(
            f"{path} is {picture.size[0]} x {picture.size[1]} px",
            why=f"aligned faces of {width} x {height} px are wanted",
            try_=LAYOUT,
        )
    pixels = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255).permute(2, 0, 1)
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    return (pixels - mean) / std


def embeddings(
    paths: Sequence[Path], spec: Input, embed: Embed, batch_size: int = 64
) -> dict[Path, Tensor]:
    """The mean of the embeddings of each face and of its mirror image."""
    found: dict[Path, Tensor] = {}
    with console.progress("faces", len(paths)) as task:
        for start in range(0, len(paths), batch_size):
            some = paths[start : start + batch_size]
            faces = torch.stack([face_tensor(path, spec) for path in some])
            both = (embed(faces) + embed(faces.flip(3))) / 2
            found.update(zip(some, both, strict=True))
            task.advance(len(some))
    return found


def ten_folds(scores: np.ndarray, same: np.ndarray, fold: np.ndarray) -> Verified:
    """Accuracy of every fold at the threshold that is best on the others."""
    accuracies, thresholds = [], []
    for number in np.unique(fold):
        mine = fold == number
        threshold = best_threshold(scores[~mine], same[~mine])
        accuracies.append(100 * float(np.mean((scores[mine] >= threshold) == same[mine])))
        thresholds.append(threshold)
    mean, std = float(np.mean(accuracies)), float(np.std(accuracies))
    return Verified(mean, std, tuple(accuracies), tuple(thresholds), len(scores), 0)


def best_threshold(scores: np.ndarray, same: np.ndarray) -> float:
    """The cosine from which on pairs count as the same, with fewest mistakes; the lowest such."""
    order = np.argsort(scores, kind="stable")
    ordered, truth = scores[order], same[order].astype(np.int64)
    # Mistakes when the first k pairs count as different: the same among them, others after them.
    mistakes = np.concatenate(([0], np.cumsum(truth))) + np.concatenate(
        (np.cumsum((1 - truth)[::-1])[::-1], [0])
    )
    # A threshold cannot part equal scores.
    apart = np.concatenate(([True], ordered[1:] > ordered[:-1], [True]))
    cut = int(np.flatnonzero(apart)[np.argmin(mistakes[apart])])
    if cut == 0:
        return float(ordered[0] - 1e-6)
    if cut == len(ordered):
        return float(ordered[-1] + 1e-6)
    return float((ordered[cut - 1] + ordered[cut]) / 2)


def verify(
    network: Network, root: Path, *, device: str = "cpu", batch_size: int = BATCH_SIZE
) -> Verified:
    """LFW verification of a network on a folder of aligned faces."""
    pairs = read_pairs(root)
    paths = sorted({path for pair in pairs for path in (pair.left, pair.right)})
    known = embeddings(paths, network.input, embedder(network, device), batch_size)
    left = torch.stack([known[pair.left] for pair in pairs])
    right = torch.stack([known[pair.right] for pair in pairs])
    scores = functional.cosine_similarity(left, right).numpy().astype(np.float64)
    same = np.array([pair.same for pair in pairs])
    result = ten_folds(scores, same, np.array([pair.fold for pair in pairs]))
    network.module.cpu()
    return Verified(
        result.accuracy, result.std, result.folds, result.thresholds, result.pairs, len(paths)
    )
