"""From what the command line of `bench` names to .onnx files on the disk.

Artifacts and model names are exported on the way, so torch is imported only for those.
"""

from __future__ import annotations

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
DENSE = "dense"


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
    return (Path(target) / MANIFEST).is_file()


def _entry(target: str, model: Mapping[str, Any], scratch: Path) -> Entry:
    path = Path(target)
    if is_artifact(target):
        return Entry("slim", _newest_export(path), partial(_load, target))
    if path.is_dir():
        raise InputError(
            f"{path} is not an artifact",
            why=f"there is no {MANIFEST} in it",
            try_="dcptool bench FILE.onnx",
        )
    if path.suffix == ".onnx" or path.exists():
        return Entry(path.stem, path)
    from dcptool.deploy import export, targets

    network = targets.open_network(target, **model)
    name = f"{len(list(scratch.iterdir()))}.onnx"
    console.note(f"exporting {network.base} for the purpose")
    return Entry(target, export.export(network, scratch / name).file, lambda: network)


def _newest_export(folder: Path) -> Path:
    """The newest .onnx of an artifact that is not its dense network; exported when missing."""
    found = [path for path in folder.glob("*.onnx") if path.name != DENSE_FILE]
    if found:
        newest = max(found, key=lambda path: path.stat().st_mtime_ns)
        _warn_when_stale(newest, folder)
        return newest
    from dcptool.deploy import export, targets

    console.note(f"exporting {folder} to {folder / EXPORT_FILE}")
    network = targets.open_network(str(folder))
    result = export.export(network, folder / EXPORT_FILE, facts=targets.facts_of(folder))
    return result.file


def _warn_when_stale(path: Path, folder: Path) -> None:
    """Say so when the artifact has changed since the file was exported from it."""
    stored = metadata(onnx_scan.scan(path).proto).get("artifact_sha256")
    manifest = files.read_bytes(folder / MANIFEST, what="manifest", limit=files.MANIFEST_LIMIT)
    if stored is not None and stored != files.sha256(manifest):
        console.warn(f"{path} was exported from an earlier state of {folder}; export it again")


def dense_entry(folder: Path) -> Entry:
    """The dense network behind an artifact, exported once into its folder."""
    path = folder / DENSE_FILE
    if not path.exists():
        from dcptool.deploy import export

        console.note(
            f"exporting the dense network to {path} with random weights: same graph, same speed"
        )
        export.export(_dense(str(folder)), path, labels=False)
    return Entry(DENSE, path, partial(_dense, str(folder)))


def _load(target: str) -> Any:
    from dcptool.deploy import targets

    return targets.open_network(target)


def _dense(target: str) -> Any:
    from dcptool.deploy import targets

    return targets.dense_of(targets.open_network(target))
