"""`dcptool run` from a recipe to its numbers: skipping, stopping, gates, the Python side."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dcptool
from dcptool.cli import app, sections
from dcptool.errors import GateFailed
from dcptool.pipeline import recipe, run, runstate

RECIPE = """# Small enough for a test.

[model]
name = "zoo:resnet20"
checkpoint = "dense.safetensors"

[analyze]

[prune]
rate = 0.5
samples = 32
positions = 4
stage_steps = 1
losses = 1
batch_size = 16

[finetune]
steps = 2
batch_size = 16

[export]

[evaluate]

[bench]
batch_size = 1
threads = 1
iterations = 5

[gates]
max_accuracy_drop = 100
min_speedup = 0.01
"""


NAMES = ["analyze", "prune", "finetune", "export", "evaluate", "bench"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a recipe, random weights, and in runs/ one whole run of it."""
    folder = tmp_path_factory.mktemp("run")
    before = Path.cwd()
    os.chdir(folder)
    try:
        target = "--safetensors=dense.safetensors"
        assert app.run(["export", "zoo:resnet20", "--no-pretrained", "-q", target]) == 0
        Path("mine.toml").write_text(RECIPE)
        (folder / "first.json").write_text(json.dumps(dcptool.run("mine.toml")))
        yield folder
    finally:
        os.chdir(before)


@pytest.fixture
def runs(place: Path, request: pytest.FixtureRequest) -> str:
    """A copy of that run, for one test alone."""
    shutil.copytree(place / "runs", place / request.node.name, symlinks=True)
    return str(request.node.name)


def document(
    capsys: pytest.CaptureFixture[str], runs: str, *words: str, code: int = 0
) -> dict[str, Any]:
    capsys.readouterr()
    assert app.run(["run", "mine.toml", "--json", "--runs-dir", runs, *words]) == code
    return json.loads(capsys.readouterr().out)


def skipped(found: dict[str, Any]) -> list[str]:
    return [step["name"] for step in found["steps"] if step["skipped"]]


def test_a_run_does_each_step(place):
    found = json.loads((place / "first.json").read_text())
    assert [step["name"] for step in found["steps"]] == NAMES
    assert skipped(found) == []
    assert found["run"] == "runs/mine-001"
    commands = {step["name"]: step["document"]["command"] for step in found["steps"]}
    assert commands == {name: name for name in NAMES}
    documents = {step["name"]: step["document"] for step in found["steps"]}
    # What `--json` of the commands promises stands in the steps.
    assert documents["prune"]["slim"]["params"] < documents["prune"]["dense"]["params"]
    assert documents["evaluate"]["target"] == found["file"]
    assert [gate["ok"] for gate in found["gates"]] == [True, True]
    assert found["summary"]["slim"]["top1"] == documents["evaluate"]["top1"]
    assert Path("runs/latest").resolve() == (place / "runs/mine-001/finetune")
    assert Path("runs/mine-001/recipe.toml").read_text() == RECIPE
    assert sum(p.numel() for p in dcptool.load("runs/latest").parameters()) < 272474


def test_and_does_it_once(place, runs, capsys):
    found = document(capsys, runs)
    assert found["run"] == f"{runs}/mine-001"
    assert skipped(found) == NAMES
    assert found["summary"] == json.loads((place / "first.json").read_text())["summary"]
    assert app.run(["run", "mine.toml", "--runs-dir", runs]) == 0
    seen = capsys.readouterr()
    assert "gate max_accuracy_drop" in seen.out
    assert "prune (there)" in seen.out


def test_changed_settings_use_what_has_not_changed(runs, capsys):
    found = document(capsys, runs, "--set", "finetune.steps=1")
    assert found["run"] == f"{runs}/mine-002"
    assert skipped(found) == ["analyze", "prune"]
    first, second = (Path(runs) / f"mine-00{n}" / "prune" for n in (1, 2))
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()
    # Every run folder is whole by itself.
    dcptool.load(second)
    # Damaged weights are noticed, and taken from the other run.
    weights = first / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1])
    assert skipped(document(capsys, runs)) == NAMES
    assert weights.read_bytes() == good


def test_a_result_that_is_gone_is_made_again(runs, capsys):
    Path(runs, "mine-001/finetune/model.onnx").unlink()
    found = document(capsys, runs)
    assert found["run"] == f"{runs}/mine-001"
    assert "export" not in skipped(found)
    assert "finetune" in skipped(found)


def test_inputs_that_changed_are_noticed(tmp_path):
    folder = tmp_path / "photos" / "train" / "cat"
    folder.mkdir(parents=True)
    before = runstate.stamp(tmp_path / "photos")
    assert runstate.stamp(tmp_path / "photos") == before
    os.utime(folder, ns=(1, 1))
    assert runstate.stamp(tmp_path / "photos") != before
    weights = tmp_path / "weights"
    weights.write_bytes(b"1")
    one = runstate.stamp(weights)
    os.utime(weights, ns=(1, 1))
    assert runstate.stamp(weights) == one
    weights.write_bytes(b"2")
    assert runstate.stamp(weights) != one


