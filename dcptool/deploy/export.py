"""The whole road of `export`: translate, finish, check, compare, publish.

A file appears only after the checker, shape inference and parity have passed; it is written
whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import torch

from dcptool import __version__, console, files
from dcptool.deploy import int8, onnx_export, onnx_graph, parity
from dcptool.deploy.parity import Array, Parity
from dcptool.deploy.session import open_session
from dcptool.errors import GateFailed, InputError, UsageError
from dcptool.network.models import Network
from dcptool.training.room import bytes_of

FP32_TOLERANCE = (1e-5, 1e-4)
FP16_TOLERANCE = (1e-3, 2e-2)


@dataclass(frozen=True)
class Options:
    """What the exported file should be like."""

    opset: int = onnx_export.OPSET_DEFAULT
    dynamic: str = "batch"
    with_preprocessing: bool = False
    softmax: bool = False
    fp16: bool = False
    int8: int8.Settings | None = None
    atol: float | None = None
    rtol: float | None = None
    seed: int = 0

    def tolerance(self) -> tuple[float, float]:
        """Absolute and relative tolerance, by number format unless told."""
        atol, rtol = FP16_TOLERANCE if self.fp16 else FP32_TOLERANCE
        return (
            atol if self.atol is None else self.atol,
            rtol if self.rtol is None else self.rtol,
        )


@dataclass(frozen=True)
class Exported:
    """What was published, and how it was judged."""

    file: Path
    bytes: int
    opset: int
    exporter: str
    parity: Parity
    subnormal: int
    int8: int8.Outcome | None = None
    labels: Path | None = None
    sha256: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """The names of the JSON contract."""
        document: dict[str, object] = {
            "file": str(self.file),
            "bytes": self.bytes,
            "sha256": self.sha256,
            "opset": self.opset,
            "exporter": self.exporter,
            "labels": str(self.labels) if self.labels else None,
            "subnormal_flushed": self.subnormal,
            "parity": self.parity.document(),
        }
        if self.int8 is not None:
            document["int8"] = self.int8.document()
        return document


def export(
    network: Network,
    target: Path,
    options: Options | None = None,
    *,
    facts: Mapping[str, object] | None = None,
    samples: Iterable[Array] | None = None,
    images: int8.Images | None = None,
    labels: bool = True,
    force: bool = False,
) -> Exported:
    """Publish `network` as ONNX at `target` with a labels file beside it.

    `samples` are normalised float batches for parity, noise is drawn without them; `images`
    are what INT8 is calibrated and judged with; `facts` are further metadata (rate, accuracy,
    hash of the artifact).
    """
    options = options or Options()
    _check_options(options, images)
    files.require_new(target, force=force)
    if labels and network.classes:
        files.require_new(labels_beside(target), force=force)
    files.make_folder(target.parent)
    files.require_space(target.parent, bytes_of(network.module))
    check_finite(network)
    translation = onnx_export.translate(network, opset=options.opset, dynamic=options.dynamic)
    proto = translation.proto
    subnormal = clean(proto)
    outcome: int8.Outcome | None = None
    if options.int8 is not None and images is not None:
        # The float graph must be right before it is made coarser; accuracy judges the rest.
        plain = replace(options, with_preprocessing=False, softmax=False)
        found = _parity_of(network, proto, plain, samples)
        proto, outcome = int8.apply(proto, images, options.int8)
        proto = dress(proto, network, options, facts or {})
    else:
        proto = dress(proto, network, options, facts or {})
        found = _parity_of(network, proto, options, samples)
    check(proto)
    data = proto.SerializeToString()
    files.publish(target, data)
    beside = publish_labels(network, target) if labels else None
    return Exported(
        target,
        len(data),
        translation.opset,
        translation.exporter,
        found,
        subnormal,
        outcome,
        beside,
        files.sha256(data),
        onnx_graph.metadata(proto),
    )


def _check_options(options: Options, images: int8.Images | None) -> None:
    if options.int8 is not None and options.fp16:
        raise UsageError("--int8 and --fp16 exclude each other")
    if options.int8 is not None and not (images and images.batches):
        raise UsageError("INT8 needs images to calibrate with", try_="--data-dir FOLDER")


def _parity_of(
    network: Network, proto: onnx.ModelProto, options: Options, samples: Iterable[Array] | None
) -> Parity:
    found = judge(network, proto.SerializeToString(), options, samples)
    atol, rtol = options.tolerance()
    parity.require(found, atol=atol, rtol=rtol)
    return found


def check_finite(network: Network) -> None:
    """Refuse weights with NaN or infinity, naming the first tensor."""
    for name, tensor in network.module.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise InputError(
                f"cannot export {network.base}", why=f"{name} has {bad} NaN or infinite values"
            )


def clean(proto: onnx.ModelProto) -> int:
    """Names of the torch modules, no notes, no subnormal constants; tells how many there were."""
    onnx_graph.name_nodes(proto)
    left = onnx_graph.unfolded_norms(proto)
    if left:
        console.warn(f"{len(left)} norms were not folded into their convolutions: {left[0]} ...")
    return onnx_graph.flush_subnormals(proto)


def dress(
    proto: onnx.ModelProto, network: Network, options: Options, facts: Mapping[str, object]
) -> onnx.ModelProto:
    """Number format, pre- and post-processing, metadata."""
    if options.fp16:
        proto = onnx_graph.to_half(proto)
    if options.with_preprocessing:
        onnx_graph.embed_preprocessing(proto, network.input.mean, network.input.std)
    if options.softmax:
        onnx_graph.append_softmax(proto)
    onnx_graph.describe(
        proto,
        __version__,
        {
            "base_model": str(network.base),
            "num_classes": network.base.num_classes,
            "input_size": network.input.size,
            "mean": network.input.mean,
            "std": network.input.std,
            "interpolation": network.input.interpolation,
            "crop_pct": network.input.crop_pct,
            "preprocessing": "embedded: uint8 NHWC RGB" if options.with_preprocessing else "none",
            "precision": "int8" if options.int8 else "fp16" if options.fp16 else "fp32",
            "output": "probabilities" if options.softmax else "logits",
            "classes": network.classes,
            **facts,
        },
    )
    return proto


def check(proto: onnx.ModelProto) -> None:
    """Run onnx's checker and strict shape inference over the graph."""
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as err:
        raise GateFailed(
            "the exported graph is not valid ONNX; nothing was written", why=str(err).strip()[:300]
        ) from err


