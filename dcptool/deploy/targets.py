"""What a command line names: a model, an artifact folder, an .onnx file.

Finds the network behind it and the facts that travel with it into an exported file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dcptool import files
from dcptool.network import artifact, models
from dcptool.network.models import Network


def open_network(target: str, **model_options: Any) -> Network:
    """The network of an artifact folder or of a model name."""
    return artifact.open_target(target, **model_options)


def facts_of(folder: Path) -> dict[str, object]:
    """Rate, accuracy and hash of an artifact, for the metadata of its exported file."""
    path = folder / artifact.MANIFEST
    data = files.read_bytes(path, what="manifest", limit=files.MANIFEST_LIMIT)
    manifest = artifact.read(folder)
    found: dict[str, object] = {"artifact_sha256": files.sha256(data)}
    pruned = manifest.lineage.get("prune")
    pruned = pruned if isinstance(pruned, dict) else {}
    for key in ("method", "rate", "epsilon"):
        if isinstance(value := pruned.get(key), str | int | float):
            found[key] = value
    for key in ("top1", "top5"):
        if isinstance(value := manifest.metrics.get(key), int | float):
            found[key] = value
    for key in ("macs", "params", "dense_macs", "dense_params"):
        if key in manifest.cost:
            found[key] = manifest.cost[key]
    return found


def dense_of(network: Network, weights: Path | None = None, seed: int = 0) -> Network:
    """The dense network behind a slim one; without its weights random ones are as fast."""
    import torch

    if weights is not None:
        return artifact.load_dense(network.base, network.input, weights)
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
