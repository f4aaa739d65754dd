"""What a run would cost: steps, files, disk and time, from a short measurement of the network.

Writes nothing. Times are those of one forward and one training step on this machine, multiplied
by what the steps will do; they are right to a factor of two or so on a machine that is quiet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dcptool import console
from dcptool.errors import DcptoolError
from dcptool.network import artifact
from dcptool.network.base import Network
from dcptool.network.cost import count
from dcptool.network.graph import build_graph
from dcptool.network.manifest import DENSE_WEIGHTS
from dcptool.pipeline import analysis, baseline
from dcptool.pipeline.recipe import Recipe
from dcptool.pipeline.run import EXPORTED, MANIFEST, Step, steps_of
from dcptool.pipeline.stage_training import stage_steps
from dcptool.training import data as images
from dcptool.training.data import Data
from dcptool.training.settings import BATCH_SIZE, EPOCHS

# Reading torch and the network, and what comes before and after the work proper.
START_S = 3.0
EXPORT_S = 12.0
# Selection keeps what it has computed: so many times, in all, every sample goes through the network
# (five, measured on MobileNet v2).
WALKS = 5
BYTES = 4

Params = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Speed:
    """Seconds of one image, forward alone and in training, and the arithmetic that goes with it."""

    forward: float
    training: float
    flops: float


@dataclass(frozen=True)
class Images:
    """How many images a step walks over."""

    train: int
    val: int
    report: int


def estimate(
    recipe: Recipe, params: Params, speeds: dict[str, Speed] | None = None
) -> dict[str, Any]:
    """The document of a dry run; `params` are the options of each step, defaults included.

    `speeds` keeps what was measured of a network for the next one of the same kind.
    """
    network, data, missing = _open(recipe, params)
    if data is not None:
        network.input = data.input
    known = f"{network.base} {network.input.size}"
    speed = (speeds or {}).get(known) or measure(network)
    if speeds is not None:
        speeds[known] = speed
    rate = recipe.get("prune", "rate")
    rates = (str(rate),) if rate is not None else ("0.3",)
    pruning = params.get("prune", {})
    found = analysis.analyze(network, rates=rates, scope=pruning.get("scope", "paper")).document
    dense = slim = found["dense"]
    if pruning:
        # Inner groups alone come first, then residual ones as well.
        slim = found["rates"][int(pruning["prune_residual"])]
    share = slim["macs"] / max(dense["macs"], 1)
    counts = None
    if data is not None:
        counts = Images(len(data.train), len(data.val), len(data.report))
    rows: list[dict[str, Any]] = []
    sides = dense, dense
    for step in steps_of(recipe):
        if step.name == "prune":
            sides = dense, slim
        seconds = _seconds(step, params[step.name], network, data, counts, speed, share)
        names, disk = _files(step, sides)
        rows.append({"name": step.name, "files": names, "bytes": disk, "seconds": seconds})
    costs = [row["seconds"] for row in rows if row["seconds"] is not None]
    return {
        "recipe": recipe.name,
        "dry_run": True,
        "model": str(network.base),
        "input_size": list(network.input.size),
        "data": None if data is None else data.source,
        "data_missing": missing,
        "images": None if counts is None else vars(counts),
        "measured": {
            "forward_ms_per_image": round(1000 * speed.forward, 3),
            "training_ms_per_image": round(1000 * speed.training, 3),
        },
        "dense": {key: dense[key] for key in ("params", "macs")},
        "slim": {key: slim[key] for key in ("params", "macs")},
        "steps": rows,
        "bytes": sum(row["bytes"] for row in rows),
        "seconds": round(sum(costs), 1) if len(costs) == len(rows) else None,
    }


def _open(recipe: Recipe, params: Params) -> tuple[Network, Data | None, str]:
    """The network with random weights, its images, and why there are none."""
    first = next(iter(params.values()))
    reader = next((one for one in params.values() if "data_dir" in one), None)
    builtin = reader and not any(reader[key] for key in ("data_dir", "dataset", "images"))
    network = artifact.open_target(
        str(recipe.get("model", "name")),
        pretrained=False,
        num_classes=10 if builtin else first.get("num_classes"),
        img_size=first.get("img_size"),
        offline=True,
    )
    if reader is None:
        return network, None, "no step reads images"
    try:
        spec = images.spec_of(
            {key: value for key, value in reader.items() if key in recipe.schema["data"].keys},
            seed=reader["seed"],
            img_size=reader["img_size"],
            offline=True,
        )
        return network, images.open_data(spec, network), ""
    except DcptoolError as err:
        return network, None, f"{err.message}: {err.why}"


def measure(network: Network) -> Speed:
    """Time a few images forward and through one training step."""
    module = network.module
    pixels = network.input.size[1] * network.input.size[2]
    batch = 16 if pixels <= 64 * 64 else 4
    x = torch.randn(batch, *network.input.size)
    with console.progress("measuring"):
        with torch.inference_mode():
            module.eval()
            forward = _timed(lambda: module(x)) / batch
        module.train()
        y = torch.zeros(batch, dtype=torch.long)
        training = _timed(lambda: torch.autograd.backward(F.cross_entropy(module(x), y))) / batch
    module.zero_grad()
    module.eval()
    macs = count(module, network.input.size).macs
    return Speed(forward, training, 2 * macs / forward)


def _timed(work: Callable[[], object]) -> float:
    """The better of two, after one that warms up: other programs only ever make it longer."""
    work()
    times = []
    for _ in range(2):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-6)


def _seconds(
    step: Step,
    params: Mapping[str, Any],
    network: Network,
    data: Data | None,
    counts: Images | None,
    speed: Speed,
    share: float,
) -> float | None:
    if step.name == "analyze":
        return START_S
    if step.name == "export":
        return EXPORT_S
    if step.name == "bench":
        ways = len(params["providers"]) * len(params["batch_sizes"])
        rows = 2 * ways * max(len(params["threads"]), 1)
        return float(EXPORT_S + rows * (params["duration"] + 1))
    if counts is None or data is None:
        return None
    if step.name == "evaluate":
        return round(START_S + counts.report * speed.forward * share, 1)
    if step.name == "prune":
        return round(START_S + _pruning(params, network, data, counts, speed, share), 1)
    scale = 1.0 if step.name == "baseline" else share
    epochs = params["epochs"] if params["epochs"] is not None else EPOCHS
    walked = epochs * counts.train
    if params["steps"] is not None:
        walked = params["steps"] * (params["batch_size"] or BATCH_SIZE)
        epochs = walked / max(counts.train, 1)
    taught = speed.forward if step.name == "finetune" and params["kd"] is not False else 0.0
    validated = (epochs + 2) * counts.val + 2 * counts.report
    work = walked * (scale * speed.training + taught) + validated * speed.forward * scale
    return round(START_S + work, 1)


def _asked(samples: int | str) -> int:
    return 512 if samples == "auto" else int(samples)


def _pruning(
    params: Mapping[str, Any],
    network: Network,
    data: Data,
    counts: Images,
    speed: Speed,
    share: float,
) -> float:
    graph = build_graph(network.module, network.input.size)
    groups = graph.open_groups(params["scope"], params["prune_residual"])
    samples = min(_asked(params["samples"]), counts.train)
    total = (counts.report + counts.val) * speed.forward * (1 + share)
    if data.builtin and params["checkpoint"] is None:
        total += baseline.STEPS * baseline.BATCH * speed.training
    if not params["no_training"]:
        losses = params["losses"] or graph.structure.default_losses()
        epoch = -(-counts.train // params["batch_size"])
        asked = (params["stage_steps"], params["stage_epochs"])
        steps = stage_steps(*asked, epoch, params["solver"])
        total += (2 * losses + 1) * steps * params["batch_size"] * speed.training
    modules = dict(network.module.named_modules())
    for group in groups:
        columns = max(
            (modules[name].weight[0].numel() for name in group.consumers), default=group.channels
        )
        rows = samples * min(params["positions"], 128)
        solving = 2 * rows * columns**2 + 4 * columns**3
        total += solving / speed.flops
    return float(total + WALKS * samples * speed.forward)


def _files(step: Step, sides: tuple[Mapping[str, Any], Mapping[str, Any]]) -> tuple[list[str], int]:
    """Names inside the run folder, and their size."""
    dense, slim = (BYTES * side["params"] for side in sides)
    if step.makes == "artifact":
        names = [f"{step.name}/{MANIFEST}", f"{step.name}/model.safetensors"]
        if step.name == "prune":
            return [*names, f"{step.name}/{DENSE_WEIGHTS}"], slim + dense
        return names, slim
    if step.makes == "file":
        return [EXPORTED], slim
    if step.name == "bench":
        return ["dense.onnx"], dense
    return [], 0


def text(document: Mapping[str, Any], runs: Path) -> str:
    """A dry run for people."""
    rows = [
        [
            row["name"],
            ", ".join(row["files"]) or "-",
            f"{row['bytes'] / 1e6:.1f} MB",
            "?" if row["seconds"] is None else console.clock(row["seconds"]),
        ]
        for row in document["steps"]
    ]
    size = "x".join(str(n) for n in document["input_size"])
    measured = document["measured"]
    lines = [
        console.table(["step", "files", "disk", "about"], rows, align="<<>>"),
        "",
        f"{document['model']} at {size}; {measured['forward_ms_per_image']:.1f} ms for an image "
        f"forward, {measured['training_ms_per_image']:.1f} ms in training, measured here",
    ]
    if document["images"] is not None:
        counts = document["images"]
        lines.append(
            f"{document['data']}: {counts['train']:,} images to learn from, {counts['val']:,} to "
            f"choose by, {counts['report']:,} to report on"
        )
    else:
        million = 1e6 * measured["training_ms_per_image"] / 1000
        lines.append(
            f"no images: {document['data_missing']}\n"
            f"an epoch over a million images would take {console.clock(million)}"
        )
    whole = "unknown" if document["seconds"] is None else console.clock(document["seconds"])
    lines.append(f"in all: {document['bytes'] / 1e6:.1f} MB in {runs}, about {whole}")
    return "\n".join(lines)
