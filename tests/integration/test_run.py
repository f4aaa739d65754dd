"""`dcptool run` from a recipe to its numbers: skipping, stopping, gates, the Python side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcptool
from dcptool.cli import app
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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a recipe, random weights, and one whole run of it."""
    folder = tmp_path_factory.mktemp("run")
    before = Path.cwd()
    os.chdir(folder)
    try:
        target = "--safetensors=dense.safetensors"
        assert app.run(["export", "zoo:resnet20", "--no-pretrained", "-q", target]) == 0
        Path("mine.toml").write_text(RECIPE)
        yield folder
    finally:
        os.chdir(before)


def document(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict:
    capsys.readouterr()
    assert app.run(["run", "mine.toml", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


def skipped(found: dict) -> list[str]:
    return [step["name"] for step in found["steps"] if step["skipped"]]


NAMES = ["analyze", "prune", "finetune", "export", "evaluate", "bench"]


def test_a_run_does_each_step_once(place, capsys):
    found = document(capsys)
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

    again = document(capsys)
    assert again["run"] == found["run"]
    assert skipped(again) == NAMES
    assert again["summary"] == found["summary"]
    assert app.run(["run", "mine.toml"]) == 0
    seen = capsys.readouterr()
    assert "gate max_accuracy_drop" in seen.out
    assert "prune (there)" in seen.out


def test_changed_settings_use_what_has_not_changed(place, capsys):
    found = document(capsys, "--set", "finetune.steps=1")
    assert found["run"] == "runs/mine-002"
    assert skipped(found) == ["analyze", "prune"]
    pruned = found["steps"][1]["document"]
    assert pruned["artifact"] == "runs/mine-002/prune"
    first, second = (Path(f"runs/mine-00{n}/prune") for n in (1, 2))
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()
    # Every run folder is whole by itself.
    dcptool.load(second)


def test_a_result_that_is_damaged_or_gone_is_made_again(place, capsys):
    Path("runs/mine-001/finetune/model.onnx").unlink()
    found = document(capsys)
    assert found["run"] == "runs/mine-001"
    assert "export" not in skipped(found)
    assert "prune" in skipped(found)
    state = json.loads(Path("runs/mine-001/run.json").read_text())
    weights = Path("runs/mine-001/prune/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    # The same weights lie in another run, and are taken from there.
    found = document(capsys)
    assert "prune" in skipped(found)
    assert runstate._sha256(weights) == state["steps"]["prune"]["files"]["prune/model.safetensors"]


def test_inputs_that_changed_are_noticed(place):
    folder = place / "photos" / "train" / "cat"
    folder.mkdir(parents=True)
    before = runstate.stamp(place / "photos")
    assert runstate.stamp(place / "photos") == before
    os.utime(folder, ns=(1, 1))
    assert runstate.stamp(place / "photos") != before
    weights = place / "dense.safetensors"
    one = runstate.stamp(weights)
    assert one != runstate.stamp(place / "mine.toml")
    os.utime(weights, ns=(1, 1))
    assert runstate.stamp(weights) == one


def test_gates_decide_the_exit_code(place, capsys):
    found = document(capsys, "--set", "gates.min_speedup=1000", code=4)
    assert found["error"]["code"] == 4
    assert "min_speedup: the limit is 1000" in found["error"]["why"]
    assert [gate["ok"] for gate in found["gates"]] == [True, False]
    assert skipped(found) == NAMES
    with pytest.raises(GateFailed, match="1 of 2 gates did not hold"):
        dcptool.run("mine.toml", settings={"gates.min_speedup": 1000})
    assert capsys.readouterr().out == ""


def test_python_runs_recipes_too(place, capsys):
    found = dcptool.run("mine.toml")
    assert found["command"] == "run"
    assert skipped(found) == NAMES
    assert dcptool.evaluate(found["artifact"], split="val")["images"] == 200
    assert capsys.readouterr() == ("", "")


def test_dry_run_writes_nothing(place, capsys):
    before = sorted(Path("runs").rglob("*"))
    found = document(capsys, "--dry-run", "--set", "prune.rate=0.3")
    assert sorted(Path("runs").rglob("*")) == before
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


def test_a_run_that_is_stopped_says_how_to_go_on(place, capsys):
    long = ("--set", "finetune.steps=5000", "--set", "finetune.log_interval=1")
    process = start(place, *long, "--runs-dir", "other")
    folder = place / "other" / "mine-001"
    try:
        wait_for(folder / "finetune", "metrics.jsonl", process)
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "--set finetune.steps=5000" in text
    assert "--runs-dir other --resume" in text
    # Without --resume a step that was stopped in its middle is not touched.
    mine, runs = _recipe(*long), place / "other"
    assert runstate.choose(mine, runs, resume=True, half_done=run._half_done) == folder
    fresh = runstate.choose(mine, runs, resume=False, half_done=run._half_done)
    assert fresh.name == "mine-002"
    # Other settings cannot go on with it, and it is said which.
    found = document(capsys, "--runs-dir", "other", "--resume", code=3)
    assert "finetune.steps: 5000 -> 2" in found["error"]["why"]


def _recipe(*words: str):
    from dcptool.cli import sections

    changes = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    return recipe.read("mine.toml", sections.schema(), changes)


def test_a_run_that_was_killed_goes_on_in_the_middle_of_a_step(place, capsys):
    words = ["--set", "finetune.steps=40", "--set", "finetune.log_interval=1", "--runs-dir", "r"]
    words += ["--set", "finetune.save_every=0"]
    process = start(place, *words)
    folder = place / "r" / "mine-001" / "finetune"
    try:
        wait_for(folder / "checkpoints", "state-00000002-*.safetensors", process)
        process.kill()
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -9
    found = document(capsys, *words, "--resume")
    assert found["run"] == "r/mine-001"
    assert skipped(found) == ["analyze", "prune"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(set(steps)), "steps done before were done again"
    assert steps[-1] == 40
    assert not (place / "r" / "mine-002").exists()


def test_several_processes_inside_a_run(place, capsys):
    found = document(capsys, "--set", "finetune.nproc_per_node=2", "--runs-dir", "two")
    tuned = next(step for step in found["steps"] if step["name"] == "finetune")["document"]
    assert tuned["steps"] == 2
    assert "DCPTOOL_DOCUMENT" not in os.environ
