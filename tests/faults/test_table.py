"""The table in README.md: every row of the list of faults, every test that it names, the floors."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

TESTS = Path(__file__).resolve().parents[1]
TABLE = (TESTS / "faults" / "README.md").read_text()
ROWS = {"A": 8, "B": 14, "C": 20, "D": 10, "E": 14, "F": 19, "G": 5}
# The oldest releases without a known hole that reaches this program.
FLOORS = {
    "torch": "2.11",
    "pillow": "13.0.0",
    "onnx": "1.22",
    "onnxruntime": "1.30.1",
    "protobuf": "6.33.5",
    "fsspec": "2026.6.0",
    "jinja2": "3.1.6",
    "huggingface-hub": "1.29",
    "timm": "1.0.30",
    "safetensors": "0.8.0",
}


def rows() -> dict[str, str]:
    """The tests of each row, as the table has them."""
    found = {}
    for line in TABLE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[A-G]\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} is there twice"
            found[cells[0]] = cells[2]
    return found


@cache
def names_in(path: Path) -> set[str]:
    """Tests of a file: functions, classes, and names given to a class made elsewhere."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}


def test_every_row_is_there() -> None:
    assert set(rows()) == {
        f"{part}{n}" for part, count in ROWS.items() for n in range(1, count + 1)
    }


def test_every_test_exists() -> None:
    missing = []
    for row, tests in rows().items():
        assert tests, f"{row} has no test"
        for test in tests.split(", "):
            file, _, name = test.partition("::")
            path = TESTS / file
            if not path.is_file() or name not in names_in(path):
                missing.append(f"{row}: {test}")
    assert missing == []


def test_floors_are_those_of_the_list() -> None:
    declared = {need.name: need for need in map(Requirement, metadata.requires("dcptool") or [])}
    for name, floor in FLOORS.items():
        lowest = [one for one in declared[name].specifier if one.operator == ">="]
        assert lowest, name
        assert Version(lowest[0].version) >= Version(floor), name
    assert Version(metadata.version("torch")) >= Version(FLOORS["torch"])
