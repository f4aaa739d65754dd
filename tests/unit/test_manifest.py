"""The manifest: what anybody may have written is checked field by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcptool.errors import InputError
from dcptool.network.base import Cut
from dcptool.network.manifest import Manifest, read_indices, read_manifest, write_indices


def good() -> dict[str, Any]:
    return {
        "format": 1,
        "dcptool": "0.1.0",
        "base": {"source": "timm", "name": "resnet18", "num_classes": 10, "arguments": {}},
        "input": {
            "size": [3, 32, 32],
            "mean": [0.5, 0.5, 0.5],
            "std": [0.2, 0.2, 0.2],
            "interpolation": "bicubic",
            "crop_pct": 0.9,
        },
        "classes": None,
        "cuts": {"layer1.0.conv1": {"out": "0-5,7"}, "gamma": {"out": "1", "dim": 2}},
        "cost": {"params": 12},
        "metrics": {"top1": 93.1},
        "lineage": {},
        "files": {"model.safetensors": {"bytes": 5, "sha256": "0" * 64}},
    }


def parse(folder: Path, document: object) -> Manifest:
    path = folder / "manifest.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_manifest(path, newest=1)


def test_a_good_manifest(tmp_path: Path) -> None:
    manifest = parse(tmp_path, good())
    assert manifest.base.name == "resnet18"
    assert manifest.cuts["layer1.0.conv1"] == Cut(None, (0, 1, 2, 3, 4, 5, 7))
    assert manifest.cuts["gamma"] == Cut(None, (1,), 2)
    assert manifest.input.crop_pct == 0.9


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *keys, last, value = path
        for key in keys:
            document = document[key]
        document[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("format", 0),
        put("format", "1"),
        put("format", None),
        put("base", "source", 3),
        put("base", "num_classes", True),
        put("base", "num_classes", "10"),
        put("base", "arguments", {"a": [1]}),
        put("base", "arguments", {"a": None}),
        put("base", []),
        put("input", "size", [3, 32]),
        put("input", "size", [3, 32, 0]),
        put("input", "size", [3, 32, 1 << 20]),
        put("input", "size", [3, 32, "32"]),
        put("input", "mean", [0.5]),
        put("input", "std", [0.5, 0.5, "x"]),
        put("input", "std", [0.5, 0.5, 0]),
        put("input", "std", [0.5, 0.5, -1]),
        put("input", "crop_pct", 0),
        put("input", "interpolation", None),
        put("classes", "cat"),
        put("classes", [1]),
        put("cuts", []),
        put("cuts", "x", "0-3"),
        put("cuts", "x", {"out": [0, 1]}),
        put("cuts", "x", {"out": ""}),
        put("cuts", "x", {"out": "3-1"}),
        put("cuts", "x", {"out": "1,1"}),
        put("cuts", "x", {"out": "5,2"}),
        put("cuts", "x", {"out": "-1"}),
        put("cuts", "x", {"out": "1 "}),
        put("cuts", "x", {"out": "\u0661"}),
        put("cuts", "x", {"out": "0-9999999"}),
        put("cuts", "x", {"out": "0-99999999999"}),
        put("cuts", "x", {"out": "1", "dim": -1}),
        put("cuts", "x", {"out": "1", "dim": True}),
        put("cuts", "x", {"out": "1", "more": 1}),
        put("cost", "params", -1),
        put("cost", "params", 1.5),
        put("metrics", None),
        put("lineage", "x"),
        put("files", {}),
        put("files", {"../model.safetensors": {"bytes": 5, "sha256": ""}}),
        put("files", {"model.safetensors": {}, "other.bin": {}}),
        put("files", "model.safetensors", {"bytes": "5", "sha256": ""}),
        put("files", "model.safetensors", {"bytes": 5}),
        put("files", "model.safetensors", {"bytes": -5, "sha256": "0" * 64}),
    ],
)
def test_a_fault_is_refused_by_name(change: Callable[[Any], None], tmp_path: Path) -> None:
    document = good()
    change(document)
    with pytest.raises(InputError, match="not a valid manifest") as caught:
        parse(tmp_path, document)
    assert caught.value.why


@pytest.mark.parametrize("key", [k for k in good() if k not in ("dcptool", "classes")])
def test_every_part_is_needed(key: str, tmp_path: Path) -> None:
    document = good()
    del document[key]
    with pytest.raises(InputError):
        parse(tmp_path, document)


def test_a_newer_format_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="newer format") as caught:
        parse(tmp_path, {**good(), "format": 2, "dcptool": "9.9"})
    assert "9.9" in caught.value.why
    assert "upgrade" in caught.value.try_


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1, "format": 1}',
        '{"cost": {"params": NaN}}',
        "[" * 100000,
        '{"format": 1' + "0" * 5000 + "}",
    ],
)
def test_what_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        parse(tmp_path, text)


@given(st.sets(st.integers(0, 500), min_size=1))
def test_indices_survive_their_text(indices: set[int]) -> None:
    ordered = tuple(sorted(indices))
    assert read_indices(write_indices(ordered), "here") == ordered


def test_the_text_is_short() -> None:
    assert write_indices([0, 1, 2, 3, 5, 7, 8]) == "0-3,5,7-8"
