"""Dense and slim, in float and in INT8, as files to be timed beside each other.

Both networks have their own weights here, so that each of the four has an accuracy. The files
vanish with their folder; what is wanted for good, `export --int8` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dcptool import console
from dcptool.deploy import export, int8
from dcptool.deploy.bench import Entry
from dcptool.deploy.samples import calibration_images, open_images
from dcptool.errors import InputError
from dcptool.network import artifact
from dcptool.network.base import Network
from dcptool.network.manifest import DENSE_WEIGHTS, dense_weights
from dcptool.training.data import DataSpec


@dataclass(frozen=True)
class Four:
    """The files, and top-1 of each in percent where labels tell it."""

    entries: list[Entry]
    top1: dict[str, float | None]


def four(folder: Path, spec: DataSpec, samples: int, seed: int, scratch: Path) -> Four:
    """Export both networks of an artifact in both precisions, calibrated on the same images."""
    weights = dense_weights(folder, artifact.read(folder).lineage)
    if weights is None:
        raise InputError(
            f"{folder} has no dense network to compare with",
            why=f"there is no {DENSE_WEIGHTS} in it or in the run that it was made from",
            try_="dcptool bench RUN --int8, where RUN is the folder of a prune",
        )
    slim = artifact.load(folder)
    dense = artifact.load_dense(slim.base, slim.input, weights)
    dense.classes = slim.classes
    entries: dict[str, Entry] = {}
    top1: dict[str, float | None] = {}
    for name, network in (("dense", dense), ("slim", slim)):
        plain, coarse = f"{name} fp32", f"{name} int8"
        entries[plain] = Entry(plain, _write(network, scratch / f"{name}.onnx"))
        images = calibration_images(open_images(spec, network), network, samples, seed)
        options = export.Options(int8=int8.Settings(), seed=seed)
        console.note(f"quantizing the {name} network on {samples} images")
        path = scratch / f"{name}-int8.onnx"
        found = export.export(network, path, options, images=images, labels=False)
        entries[coarse] = Entry(coarse, path)
        outcome = found.int8
        top1[plain] = outcome.top1_before if outcome else None
        top1[coarse] = outcome.top1_after if outcome else None
    order = ("dense fp32", "slim fp32", "dense int8", "slim int8")
    return Four([entries[name] for name in order], {name: top1[name] for name in order})


def _write(network: Network, path: Path) -> Path:
    return export.export(network, path, labels=False).file
