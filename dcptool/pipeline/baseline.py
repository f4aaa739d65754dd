"""A dense network to start from where none can be had: fitted on the built-in images, and kept.

Only for the built-in sample set. With data of the user's own, weights that cannot be reached are
an error, since a network trained for minutes is nobody's baseline.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save as safetensors_bytes
from torch.nn.modules.batchnorm import _NormBase

from dcptool import __version__, console, files, weights
from dcptool.errors import DcptoolError, InputError
from dcptool.network import models
from dcptool.network.base import Network
from dcptool.training.checkpoint import Checkpoints
from dcptool.training.data import Data
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.loader import loader
from dcptool.training.loop import Run, fit
from dcptool.training.losses import cross_entropy
from dcptool.training.schedule import Schedule

STEPS = 160
BATCH = 32
LR = 0.05


def cache_folder(runs: Path) -> Path:
    """Where fitted baselines are kept: the user's cache, or beside the runs without one."""
    home = os.environ.get("XDG_CACHE_HOME") or (
        str(Path.home() / ".cache") if os.environ.get("HOME") else ""
    )
    folder = (Path(home) if home else runs) / "dcptool" / "baselines"
    try:
        files.make_folder(folder)
    except DcptoolError:
        folder = runs / ".baselines"
        files.make_folder(folder)
    return folder


def load_for_builtin(
    name: str, *, classes: int, pretrained: bool, seed: int, offline: bool
) -> Network:
    """The named network with a classifier for the built-in images, pretrained where possible."""
    if pretrained:
        try:
            return models.load(name, num_classes=classes, seed=seed, offline=offline)
        except (models.WeightsUnreachable, models.NoPublishedWeights) as err:
            console.note(f"no pretrained weights: {err.message}")
    return models.load(name, pretrained=False, num_classes=classes, seed=seed)


def fit_baseline(
    network: Network,
    data: Data,
    *,
    seed: int,
    device: str,
    runs: Path,
    resume_command: str,
    dist: Dist = SINGLE,
) -> Network:
    """Fill `network` (whose classifier fits the data) with weights fitted on the built-in set."""
    folder = cache_folder(runs)
    size = data.input.size[1]
    origin = network.weights.split()[0].rstrip(",")
    # Fitted for these images as they are seen: for others it would be no baseline.
    seen = files.sha256(f"{data.input} {data.train.augment}".encode())[:8]
    what = f"{network.base.source}-{network.base.name}-{size}px-{origin}-{seen}"
    name = f"{what}-seed{seed}-{STEPS}-v{__version__}"
    path = folder / f"{name.replace('/', '_')}.safetensors"
    fitted = replace(network, input=data.input, classes=data.classes)
    if dist.broadcast(path.is_file()):
        try:
            state = weights.read(path)
            models.fill(network.module, state, where=str(path), network=str(network.base))
        except InputError as err:
            console.warn(f"{err.message}; fitting again")
        else:
            console.note(f"dense baseline: {network.base} fitted before on {data.source}")
            return replace(fitted, weights=f"fitted on {data.source}")
    console.note(
        f"no weights of {network.base} know {data.source}: fitting a dense baseline on them first "
        f"({STEPS} steps, kept for the next run)"
    )
    batches = loader(
        data.train, max(1, BATCH // dist.world), train=True, seed=seed, device=device, dist=dist
    )
    has_norms = any(isinstance(m, _NormBase) for m in network.module.modules())
    run = Run(
        device=device,
        clip_grad=None if has_norms else 1.0,
        seed=seed,
        title="baseline",
        keep_best=False,
        checkpoints=Checkpoints(folder / f"{path.stem}.state", {"baseline": name}),
        resume_command=resume_command,
    )
    schedule = Schedule(STEPS, LR, warmup_steps=STEPS // 10)
    fit(network.module, batches, [cross_entropy()], schedule, run, dist)
    network.module.cpu().eval()
    if not dist.is_writer:
        return replace(fitted, weights=f"fitted on {data.source}")
    state = {k: v.contiguous() for k, v in network.module.state_dict().items()}
    files.publish(path, safetensors_bytes(state))
    for leftover in (folder / f"{path.stem}.state").glob("state-*.safetensors"):
        files.remove(leftover)
    return replace(fitted, weights=f"fitted on {data.source}")