def test_gates_decide_the_exit_code(runs, capsys):
    found = document(capsys, runs, "--set", "gates.min_speedup=1000", code=4)
    assert found["error"]["code"] == 4
    assert "min_speedup: the limit is 1000" in found["error"]["why"]
    assert [gate["ok"] for gate in found["gates"]] == [True, False]
    assert skipped(found) == NAMES
    with pytest.raises(GateFailed, match="1 of 2 gates did not hold"):
        dcptool.run("mine.toml", settings={"gates.min_speedup": 1000}, runs_dir=runs)
    assert capsys.readouterr().out == ""


def test_python_runs_recipes_too(runs, capsys):
    capsys.readouterr()
    found = dcptool.run("mine.toml", runs_dir=runs)
    assert found["command"] == "run"
    assert skipped(found) == NAMES
    assert dcptool.evaluate(found["artifact"], split="val")["images"] == 200
    assert capsys.readouterr() == ("", "")


def test_dry_run_writes_nothing(place, runs, capsys):
    before = sorted(Path(runs).rglob("*"))
    found = document(capsys, runs, "--dry-run", "--set", "prune.rate=0.3")
    assert sorted(Path(runs).rglob("*")) == before
    assert [step["name"] for step in found["steps"]] == NAMES
    assert found["seconds"] > 1
    assert found["slim"]["params"] == 194378
    assert found["bytes"] > 4 * 194378
    assert app.run(["run", "resnet56-cifar10", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "no folder cifar10" in text
    assert "prune/model.safetensors" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", list(recipe.shipped()))
def test_shipped_recipes_dry_run_without_their_images(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert app.run(["run", name, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] > 1e6
    assert bool(found["seconds"]) == (name == "quickstart")
    assert list(tmp_path.iterdir()) == []


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dcptool", "run", "mine.toml", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_that_is_stopped_says_how_to_go_on(place, runs, capsys):
    long = ("--set", "finetune.steps=5000", "--set", "finetune.log_interval=1")
    process = start(place, *long, "--runs-dir", runs)
    folder = Path(runs) / "mine-002"
    try:
        wait_for(folder / "finetune", "metrics.jsonl", process)
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "--set finetune.steps=5000" in text
    assert f"--runs-dir {runs} --resume" in text
    # Without --resume a step that was stopped in its middle is not touched.
    changes = [word for word in long if word != "--set"]
    mine = recipe.read("mine.toml", sections.schema(), changes)
    assert runstate.choose(mine, Path(runs), resume=True, half_done=run._half_done) == folder
    fresh = runstate.choose(mine, Path(runs), resume=False, half_done=run._half_done)
    assert fresh.name == "mine-003"
    # Other settings cannot go on with it, and it is said which.
    found = document(capsys, runs, "--resume", "--set", "finetune.steps=3", code=3)
    assert "finetune.steps: 5000 -> 3" in found["error"]["why"]


def test_a_run_that_was_killed_goes_on_in_the_middle_of_a_step(place, runs, capsys):
    words = ["--set", "finetune.steps=40", "--set", "finetune.log_interval=1"]
    words += ["--set", "finetune.save_every=0"]
    process = start(place, *words, "--runs-dir", runs)
    folder = Path(runs) / "mine-002" / "finetune"
    try:
        wait_for(folder / "checkpoints", "state-00000002-*.safetensors", process)
        process.kill()
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -9
    found = document(capsys, runs, *words, "--resume")
    assert found["run"] == f"{runs}/mine-002"
    assert skipped(found) == ["analyze", "prune"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(set(steps)), "steps done before were done again"
    assert steps[-1] == 40
    assert not Path(runs, "mine-003").exists()


def test_several_processes_inside_a_run(runs, capsys):
    found = document(capsys, runs, "--set", "finetune.nproc_per_node=2")
    tuned = next(step for step in found["steps"] if step["name"] == "finetune")["document"]
    assert tuned["steps"] == 2
    assert "DCPTOOL_DOCUMENT" not in os.environ


@pytest.mark.parametrize(
    ("pruned", "dense"),
    [
        ({"dense": {"top1": 90.0}, "before": {"top1": 80.0}, "slim": {"top1": 70.0}}, 90.0),
        # Of an artifact whose dense weights are gone.
        ({"dense": {"top1": None}, "before": {"top1": 80.0}, "slim": {"top1": 70.0}}, 80.0),
        # Pruned without labels: what came out of it is not the dense network.
        ({"dense": {"top1": None}, "slim": {"top1": None}}, None),
        ({}, 60.0),
    ],
)
def test_a_drop_is_counted_from_the_dense_network(pruned, dense: float | None) -> None:
    documents = {"prune": pruned, "finetune": {"before": {"top1": 60.0}, "after": {"top1": 75.0}}}
    assert run.top1_of(documents) == (dense, 75.0)