def judge(
    network: Network, model: bytes, options: Options, samples: Iterable[Array] | None
) -> Parity:
    """Compare torch and onnxruntime on real samples, or on seeded noise without any."""
    session = open_session(model)
    name = session.get_inputs()[0].name
    module = network.module.eval()
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    mean = torch.tensor(network.input.mean).view(1, -1, 1, 1)
    std = torch.tensor(network.input.std).view(1, -1, 1, 1)

    def reference(batch: Array) -> Array:
        images = torch.from_numpy(batch)
        if options.with_preprocessing:
            images = (images.permute(0, 3, 1, 2).float() / 255 - mean) / std
        with torch.inference_mode():
            scores = module(images.to(device)).float().cpu()
        if options.softmax:
            scores = scores.softmax(-1)
        result: Array = scores.numpy()
        return result

    def candidate(batch: Array) -> Array:
        result: Array = session.run(None, {name: batch})[0]
        return result

    if samples is None:
        batches = parity.noise(
            network.input.size, seed=options.seed, uint8_nhwc=options.with_preprocessing
        )
    else:
        batches = _as_input(samples, network, options)
    if options.dynamic == "none":
        batches = [batch[i : i + 1] for batch in batches for i in range(len(batch))]
    elif options.dynamic == "size":
        batches = [*batches, *_other_size(network, options)]
    atol, rtol = options.tolerance()
    return parity.compare(reference, candidate, batches, atol=atol, rtol=rtol)


def _as_input(samples: Iterable[Array], network: Network, options: Options) -> list[Array]:
    """Real images in batches of one and of eight, in the form the graph takes."""
    images = np.concatenate([np.asarray(batch, dtype=np.float32) for batch in samples])
    if options.with_preprocessing:
        mean = np.asarray(network.input.mean, dtype=np.float32).reshape(1, -1, 1, 1)
        std = np.asarray(network.input.std, dtype=np.float32).reshape(1, -1, 1, 1)
        pixels = np.clip(np.rint((images * std + mean) * 255), 0, 255).astype(np.uint8)
        images = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    return [images[:1], *(images[i : i + 8] for i in range(1, len(images), 8))]


def _other_size(network: Network, options: Options) -> list[Array]:
    channels, height, width = network.input.size
    return parity.noise(
        (channels, height + 32, width + 64),
        seed=options.seed,
        uint8_nhwc=options.with_preprocessing,
    )[:1]


def labels_beside(target: Path) -> Path:
    """The file of class names that belongs to a graph."""
    return target.with_suffix(".labels.txt")


def publish_labels(network: Network, target: Path) -> Path | None:
    """Write one class name a line beside the graph, where the names are known."""
    if not network.classes:
        return None
    path = labels_beside(target)
    lines = (name.replace("\n", " ").replace("\r", " ") for name in network.classes)
    files.publish(path, ("\n".join(lines) + "\n").encode())
    return path
