"""`dcptool sweep` as a user runs it: points, table, CSV, picture, and going on."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import forked
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
    return forked.command(*words, cwd=place, env={"XDG_CACHE_HOME": str(place / "cache")})


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


def test_what_is_out_of_reach_is_told_before_the_first_point(tmp_path: Path) -> None:
    values = "prune.target_macs=0.4,0.01,0.6,0.02"
    done = _run(tmp_path, "sweep", "zoo:resnet20", "--over", values, "--set", "prune.samples=32")
    assert done.returncode == 2, done.stderr
    assert "out of reach: 0.01, 0.02, of 4 points" in done.stderr
    assert "0.01: a target of 40" in done.stderr
    again = "dcptool sweep zoo:resnet20 --over prune.target_macs=0.4,0.6 --set prune.samples=32"
    assert f"try: {again}\n" in done.stderr
    assert not list(tmp_path.iterdir())
    done = _run(tmp_path, "sweep", "zoo:resnet20", "--over", "prune.target_macs=0.01")
    assert done.returncode == 2
    assert "try: the same command with --over prune.target_macs=0.5" in done.stderr


def test_without_rights_another_place_is_named(tmp_path: Path) -> None:
    # A file stands where the folder should be: that stops root, too.
    (tmp_path / "runs").write_text("")
    done = _run(tmp_path, "sweep", "zoo:resnet20", "--over", "prune.rate=0.3,0.5")
    assert done.returncode == 5, done.stderr
    assert "--runs-dir DIR" in done.stderr


def test_a_point_that_fails_leaves_the_others_their_table(tmp_path: Path) -> None:
    words = ["sweep", "zoo:resnet20", "--over", "prune.rate=0.9,0", *FAST, *QUICK_BENCH]
    words += ["--set", "prune.min_agreement=100"]
    done = _run(tmp_path, *words, "--json")
    assert done.returncode == 4, done.stderr
    document = json.loads(done.stdout)
    assert document["error"]["code"] == 4
    failed, held = document["points"]
    assert (failed["name"], failed["error"]["code"]) == ("0.9", 4)
    assert held["error"] is None
    assert held["latency_ms"] > 0


def test_points_table_and_picture(tmp_path: Path) -> None:
    words = ["sweep", "zoo:resnet20", "--over", "prune.target_macs=0.4,0.7", *FAST]
    done = _run(tmp_path, *words, "--json")
    assert done.returncode == 0, done.stderr
    assert "to go on with" not in done.stderr
    points = json.loads(done.stdout)["points"]
    assert [point["name"] for point in points] == ["0.4", "0.7"]
    for point, share in zip(points, (0.4, 0.7), strict=True):
        assert point["macs"] / point["dense_macs"] == pytest.approx(share, rel=0.01)
        assert point["latency_ms"] > 0
    assert any(point["pareto"] for point in points)
    folder = tmp_path / "runs" / "zoo-resnet20-sweep"
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [float(row["macs"]) for row in rows] == [point["macs"] for point in points]
    picture = (folder / "sweep.svg").read_text()
    assert picture.startswith("<svg")
    assert ">dense</text>" in picture
    # Once more, nothing is done again.
    manifests = {p: p.stat().st_mtime_ns for p in folder.rglob("manifest.json")}
    assert len(manifests) == 2
    again = _run(tmp_path, *words)
    assert again.returncode == 0, again.stderr
    assert "0.4" in again.stdout
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("manifest.json")} == manifests
