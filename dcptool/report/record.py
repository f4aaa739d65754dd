"""What a run left behind, read for the report: manifests, documents, records of its commands.

Anybody may have written or cut these files: what cannot be read counts as missing, except the
manifest, without which there is nothing to tell. Writes `result.json`, `bench.json` and
`classes.json`, which commands leave for the report.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcptool import console, files
from dcptool.errors import DcptoolError, InputError
from dcptool.network import artifact
from dcptool.network.manifest import NEWEST_FIRST, Manifest, dense_weights

RUN_FILE = "run.json"
RESULT_FILE, BENCH_FILE, CLASSES_FILE = "result.json", "bench.json", "classes.json"
FEATURES_FILE = "features.json"
# Written anew at any time, so they are no part of what a step of a recipe has made.
CHANGING = frozenset((BENCH_FILE, FEATURES_FILE, "report.html", "README.md"))
STEPS_FILE, METRICS_FILE, OPTIONS_FILE = "steps.jsonl", "metrics.jsonl", "prune.json"
LONGEST_LINEAGE = 8
LARGEST_RECORD = 256 << 20


@dataclass(frozen=True)
class Part:
    """One artifact of a run, and what lies beside its manifest."""

    folder: Path
    manifest: Manifest
    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A run as the report needs it; `parts` begin with the newest artifact."""

    folder: Path
    name: str
    parts: tuple[Part, ...]
    documents: Mapping[str, Mapping[str, Any]]
    gates: tuple[Mapping[str, Any], ...]
    commands: tuple[str, ...]
    options: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    metrics: tuple[Mapping[str, Any], ...]
    bench: Mapping[str, Any]
    classes: Mapping[str, Any]
    features: Mapping[str, Any]

    @property
    def manifest(self) -> Manifest:
        """The manifest of the newest artifact."""
        return self.parts[0].manifest

    def lineage(self, key: str) -> Mapping[str, Any]:
        """An entry of the lineage, which younger artifacts inherit."""
        value = self.manifest.lineage.get(key)
        return value if isinstance(value, dict) else {}

    def dense_weights(self) -> Path | None:
        """The weights of the dense network, where they are kept."""
        found = (dense_weights(part.folder, part.manifest.lineage) for part in self.parts)
        return next((path for path in found if path is not None), None)


