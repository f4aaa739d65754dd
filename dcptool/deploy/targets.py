"""What a command line names: a model, an artifact folder, an .onnx file.

Finds the network behind it and the facts that travel with it into an exported file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dcptool import files
from dcptool.network import models
from dcptool.network.models import Network

MANIFEST = "manifest.json"
DENSE_FILE = "dense.onnx"
EXPORT_FILE = "model.onnx"


def is_artifact(target: str) -> bool:
    """Whether `target` is a folder with a manifest."""
    return (Path(target) / MANIFEST).is_file()


def open_network(target: str, **model_options: Any) -> Network:
    """The network of an artifact folder or of a model name."""
    return models.load(target, **model_options)


def facts_of(folder: Path) -> dict[str, object]:
    """Rate, accuracy and hash of an artifact, for the metadata of its exported file."""
    data = files.read_bytes(folder / MANIFEST, what="manifest", limit=files.MANIFEST_LIMIT)
    manifest = files.read_json(folder / MANIFEST, what="manifest")
    metrics = manifest.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    lineage = manifest.get("lineage")
    found: dict[str, object] = {"artifact_sha256": files.sha256(data)}
    for key, sources in {"rate": (lineage, metrics), "top1": (metrics,)}.items():
        for source in sources:
            for entry in source if isinstance(source, list) else [source]:
                if isinstance(entry, dict) and isinstance(entry.get(key), int | float):
                    found[key] = entry[key]
    return found


def dense_of(network: Network, seed: int = 0) -> Network:
    """The dense network behind a slim one, with random weights: same graph, same speed."""
    import torch

    torch.manual_seed(seed)
    return Network(models.build(network.base), network.base, network.input, network.classes)


def publish_weights(network: Network, target: Path, *, force: bool) -> dict[str, object]:
    """Write the plain weights of a network, under the names of its torch modules."""
    from safetensors.torch import save

    files.require_new(target, force=force)
    files.make_folder(target.parent)
    # Copies: two modules may share one tensor, which the format cannot say.
    state = {
        name: value.detach().cpu().clone() for name, value in network.module.state_dict().items()
    }
    data = save(state, metadata={"format": "pt", "base_model": str(network.base)})
    files.publish(target, data)
    return {"file": str(target), "bytes": len(data), "sha256": files.sha256(data)}
