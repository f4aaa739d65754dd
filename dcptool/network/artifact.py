"""A slim network on disk: manifest.json and model.safetensors in one folder.

The manifest names the dense network, the kept indices of every module and the hash of the
weights; it is written last, so that a folder with a manifest is whole. Loading builds the dense
network from a registry, cuts it and pours the weights in: no pickle, no code from files.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import nn

from dcptool import __version__, files, weights
from dcptool.errors import InputError, UsageError
from dcptool.network import models, names
from dcptool.network.base import Base, Cut, Input, Network
from dcptool.network.manifest import NEWEST_FIRST, Manifest, read_manifest, write_indices
from dcptool.network.surgery import cut
from dcptool.network.trace import meta_copy

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
# Stands beside an older manifest while its weights are replaced.
NEXT_MANIFEST = ".manifest.next.json"
FORMAT = 1
CUSTOM = "custom"


def save(
    network: Network,
    folder: Path,
    *,
    cost: Mapping[str, object],
    metrics: Mapping[str, object] | None = None,
    lineage: Mapping[str, object] | None = None,
) -> Path:
    """Write an artifact into `folder`; returns the manifest's path."""
    files.make_folder(folder)
    state = {k: v.detach().cpu().contiguous() for k, v in network.module.state_dict().items()}
    data = safetensors_bytes(state)
    document = {
        "format": FORMAT,
        "dcptool": __version__,
        "base": {
            "source": network.base.source,
            "name": network.base.name,
            "num_classes": network.base.num_classes,
            "arguments": dict(network.base.arguments),
        },
        "input": {
            "size": list(network.input.size),
            "mean": list(network.input.mean),
            "std": list(network.input.std),
            "interpolation": network.input.interpolation,
            "crop_pct": network.input.crop_pct,
        },
        "classes": list(network.classes) if network.classes is not None else None,
        "cuts": {name: _cut_document(kept) for name, kept in network.cuts.items()},
        "cost": dict(cost),
        "metrics": dict(metrics or {}),
        "lineage": dict(lineage or {}),
        "files": {WEIGHTS: {"bytes": len(data), "sha256": files.sha256(data)}},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "torchvision", "timm")},
        },
    }
    if (folder / MANIFEST).exists():
        # Two files cannot be replaced at one instant; with this, either weights have a manifest.
        files.publish_json(folder / NEXT_MANIFEST, document)
    files.publish(folder / WEIGHTS, data)
    files.publish_json(folder / MANIFEST, document)
    files.remove(folder / NEXT_MANIFEST)
    return folder / MANIFEST


def _cut_document(kept: Cut) -> dict[str, object]:
    document: dict[str, object] = {}
    if kept.inputs is not None:
        document["in"] = write_indices(kept.inputs)
    if kept.outputs is not None:
        document["out"] = write_indices(kept.outputs)
    if kept.dim:
        document["dim"] = kept.dim
    return document


def load(path: Path, *, factory: Callable[[], nn.Module] | None = None) -> Network:
    """Read, verify and rebuild an artifact; raises InputError when anything does not verify.

    `factory` builds the dense network of an artifact that was made from a module of your own.
    """
    manifest = read(path)
    if manifest.base.source == CUSTOM:
        if factory is None:
            raise InputError(
                f"cannot load {path}: it was made from a module of your own",
                why=f"the code of {manifest.base.name} is not stored in the artifact",
                try_=f"dcptool.load({str(path)!r}, factory=...) in Python",
            )
        module = factory().eval()
    else:
        module = models.build(manifest.base)
    data = files.read_bytes(path / WEIGHTS, what="weights", limit=manifest.weights_bytes)
    if len(data) != manifest.weights_bytes:
        raise InputError(
            f"{path / WEIGHTS} is truncated",
            why=f"it has {len(data):,} bytes, the manifest says {manifest.weights_bytes:,}",
        )
    found = files.sha256(data)
    if found != manifest.weights_sha256:
        raise InputError(
            f"{path / WEIGHTS} is not the file that the manifest describes",
            why=f"sha256 is {found}, expected {manifest.weights_sha256}",
            try_="copy the artifact again from where it was made",
        )
    try:
        cut(module, manifest.cuts)
    except (IndexError, RuntimeError) as err:
        raise InputError(f"cannot cut {manifest.base} as {path} says", why=str(err)) from err
    state = weights.parse(data, path / WEIGHTS)
    models.fill(module, state, where=str(path / WEIGHTS), network=str(manifest.base))
    params = sum(p.numel() for p in module.parameters())
    if params != manifest.cost.get("params", params):
        raise InputError(
            f"{path} does not verify",
            why=f"{params:,} parameters, the manifest says {manifest.cost['params']:,}",
        )
    _check_runs(module, manifest.input.size, path)
    return Network(
        module.eval(),
        manifest.base,
        manifest.input,
        manifest.classes,
        manifest.cuts,
        weights=f"artifact {path.name}",
    )


