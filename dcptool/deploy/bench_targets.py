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
DENSE = "dense"
HASH = "artifact_sha256"
INT8 = " int8"


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
    several = sum(map(is_artifact, targets)) > 1
    entries = [_entry(target, model, scratch, several=several) for target in targets]
    if baseline is None and len(targets) == 1 and is_artifact(targets[0]):
        baseline = DENSE
    if baseline == DENSE:
        folder = next((target for target in targets if is_artifact(target)), None)
        if folder is None:
            raise UsageError(
                "--baseline dense needs an artifact among the targets",
                try_="dcptool bench runs/latest",
            )
        slim = entries[targets.index(folder)]
        if slim.model.endswith(INT8):
            console.warn(
                "an INT8 file against the dense network in fp32: dcptool bench "
                f"{shlex.quote(folder)} --int8 times both in both"
            )
        return [dense_entry(Path(folder), slim.path), *entries], 0
    if baseline is not None:
        if baseline in targets:
            return entries, targets.index(baseline) if len(entries) > 1 else None
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


def _entry(target: str, model: Mapping[str, Any], scratch: Path, *, several: bool = False) -> Entry:
    path = Path(target)
    if is_artifact(target):
        file = _newest_export(path)
        name = _run_name(path) if several else "slim"
        name += INT8 if _made_with(file)[0] == "int8" else ""
        return Entry(name, file, partial(_load, target))
    if _is_file(target):
        return Entry(path.stem, path)
    from dcptool.deploy import export, targets

    network = targets.open_network(target, **model)
    name = f"{len(list(scratch.iterdir()))}.onnx"
    console.note(f"exporting {network.base} for the purpose")
    return Entry(target, export.export(network, scratch / name).file, lambda: network)


def _run_name(folder: Path) -> str:
    """The name of a run, with the step where the artifact is one of several in it."""
    from dcptool.network.manifest import NEWEST_FIRST

    place = folder.resolve()
    return f"{place.parent.name}/{place.name}" if place.name in NEWEST_FIRST else place.name


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


def _made_with(path: Path) -> tuple[str, dict[str, Any]]:
    """The precision of a file, and what else `export` was told when it made it."""
    proto = onnx_scan.scan(path).proto
    stored = metadata(proto)
    free = sum(bool(dim.dim_param) for dim in proto.graph.input[0].type.tensor_type.shape.dim)
    told: dict[str, Any] = {
        "with_preprocessing": stored.get("preprocessing", "none") != "none",
        "softmax": stored.get("output", "logits") != "logits",
        "dynamic": "batch" if free == 1 else "size" if free else "none",
    }
    opset = next((one.version for one in proto.opset_import if not one.domain), None)
    return stored.get("precision", "fp32"), told | ({"opset": opset} if opset else {})


def _options_of(path: Path) -> list[str]:
    """What `export` was told when it made a file, beyond its defaults."""
    from dcptool.deploy.onnx_export import OPSET_DEFAULT

    precision, told = _made_with(path)
    return [
        *([f"--{precision}"] if precision != "fp32" else []),
        *(["--with-preprocessing"] if told["with_preprocessing"] else []),
        *(["--softmax"] if told["softmax"] else []),
        *([f"--dynamic={told['dynamic']}"] if told["dynamic"] != "batch" else []),
        *(
            [f"--opset={told['opset']}"]
            if told.get("opset", OPSET_DEFAULT) != OPSET_DEFAULT
            else []
        ),
    ]


def dense_entry(folder: Path, like: Path) -> Entry:
    """The dense network behind an artifact, exported as the slim one was, but never in INT8.

    It stays in the folder for as long as both stay what they are.
    """
    path = folder / DENSE_FILE
    precision, told = _made_with(like)
    wanted = ("fp16" if precision == "fp16" else "fp32", told)
    if not path.exists() or _is_stale(path, folder) or _made_with(path) != wanted:
        from dcptool.deploy import export

        known = _dense_weights(folder)
        weights = "" if known else " with random weights: same graph, same speed"
        console.note(f"exporting the dense network to {path}{weights}")
        facts = {HASH: _hash_of(folder)}
        options = export.Options(fp16=wanted[0] == "fp16", **told)
        export.export(
            _dense(str(folder)), path, options, facts=facts, labels=False, force=path.exists()
        )
    return Entry(DENSE, path, partial(_dense, str(folder)))


def _load(target: str) -> Any:
    from dcptool.deploy import targets

    return targets.open_network(target)


def _dense_weights(folder: Path) -> Path | None:
    from dcptool.network import artifact
    from dcptool.network.manifest import dense_weights

    return dense_weights(folder, artifact.read(folder).lineage)


def _dense(target: str) -> Any:
    from dcptool.deploy import targets

    return targets.dense_of(targets.open_network(target), _dense_weights(Path(target)))
