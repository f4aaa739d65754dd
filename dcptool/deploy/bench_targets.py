"""From what the command line of `bench` names to .onnx files on the disk.

Artifacts and model names are exported on the way, so torch is imported only for those.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dcptool import console, files
from dcptool.deploy import onnx_scan
from dcptool.deploy.bench import Entry
from dcptool.deploy.onnx_graph import metadata
from dcptool.errors import InputError, UsageError

MANIFEST = "manifest.json"
EXPORT_FILE, DENSE_FILE = "model.onnx", "dense.onnx"
DENSE_WEIGHTS = "dense.safetensors"
DENSE = "dense"
HASH = "artifact_sha256"


@contextmanager
def resolved(
    targets: Sequence[str], baseline: str | None, model: Mapping[str, Any]
) -> Iterator[tuple[list[Entry], int | None]]:
    """Files to time, and which of them is the baseline; exports of model names vanish after."""
    with tempfile.TemporaryDirectory(prefix="dcptool-bench-") as scratch:
        yield _resolve(list(targets), baseline, model, Path(scratch))


def _resolve(
    targets: list[str], baseline: str | None, model: Mapping[str, Any], scratch: Path
) -> tuple[list[Entry], int | None]:
    entries = [_entry(target, model, scratch) for target in targets]
    if baseline is None and len(targets) == 1 and is_artifact(targets[0]):
        baseline = DENSE
    if baseline == DENSE:
        folder = next((target for target in targets if is_artifact(target)), None)
        if folder is None:
            raise UsageError(
                "--baseline dense needs an artifact among the targets",
                try_="dcptool bench runs/latest",
            )
        return [dense_entry(Path(folder)), *entries], 0
    if baseline is not None:
        if baseline in targets:
            return entries, targets.index(baseline)
        return [_entry(baseline, model, scratch), *entries], 0
    return entries, 0 if len(entries) > 1 else None


def is_artifact(target: str) -> bool:
    """Whether `target` is a folder with a manifest."""
    return os.path.isfile(os.path.join(target, MANIFEST))  # noqa: PTH113, PTH118 - never raises


def is_model(target: str) -> bool:
    """Whether `target` names a model, which is exported for the purpose."""
    return not (is_artifact(target) or _is_file(target) or target == DENSE)


def _is_file(target: str) -> bool:
    return target.endswith(".onnx") or os.path.isfile(target)  # noqa: PTH113


def _entry(target: str, model: Mapping[str, Any], scratch: Path) -> Entry:
    path = Path(target)
    if is_artifact(target):
        return Entry("slim", _newest_export(path), partial(_load, target))
    if _is_file(target):
        return Entry(path.stem, path)
    from dcptool.deploy import export, targets

    if targets.is_folder(target):
        raise InputError(
            f"{path} is not an artifact",
            why=f"there is no {MANIFEST} in it",
            try_="dcptool bench FILE.onnx",
        )
    network = targets.open_network(target, **model)
    name = f"{len(list(scratch.iterdir()))}.onnx"
    console.note(f"exporting {network.base} for the purpose")
    return Entry(target, export.export(network, scratch / name).file, lambda: network)


def _newest_export(folder: Path) -> Path:
    """The newest .onnx of an artifact that is not its dense network; exported when missing.

    One of an earlier state of the artifact is exported again, where the defaults made it.
    """
    found = [path for path in folder.glob("*.onnx") if path.name != DENSE_FILE]
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is not None and not _is_stale(newest, folder):
        return newest
    path = folder / EXPORT_FILE
    if newest is not None:
        options = _options_of(newest)
        if newest != path or options:
            words = ["dcptool", "export", str(folder), "--onnx"]
            words += [] if newest == path else [str(newest)]
            raise InputError(
                f"{newest} is not the network in {folder}",
                why="it was exported from an earlier state of it",
                try_=shlex.join([*words, *options, "--force"]),
            )
    from dcptool.deploy import export, targets

    again = " again: it was of an earlier state" if newest is not None else ""
    console.note(f"exporting {folder} to {path}{again}")
    network = targets.open_network(str(folder))
    facts = targets.facts_of(folder)
    return export.export(network, path, facts=facts, force=newest is not None).file


def _is_stale(path: Path, folder: Path) -> bool:
    """Whether the artifact has changed since the file was exported from it."""
    stored = metadata(onnx_scan.scan(path).proto).get(HASH)
    return stored is not None and stored != _hash_of(folder)


def _hash_of(folder: Path) -> str:
    manifest = files.read_bytes(folder / MANIFEST, what="manifest", limit=files.MANIFEST_LIMIT)
    return files.sha256(manifest)


def _options_of(path: Path) -> list[str]:
    """What `export` was told when it made a file, beyond its defaults."""
    from dcptool.deploy.onnx_export import OPSET_DEFAULT

    proto = onnx_scan.scan(path).proto
    stored = metadata(proto)
    free = sum(bool(dim.dim_param) for dim in proto.graph.input[0].type.tensor_type.shape.dim)
    opset = next((one.version for one in proto.opset_import if not one.domain), OPSET_DEFAULT)
    precision = stored.get("precision", "fp32")
    return [
        *([f"--{precision}"] if precision != "fp32" else []),
        *(["--with-preprocessing"] if stored.get("preprocessing", "none") != "none" else []),
        *(["--softmax"] if stored.get("output", "logits") != "logits" else []),
        *([f"--dynamic={'size' if free else 'none'}"] if free != 1 else []),
        *([f"--opset={opset}"] if opset != OPSET_DEFAULT else []),
    ]


def dense_entry(folder: Path) -> Entry:
    """The dense network behind an artifact, exported once into its folder for each state of it."""
    path = folder / DENSE_FILE
    if not path.exists() or _is_stale(path, folder):
        from dcptool.deploy import export

        weights = "" if _has_dense(folder) else " with random weights: same graph, same speed"
        console.note(f"exporting the dense network to {path}{weights}")
        facts = {HASH: _hash_of(folder)}
        export.export(_dense(str(folder)), path, facts=facts, labels=False, force=path.exists())
    return Entry(DENSE, path, partial(_dense, str(folder)))


def _load(target: str) -> Any:
    from dcptool.deploy import targets

    return targets.open_network(target)


def _has_dense(folder: Path) -> bool:
    return (folder / DENSE_WEIGHTS).is_file()


def _dense(target: str) -> Any:
    from dcptool.deploy import targets

    network = targets.open_network(target)
    weights = Path(target) / DENSE_WEIGHTS
    return targets.dense_of(network, weights if _has_dense(Path(target)) else None)