def evaluated(documents: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """What `evaluate` found, where it is of the images that the steps before it report on.

    Accuracies of different images say nothing beside each other, least of all those of train.
    """
    found = documents.get("evaluate", {})
    splits = (documents.get(name, {}).get("split") for name in ("finetune", "prune"))
    wanted, split = next((one for one in splits if one), None), found.get("split")
    return found if split == wanted or (wanted is None and split != "train") else {}


def collect(folder: Path) -> Record:
    """Read all that a run folder, or an artifact folder, tells."""
    state = _object(folder / RUN_FILE)
    steps = state.get("steps", {})
    documents = {
        name: step["document"]
        for name, step in (steps.items() if isinstance(steps, dict) else ())
        if isinstance(step, dict) and isinstance(step.get("document"), dict)
    }
    newest = folder
    if not (folder / artifact.MANIFEST).is_file():
        found = [folder / n for n in NEWEST_FIRST if (folder / n / artifact.MANIFEST).is_file()]
        if not found:
            raise InputError(
                f"{folder} is no run",
                why=f"there is no {artifact.MANIFEST} in it, and none in a step of a recipe",
                try_="dcptool prune resnet50 --rate 0.3",
            )
        newest = found[0]
    parts = _parts(newest)
    results = [part.result for part in parts]
    exported = _export(state)
    for result in reversed(results):
        documents.setdefault(str(result.get("command", "")), dict(result))
    bench = _first(parts, BENCH_FILE) or documents.get("bench") or {}
    whole = _object(folder / RESULT_FILE) if newest != folder else {}
    sources = [whole, *results, *documents.values(), bench]
    return Record(
        folder=folder,
        name=folder.resolve().name,
        parts=parts,
        documents=documents,
        gates=tuple(_distinct([gate for s in sources for gate in _gates(s)])),
        commands=tuple(
            dict.fromkeys(
                str(s["typed"])
                for s in [*reversed(results), exported, bench, whole]
                if s.get("typed")
            )
        ),
        options=_first(parts, OPTIONS_FILE),
        steps=tuple(_lines(parts, STEPS_FILE)),
        metrics=tuple(_lines(parts[:1], METRICS_FILE)),
        bench=bench,
        classes=_first(parts, CLASSES_FILE),
        features=_first(parts, FEATURES_FILE),
    )


def keep_result(folder: Path, command: str, document: Mapping[str, Any], typed: str) -> None:
    """Leave the document of a command in the run, with what was typed to get it."""
    name = BENCH_FILE if command == "bench" else RESULT_FILE
    if command in ("prune", "finetune"):
        # What was measured and drawn of an earlier result in this folder is true no more.
        for old in (BENCH_FILE, FEATURES_FILE):
            files.remove(folder / old)
        # A prune with labels has left its own classes by now.
        if as_object(document.get("slim")).get("top1") is None:
            files.remove(folder / CLASSES_FILE)
    files.publish_json(folder / name, {"command": command, **document, "typed": typed})


def keep_classes(
    folder: Path,
    names: Sequence[str],
    slim: Sequence[float | None] | None,
    dense: Sequence[float | None] | None = None,
    *,
    before: Path | None = None,
) -> None:
    """Leave the accuracy of each class; that of the dense network may lie in the run `before`."""
    if slim is None:
        return
    if dense is None and before is not None:
        old = _object(before / CLASSES_FILE)
        if old.get("names") == list(names):
            dense = old.get("dense")
    document = {"names": list(names), "dense": _rounded(dense), "slim": _rounded(slim)}
    files.publish_json(folder / CLASSES_FILE, document)


def _rounded(values: Sequence[float | None] | None) -> list[float | None] | None:
    return None if values is None else [None if v is None else round(v, 3) for v in values]


def _parts(folder: Path) -> tuple[Part, ...]:
    """An artifact and its ancestors, as far as they still lie beside it."""
    found: list[Part] = []
    here: Path | None = folder
    while here is not None and len(found) < LONGEST_LINEAGE:
        manifest = artifact.read(here)
        found.append(Part(here, manifest, _object(here / RESULT_FILE)))
        here = _parent(here, manifest)
    return tuple(found)


def _parent(folder: Path, manifest: Manifest) -> Path | None:
    parent = manifest.lineage.get("parent")
    if not isinstance(parent, dict):
        return None
    name = parent.get("name")
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return None
    path = folder.resolve().parent / name
    try:
        data = files.read_bytes(path / artifact.MANIFEST, what="manifest", limit=64 << 20)
    except DcptoolError:
        return None
    # A folder of that name that holds something else by now is no ancestor.
    return path if files.sha256(data) == parent.get("manifest_sha256") else None


def _export(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The export of a recipe as it can be typed: it leaves no document beside the artifact."""
    step = as_object(as_object(state.get("steps")).get("export"))
    file = as_object(step.get("document")).get("file")
    if not isinstance(file, str):
        return {}
    settings = as_object(as_object(state.get("identity")).get("settings"))
    chosen = {**as_object(settings.get("data")), **as_object(settings.get("export"))}
    words = ["dcptool", "export", str(Path(file).parent), "--onnx", file]
    for key, value in chosen.items():
        option = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value else []
        elif isinstance(value, list):
            words += [option, ",".join(map(str, value))]
        else:
            words += [option, str(value)]
    return {"typed": " ".join(map(_typed, words))}


def _typed(word: str) -> str:
    # A run may be handed on; a shell expands the tilde only where it stands bare.
    home = f"{Path.home()}/"
    if word.startswith(home):
        return "~/" + shlex.quote(word.removeprefix(home))
    return shlex.quote(word)


def _first(parts: Sequence[Part], name: str) -> Mapping[str, Any]:
    return next((found for part in parts if (found := _object(part.folder / name))), {})


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(files.read_json(path, what="record", limit=LARGEST_RECORD))
    except DcptoolError as err:
        console.warn(f"{err.message}: {err.why}")
        return {}


def _lines(parts: Sequence[Part], name: str) -> list[Mapping[str, Any]]:
    """Objects in a file of lines; a torn line is left out."""
    path = next((p.folder / name for p in parts if (p.folder / name).is_file()), None)
    if path is None:
        return []
    try:
        text = files.read_bytes(path, what="record", limit=LARGEST_RECORD).decode(errors="replace")
    except DcptoolError as err:
        console.warn(f"{err.message}: {err.why}")
        return []
    found: list[Mapping[str, Any]] = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def _gates(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return objects(document.get("gates"))


def _distinct(gates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({(str(g.get("name")), str(g.get("limit"))): g for g in reversed(gates)}.values())


def number(value: Any) -> float | None:
    """A finite number, or None for anything else that a file may hold in its place."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def numbers(values: Any) -> list[float]:
    """The finite numbers of a list."""
    if not isinstance(values, list):
        return []
    return [found for value in values if (found := number(value)) is not None]


def as_object(value: Any) -> Mapping[str, Any]:
    """A table, or an empty one for anything else that a file may hold in its place."""
    return value if isinstance(value, dict) else {}


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The tables of a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
