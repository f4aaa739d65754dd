"""Where an artifact comes from: its parent, and the dense weights that it can learn from.

A manifest may name those weights beside itself or in a folder next to it, and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dcptool import files
from dcptool.network import artifact
from dcptool.network.base import Network


def dense_weights(target: str | Path, lineage: Mapping[str, Any]) -> Path | None:
    """The dense weights that an artifact keeps beside itself, or its parent run does."""
    dense = lineage.get("dense")
    name = dense.get("checkpoint") if isinstance(dense, dict) else None
    if not isinstance(name, str) or not _is_near(name):
        return None
    path = Path(target) / name
    return path if path.is_file() else None


def lineage_from(target: str, network: Network, folder: Path) -> dict[str, Any]:
    """The lineage of what is made in `folder` from a name, or from an artifact with its own."""
    if not artifact.is_artifact(target):
        return {"source": target, "weights": network.weights}
    before = dict(artifact.read(Path(target)).lineage)
    data = files.read_bytes(Path(target) / artifact.MANIFEST, what="manifest")
    parent = {"name": Path(target).resolve().name, "manifest_sha256": files.sha256(data)}
    weights = dense_weights(target, before)
    if weights is not None:
        near = os.path.relpath(weights.resolve(), folder.resolve())
        before["dense"] = {**before["dense"], "checkpoint": near if _is_near(near) else None}
    return {**before, "parent": parent}


def _is_near(name: str) -> bool:
    """Whether a manifest may say it: in the folder itself, or in one beside it."""
    path = PurePosixPath(name)
    above = path.parts[:-1].count("..")
    return not path.is_absolute() and "\0" not in name and above <= 1 and len(path.parts) <= 3
