"""Feature maps of channels that were kept beside those that were removed, for a few images.

Runs the dense network of a run, whose weights lie in it, up to one layer. The pictures are kept in
the run as PNG in base64, so that later reports show them, too.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor

from dcptool import files
from dcptool.errors import InputError, UsageError
from dcptool.network import artifact, models
from dcptool.network.base import Input, Network
from dcptool.network.manifest import DENSE_WEIGHTS, Manifest
from dcptool.report.record import FEATURES_FILE, Record
from dcptool.training import data as images
from dcptool.training.loader import Augment, loader

MOST_CHANNELS, MOST_IMAGES, ACROSS = 16, 16, 4
SMALLEST_TILE, LARGEST_INPUT = 24, 128
DATA_KEYS = ("data_dir", "dataset", "images", "train_split", "val_split", "val_fraction")


def keep_features(record: Record, layer: str, source: Path | None, count: int) -> None:
    """Draw the maps of `layer` for `count` images and leave them in the run."""
    manifest = record.manifest
    kept, removed = _channels(record, layer)
    network = _dense(record)
    batch, names = _images(record, network, source, min(count, MOST_IMAGES))
    found: list[Tensor] = []

    def see(_module: object, _inputs: object, output: Tensor) -> None:
        found.append(output.detach())

    handle = network.module.get_submodule(layer).register_forward_hook(see)
    try:
        with torch.inference_mode():
            network.module.eval()(batch)
    finally:
        handle.remove()
    maps = found[0]
    if maps.dim() != 4:
        raise UsageError(f"{layer} gives no feature maps", why="its output has no height and width")
    shown = [
        {
            "name": name,
            "input": _png(_pixels(image, manifest.input)),
            "kept": _png(_sheet(one[kept[:MOST_CHANNELS]], _top(one))),
            "removed": _png(_sheet(one[removed[:MOST_CHANNELS]], _top(one))),
        }
        for name, image, one in zip(names, batch, maps, strict=True)
    ]
    document = {
        "layer": layer,
        "kept": len(kept),
        "removed": len(removed),
        "shown_kept": min(len(kept), MOST_CHANNELS),
        "shown_removed": min(len(removed), MOST_CHANNELS),
        "images": shown,
    }
    files.publish_json(record.parts[0].folder / FEATURES_FILE, document)


def _channels(record: Record, layer: str) -> tuple[list[int], list[int]]:
    """Channels of a layer that stayed and that went; those that were chosen first come first."""
    cuts = record.manifest.cuts
    cut = cuts.get(layer)
    if cut is None or cut.outputs is None:
        cut_layers = [name for name, one in cuts.items() if one.outputs is not None]
        raise UsageError(
            f"no channel of {layer} was removed",
            why=f"layers with removed channels: {', '.join(cut_layers[:6])} ..."
            if cut_layers
            else "nothing was cut in this run",
            try_=f"--features {cut_layers[0]}" if cut_layers else "",
        )
    step = next((s for s in record.steps if s.get("group") == layer), {})
    order = [u for u in step.get("order", []) if isinstance(u, int)]
    rank = {unit: place for place, unit in enumerate(order)}
    kept = sorted(cut.outputs, key=lambda unit: (rank.get(unit, len(rank)), unit))
    width = _width(record.manifest, layer)
    removed = sorted(set(range(width)) - set(cut.outputs), key=lambda u: (-rank.get(u, -1), u))
    return kept, removed


def _width(manifest: Manifest, layer: str) -> int:
    module: Any = models.build(manifest.base).get_submodule(layer)
    for key in ("out_channels", "num_features", "num_channels", "out_features"):
        if isinstance(value := getattr(module, key, None), int):
            return value
    raise UsageError(f"the width of {layer} is not known", try_="name a convolution")


def _dense(record: Record) -> Network:
    manifest = record.manifest
    path = record.dense_weights()
    if path is None:
        raise InputError(
            f"the dense weights of {record.name} are not there",
            why="removed channels are seen in the dense network, whose weights prune keeps",
            try_=f"dcptool prune, whose run holds {DENSE_WEIGHTS}",
        )
    return artifact.load_dense(manifest.base, manifest.input, path)


def _images(
    record: Record, network: Network, source: Path | None, count: int
) -> tuple[Tensor, list[str]]:
    """Images of a folder, or of the data that the run was pruned on."""
    options: dict[str, Any] = {}
    if source is not None:
        options["images"] = source
    else:
        recorded = {k: record.options[k] for k in DATA_KEYS if record.options.get(k) is not None}
        for key in ("data_dir", "images"):
            if key in recorded:
                recorded[key] = Path(str(recorded[key])).expanduser()
        options |= recorded
    spec = images.at_own_size(images.spec_of(options, offline=True))
    found = images.open_data(spec, network, need_train=False)
    chosen = found.report if found.labelled else found.train
    # Spread over the set, which may be sorted by class.
    places = numpy.linspace(0, len(chosen) - 1, min(count, len(chosen))).round().astype(numpy.int64)
    some = chosen.subset(numpy.unique(places), "shown", augment=Augment.none())
    batch, labels = next(iter(loader(some, len(some), workers=0)))
    names = found.classes
    return batch, [
        names[y] if found.labelled and names else f"image {i + 1}"
        for i, y in enumerate(labels.tolist())
    ]


def _pixels(image: Tensor, seen: Input) -> numpy.ndarray:
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (seen.mean, seen.std))
    pixels = ((image.cpu() * std + mean).clamp(0, 1) * 255).round().byte()
    array = pixels.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    picture.thumbnail((LARGEST_INPUT, LARGEST_INPUT))
    return numpy.asarray(picture)


def _top(maps: Tensor) -> float:
    """What is drawn brightest: few outliers must not darken the rest."""
    return float(torch.quantile(maps.abs().flatten()[:1_000_000], 0.995)) or 1.0


def _sheet(maps: Tensor, top: float) -> numpy.ndarray:
    """Maps side by side, in the strength of their answer."""
    from matplotlib import colormaps

    tiles = (maps.abs() / top).clamp(0, 1).cpu().numpy()
    scale = max(1, -(-SMALLEST_TILE // max(1, tiles.shape[-1])))
    tiles = tiles.repeat(scale, axis=1).repeat(scale, axis=2)
    rows = max(1, -(-len(tiles) // ACROSS))
    high, wide = tiles.shape[1:]
    sheet = numpy.full((rows * (high + 2) - 2, ACROSS * (wide + 2) - 2, 4), 0.0)
    for place, tile in enumerate(tiles):
        y, x = (place // ACROSS) * (high + 2), (place % ACROSS) * (wide + 2)
        sheet[y : y + high, x : x + wide] = colormaps["viridis"](tile)
    pixels: numpy.ndarray = (sheet * 255).round().astype(numpy.uint8)
    return pixels


def _png(pixels: numpy.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def parse_images(text: str | None) -> tuple[Path | None, int]:
    """`--images`: a number of images of the run's own data, or a folder."""
    if text is None:
        return None, 4
    if text.isascii() and text.isdigit():
        if not 1 <= int(text) <= MOST_IMAGES:
            raise UsageError(f"--images takes 1 to {MOST_IMAGES}, or a folder")
        return None, int(text)
    return Path(text), 4
