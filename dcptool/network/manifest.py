"""The manifest of an artifact: checked field by field, since anybody may have written it.

Owns the text form of kept indices ("0-5,7"). Refuses unknown formats, wrong types, indices out
of order, file names that are more than names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dcptool import files
from dcptool.errors import InputError
from dcptool.network.base import Base, Cut, Input

MOST_INDICES = 1 << 22
LARGEST_IMAGE = 16384
# Steps of a recipe that make an artifact.
NEWEST_FIRST = ("finetune", "prune", "baseline")
# The name of the dense weights that `prune` keeps beside what it makes.
DENSE_WEIGHTS = "dense.safetensors"


@dataclass(frozen=True)
class Manifest:
    """All that an artifact says about itself."""

    base: Base
    input: Input
    classes: tuple[str, ...] | None
    cuts: Mapping[str, Cut]
    cost: Mapping[str, int]
    metrics: Mapping[str, Any]
    lineage: Mapping[str, Any]
    weights_bytes: int
    weights_sha256: str


def dense_weights(folder: Path, lineage: Mapping[str, Any]) -> Path | None:
    """The dense weights behind an artifact: beside it or in a folder next to it, nowhere else."""
    dense = lineage.get("dense")
    name = dense.get("checkpoint") if isinstance(dense, dict) else None
    if not isinstance(name, str) or not is_near(name):
        return None
    path = folder / name
    return path if path.is_file() else None


def is_near(name: str) -> bool:
    """Whether a manifest may say it: in the folder itself, or in one beside it."""
    path = PurePosixPath(name)
    above = path.parts[:-1].count("..")
    return not path.is_absolute() and "\0" not in name and above <= 1 and len(path.parts) <= 3


class _Fault(Exception):
    """What is wrong with a manifest."""


def read_manifest(path: Path, *, newest: int) -> Manifest:
    """Read a manifest; raises InputError with the field that is wrong."""
    document = files.read_json(path, what="manifest")
    made_by = document.get("dcptool", "an unknown version")
    if isinstance(document.get("format"), int) and document["format"] > newest:  # type: ignore[operator]
        raise InputError(
            f"{path} is of a newer format",
            why=f"it was made by dcptool {made_by}",
            try_="pip install --upgrade dcptool",
        )
    try:
        return _parse(document)
    except _Fault as err:
        raise InputError(
            f"{path} is not a valid manifest",
            why=f"{err}; it was made by dcptool {made_by}",
            try_="copy the artifact again from where it was made, or make it again: dcptool prune",
        ) from err


def _parse(document: Mapping[str, Any]) -> Manifest:
    if document.get("format") != 1:
        raise _Fault(f"format is {document.get('format')!r}, expected 1")
    base, spec = _mapping(document, "base"), _mapping(document, "input")
    entries = _mapping(document, "files")
    if set(entries) != {"model.safetensors"}:
        raise _Fault(f"files must name model.safetensors alone, not {sorted(entries)[:3]}")
    entry = _mapping(entries, "model.safetensors")
    if _field(entry, "bytes", int) < 0:
        raise _Fault("files: bytes must be a count")
    classes = document.get("classes")
    if classes is not None and not (
        isinstance(classes, list) and all(isinstance(c, str) for c in classes)
    ):
        raise _Fault("classes must be a list of names or null")
    return Manifest(
        base=Base(
            _field(base, "source", str),
            _field(base, "name", str),
            _field(base, "num_classes", int),
            _arguments(base),
        ),
        input=_input(spec),
        classes=tuple(classes) if classes is not None else None,
        cuts={name: _cut(name, kept) for name, kept in _mapping(document, "cuts").items()},
        cost={k: v for k, v in _mapping(document, "cost").items() if _is_count(k, v)},
        metrics=_mapping(document, "metrics"),
        lineage=_mapping(document, "lineage"),
        weights_bytes=_field(entry, "bytes", int),
        weights_sha256=_field(entry, "sha256", str),
    )


def _mapping(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise _Fault(f"{key} must be an object")
    return value


def _field(document: Mapping[str, Any], key: str, kind: type) -> Any:
    value = document.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Fault(f"{key} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _is_count(key: str, value: Any) -> bool:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Fault(f"cost.{key} must be a count")
    return True


def _arguments(base: Mapping[str, Any]) -> dict[str, Any]:
    arguments = _mapping(base, "arguments")
    for key, value in arguments.items():
        if not isinstance(value, (str, int, float, bool)):
            raise _Fault(f"base.arguments.{key} must be a plain value")
    return arguments


def _input(spec: Mapping[str, Any]) -> Input:
    size = spec.get("size")
    if not (
        isinstance(size, list)
        and len(size) == 3
        and all(isinstance(n, int) and 0 < n <= LARGEST_IMAGE for n in size)
    ):
        raise _Fault("input.size must be three sizes")
    statistics = []
    for key in ("mean", "std"):
        values = spec.get(key)
        if not (
            isinstance(values, list) and len(values) == size[0] and all(_number(v) for v in values)
        ):
            raise _Fault(f"input.{key} must be a number for each channel")
        if key == "std" and min(values) <= 0:
            raise _Fault("input.std must be positive")
        statistics.append(tuple(float(v) for v in values))
    crop = spec.get("crop_pct", 1.0)
    if not (_number(crop) and 0 < crop <= 10):
        raise _Fault("input.crop_pct must be a share")
    interpolation = _field(spec, "interpolation", str)
    return Input(
        (size[0], size[1], size[2]), statistics[0], statistics[1], interpolation, float(crop)
    )


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _cut(name: str, kept: Any) -> Cut:
    if not isinstance(kept, dict) or not set(kept) <= {"in", "out", "dim"}:
        raise _Fault(f"cuts.{name} must have in, out and dim alone")
    dim = kept.get("dim", 0)
    if not (isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim < 8):
        raise _Fault(f"cuts.{name}.dim must be a small number")
    sides = []
    for key in ("in", "out"):
        text = kept.get(key)
        if text is not None and not isinstance(text, str):
            raise _Fault(f"cuts.{name}.{key} must be a text such as 0-5,7")
        sides.append(None if text is None else read_indices(text, f"cuts.{name}.{key}"))
    return Cut(sides[0], sides[1], dim)


def write_indices(indices: Sequence[int]) -> str:
    """Ascending indices as text: 0-5,7."""
    parts: list[str] = []
    start = previous = None
    for index in [*indices, None]:
        if previous is not None and index == previous + 1:
            previous = index
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = index
    return ",".join(parts)


def read_indices(text: str, where: str) -> tuple[int, ...]:
    """The inverse of `write_indices`; refuses what is not ascending."""
    indices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (_digits(first) and (not dash or _digits(last))):
            raise _Fault(f"{where}: {part[:20]!r} is no index or range")
        begin, end = int(first), int(last or first)
        if end < begin or (indices and begin <= indices[-1]) or end >= MOST_INDICES:
            raise _Fault(f"{where}: {part[:20]!r} is out of order or too large")
        indices.extend(range(begin, end + 1))
    return tuple(indices)


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 7
