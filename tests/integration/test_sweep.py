"""`dcptool sweep` as a user runs it: points, table, CSV, picture, and going on."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAST = [
    "--set",
    "prune.training=false",
    "--set",
    "prune.samples=32",
    "--set",
    "prune.positions=8",
]
QUICK_BENCH = ["--set", "bench.iterations=8"]


def _run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "dcptool", *words],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--over", "prune.rate"], "is no SECTION.KEY=V1,V2"),
        (["--over", "prune.rat=0.3,0.5"], "rat"),
        (["--over", "prune.rate=0.3,1.5"], "0 <= rate < 1"),
        (["--over", "prune.rate=0.3,0.5", "--name", "../x"], "no name for a folder"),
    ],
)
def test_what_cannot_be_swept(tmp_path: Path, words: list[str], says: str) -> None:
    done = _run(tmp_path, "sweep", "zoo:resnet20", *words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert not list(tmp_path.iterdir())


def test_points_table_and_picture(tmp_path: Path) -> None:
    words = ["sweep", "zoo:resnet20", "--over", "prune.target_macs=0.4,0.7", *FAST]
    done = _run(tmp_path, *words, "--json")
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)["points"]
    assert [point["name"] for point in points] == ["0.4", "0.7"]
    for point, share in zip(points, (0.4, 0.7), strict=True):
        assert point["macs"] / point["dense_macs"] == pytest.approx(share, rel=0.01)
        assert point["latency_ms"] > 0
    assert any(point["pareto"] for point in points)
    folder = tmp_path / "runs" / "zoo-resnet20-sweep"
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [float(row["macs"]) for row in rows] == [point["macs"] for point in points]
    assert (folder / "sweep.svg").read_text().startswith("<svg")
    # Once more, nothing is done again.
    manifests = {p: p.stat().st_mtime_ns for p in folder.rglob("manifest.json")}
    assert len(manifests) == 2
    again = _run(tmp_path, *words)
    assert again.returncode == 0, again.stderr
    assert "0.4" in again.stdout
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("manifest.json")} == manifests
