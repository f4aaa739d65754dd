"""Where an artifact comes from: its parent, and the dense weights that it can learn from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dcptool import files
from dcptool.network import artifact
from dcptool.network.base import Network
from dcptool.network.manifest import dense_weights, is_near


def lineage_from(target: str, network: Network, folder: Path) -> dict[str, Any]:
    """The lineage of what is made in `folder` from a name, or from an artifact with its own."""
    if not artifact.is_artifact(target):
        return {"source": target, "weights": network.weights}
    before = dict(artifact.read(Path(target)).lineage)
    data = files.read_bytes(Path(target) / artifact.MANIFEST, what="manifest")
    parent = {"name": Path(target).resolve().name, "manifest_sha256": files.sha256(data)}
    weights = dense_weights(Path(target), before)
    if weights is not None:
        near = os.path.relpath(weights.resolve(), folder.resolve())
        before["dense"] = {**before["dense"], "checkpoint": near if is_near(near) else None}
    return {**before, "parent": parent}