def _check_runs(module: nn.Module, size: tuple[int, ...], path: Path) -> None:
    """Widths must fit each other. Run without data, where a size in a manifest costs nothing."""
    try:
        with torch.no_grad():
            meta_copy(module).eval()(torch.empty((1, *size), device="meta"))
    except Exception as err:
        raise InputError(f"{path} does not verify", why=f"its parts do not fit: {err}") from err


def read(path: Path) -> Manifest:
    """Read and check the manifest of an artifact folder."""
    if not (path / MANIFEST).is_file():
        raise _no_artifact(path)
    manifest = read_manifest(path / MANIFEST, newest=FORMAT)
    if not (path / NEXT_MANIFEST).is_file():
        return manifest
    following = read_manifest(path / NEXT_MANIFEST, newest=FORMAT)
    found = files.sha256(files.read_bytes(path / WEIGHTS, what="weights"))
    return following if found == following.weights_sha256 else manifest


def _no_artifact(path: Path) -> InputError:
    """What to say of a folder without a manifest, which may be a run or a part of one."""
    inside = next((n for n in NEWEST_FIRST if (path / n / MANIFEST).is_file()), None)
    if inside is not None:
        what, why = "is the run of a recipe", "its artifacts are in it, one for each step"
        return InputError(f"{path} {what}", why=why, try_=f"the same command with {path / inside}")
    begun = next((n for n in NEWEST_FIRST if (path / f"{n}.json").is_file()), None)
    kind = "an unfinished artifact" if begun or (path / WEIGHTS).exists() else "no artifact"
    return InputError(
        f"{path} is {kind}",
        why=f"there is no {MANIFEST} in it",
        try_=f"dcptool {begun} --resume {shlex.quote(str(path))}"
        if begun
        else "dcptool prune resnet50 --rate 0.3",
    )


def load_dense(base: Base, seen: Input, path: Path) -> Network:
    """The dense network of an artifact, with the weights that its run keeps in `path`."""
    module = models.build(base)
    models.fill(module, weights.read(path), where=str(path), network=str(base))
    return Network(module, base, seen, weights=f"checkpoint {path.name}")


def is_artifact(target: str) -> bool:
    """Whether a command's argument names a folder rather than a model.

    A folder that holds no artifact does not hide the model of its name.
    """
    if os.path.exists(os.path.join(target, MANIFEST)):  # noqa: PTH110, PTH118 - never raises
        return True
    return os.path.isdir(target) and not names.is_name(target)  # noqa: PTH112


def open_target(
    target: str,
    *,
    pretrained: bool = True,
    checkpoint: Path | None = None,
    num_classes: int | None = None,
    img_size: int | None = None,
    seed: int = 0,
    offline: bool = False,
) -> Network:
    """The network that a command's argument names: an artifact folder or a model."""
    if not is_artifact(target):
        return models.load(
            target,
            pretrained=pretrained,
            checkpoint=checkpoint,
            num_classes=num_classes,
            img_size=img_size,
            seed=seed,
            offline=offline,
        )
    faults = [
        option
        for option, given in (
            ("--checkpoint", checkpoint is not None),
            ("--num-classes", num_classes is not None),
        )
        if given
    ]
    if faults:
        raise UsageError(
            f"{' and '.join(faults)} cannot be used with the artifact {target}",
            why="an artifact has its own weights and classifier",
        )
    network = load(Path(target))
    if img_size is not None:
        network.input = Input(
            (network.input.size[0], img_size, img_size),
            network.input.mean,
            network.input.std,
            network.input.interpolation,
            network.input.crop_pct,
        )
    return network


def custom_base(module: nn.Module, num_classes: int) -> Base:
    """The base of a module of the user's own, which only their factory can build again."""
    kind = type(module)
    return Base(CUSTOM, f"{kind.__module__}.{kind.__qualname__}", num_classes)


def cost_document(params: int, macs: int, dense_params: int, dense_macs: int) -> dict[str, Any]:
    """The manifest's `cost`: before and after."""
    return {
        "params": params,
        "macs": macs,
        "dense_params": dense_params,
        "dense_macs": dense_macs,
    }
