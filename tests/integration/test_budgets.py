"""Budgets of `dcptool prune` as a user asks for them: MACs, milliseconds, a drop of accuracy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import forked
import pytest

FAST = ["zoo:resnet20", "--no-pretrained", "--no-training", "--samples", "48", "--positions", "8"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budgets")


def _run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.command(*arguments, cwd=place, env={"XDG_CACHE_HOME": str(place / "cache")})


def test_the_smallest_network_within_a_drop(place: Path) -> None:
    done = _run(place, "prune", *FAST, "--max-accuracy-drop", "3", "-o", "small", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    held = [trial for trial in document["trials"] if trial["ok"]]
    failed = [trial for trial in document["trials"] if not trial["ok"]]
    assert len(document["trials"]) > 2
    assert document["slim"]["macs"] == min(trial["macs"] for trial in held)
    assert all(trial["drop"] > 3 and trial["macs"] < held[-1]["macs"] for trial in failed)
    manifest = json.loads((place / "small" / "manifest.json").read_text())
    assert manifest["cost"]["macs"] == document["slim"]["macs"]
    assert not (place / "small" / "trials").exists()
    # All four of dense and slim, in float and in INT8, beside each other.
    four = _run(place, "bench", "small", "--int8", "--samples", "32", "--iterations", "8", "--json")
    assert four.returncode == 0, four.stderr
    rows = {row["model"]: row for row in json.loads(four.stdout)["precision"]}
    assert list(rows) == ["dense fp32", "slim fp32", "dense int8", "slim int8"]
    assert rows["slim int8"]["bytes"] < rows["slim fp32"]["bytes"] < rows["dense fp32"]["bytes"]
    assert rows["dense fp32"]["top1"] == pytest.approx(document["dense"]["top1"])
    assert all(row["p50_ms"] > 0 for row in rows.values())
    none = _run(place, "bench", "small/model.onnx", "--int8")
    assert none.returncode == 2, none.stderr


def test_what_cannot_be_reached_is_refused(place: Path) -> None:
    done = _run(place, "prune", *FAST, "--target-macs", "0.01", "-o", "never")
    assert done.returncode == 2, done.stderr
    assert "of the dense network" in done.stderr
    assert not (place / "never").exists()
