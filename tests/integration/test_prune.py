"""The real `dcptool prune` by subprocess, on real images that come with a package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from PIL import Image

import dcptool

FAST = ["--samples", "64", "--positions", "16", "--stage-steps", "2", "--no-pretrained"]

UNLABELLED = ["--images", "photos", "--no-training"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prune")


def _run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.command(*arguments, cwd=place, env={"XDG_CACHE_HOME": str(place / "cache")})


@pytest.fixture(scope="module")
def photos(place: Path) -> Path:
    """Real photographs: scikit-learn's two, cut into tiles."""
    from sklearn.datasets import load_sample_images

    folder = place / "photos" / "deep"
    folder.mkdir(parents=True)
    number = 0
    for image in load_sample_images().images:
        for top in range(0, 400, 100):
            for left in range(0, 600, 100):
                tile = np.ascontiguousarray(image[top : top + 100, left : left + 100])
                Image.fromarray(tile).save(folder / f"{number:03d}.png")
                number += 1
    return place / "photos"


def _same_in_another_process(run: Path, target: Path) -> None:
    """Loaded here and in a fresh process, an artifact gives the same bits."""
    code = (
        "import sys, torch, dcptool; m = dcptool.load(sys.argv[1]); "
        "torch.manual_seed(0); torch.save(m(torch.randn(2, 3, 32, 32)), sys.argv[2])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, run, target], check=True, env=environment)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module = dcptool.load(str(run))
        torch.manual_seed(0)
        wanted = module(torch.randn(2, 3, 32, 32))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.load(target, weights_only=True), wanted)


def test_first_line_on_the_built_in_set(place: Path) -> None:
    """A baseline is fitted once, pruned in stages, published, loaded and pruned again."""
    done = _run(place, "prune", "zoo:resnet20", "--rate", "0.5", "--json", *FAST)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["command"] == "prune"
    assert document["slim"]["macs"] < 0.55 * document["dense"]["macs"]
    assert document["dense"]["top1"] > 80
    assert set(document["kept"].values()) == {8, 16, 32}
    assert "built-in" in done.stderr
    assert "baseline" in done.stderr
    assert document["seconds"]["training"] > 0
    run = place / "runs" / "latest"
    assert run.is_symlink()
    module = dcptool.load(str(run))
    assert sum(p.numel() for p in module.parameters()) == document["slim"]["params"]
    _same_in_another_process(run.resolve(), place / "scores.pt")
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [s["group"] for s in steps] == list(document["kept"])
    assert all(len(s["kept"]) == document["kept"][s["group"]] for s in steps)

    again = _run(
        place, "prune", "runs/latest", "--rate", "0.5", "--json", "--no-training", *FAST[:4]
    )
    assert again.returncode == 0, again.stderr
    assert set(json.loads(again.stdout)["kept"].values()) == {4, 8, 16}


def test_no_training_on_images_without_labels(place: Path, photos: Path) -> None:
    arguments = ["prune", "test_resnet", "--no-pretrained", "--rate", "0.5", "--no-training"]
    options = ["--images", str(photos), "--samples", "32", "--positions", "16", "--json"]
    done = _run(place, *arguments, *options, "-o", "slim")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["dense"]["top1"] is None
    assert document["agreement"]["images"] > 0
    assert document["seconds"]["training"] == 0
    manifest = json.loads((place / "slim" / "manifest.json").read_text())
    assert manifest["lineage"]["prune"]["training"] is False

    same = _run(place, *arguments, *options, "-o", "slim2")
    assert same.returncode == 0, same.stderr
    first, second = (
        (place / name / "model.safetensors").read_bytes() for name in ("slim", "slim2")
    )
    assert first == second

    taken = _run(place, *arguments, *options, "-o", "slim")
    assert taken.returncode == 2
    assert "--force" in taken.stderr

    gate = _run(
        place, *arguments, *options, "-o", "slim3", "--min-agreement", "100", "--rate", "0.9"
    )
    if gate.returncode == 4:
        assert not (place / "slim3" / "manifest.json").exists()
    else:
        assert json.loads(gate.stdout)["agreement"]["top1"] == 100


def test_stopped_and_resumed_is_the_same_network(place: Path, photos: Path) -> None:
    """SIGTERM between two layers: 143, the command that resumes, and bit-equal weights."""
    options = ["--no-pretrained", "--no-training", "--rate", "0.5", "--images", str(photos)]
    arguments = ["prune", "zoo:resnet56", *options, "--samples", "32", "--positions", "16"]
    whole = _run(place, *arguments, "-o", "whole")
    assert whole.returncode == 0, whole.stderr
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "dcptool", *arguments, "-o", "parts"],
        cwd=place,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        steps = place / "parts" / "steps.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not steps.exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 143, told
    assert "dcptool prune --resume parts" in told
    assert not (place / "parts" / "manifest.json").exists()
    changed = _run(place, "prune", "--resume", "parts", "--rate", "0.3")
    assert changed.returncode == 3
    assert "prune.rate" in changed.stderr
    rest = _run(place, "prune", "--resume", "parts")
    assert rest.returncode == 0, rest.stderr
    for name in ("model.safetensors", "steps.jsonl"):
        assert (place / "parts" / name).read_bytes() == (place / "whole" / name).read_bytes()
    assert not (place / "parts" / "checkpoints").exists()
    again = _run(place, "prune", "--resume", "parts")
    assert again.returncode == 2
    assert "finished" in again.stderr


@pytest.mark.parametrize(
    "solver", [["--no-training"], ["--solver", "sgd", "--stage-steps", "0", "--epsilon", "0.05"]]
)
def test_two_processes_choose_what_one_does(place: Path, tmp_path: Path, solver: list[str]) -> None:
    options = ["prune", "zoo:resnet20", "--no-pretrained", "--samples", "33", "--seed", "3"]
    options += ["--positions", "16", "--batch-size", "16", "--json", "--keep", "layer3*", *solver]
    budget = [] if "--epsilon" in solver else ["--rate", "0.5"]
    for name, more in (("one", []), ("two", ["--nproc-per-node", "2"])):
        done = _run(place, *options, *budget, "-o", str(tmp_path / name), *more)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["proof"]["difference"] < 1e-4
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "steps.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [line["kept"] for line in one] == [line["kept"] for line in two]
    assert len(one) == 6


def test_orders_are_reused_and_it_is_said_where_not(place: Path, photos: Path) -> None:
    options = ["prune", "test_resnet", "--no-pretrained", "--no-training", "--images", str(photos)]
    options += ["--samples", "32", "--positions", "16", "--json"]
    assert _run(place, *options, "--rate", "0.5", "-o", "half").returncode == 0
    less = _run(place, *options, "--rate", "0.25", "--reuse", "half", "-o", "quarter")
    assert less.returncode == 0, less.stderr
    assert "ordered anew" not in less.stderr
    more = _run(place, *options, "--rate", "0.75", "--reuse", "half", "-o", "most")
    assert more.returncode == 0, more.stderr
    assert "ordered anew" in more.stderr
    none = _run(place, *options, "--rate", "0.75", "--reuse", "photos", "-o", "nothing")
    assert none.returncode == 3
    assert not (place / "nothing").exists()


def test_plan_by_hand(place: Path, photos: Path) -> None:
    plan = place / "plan.json"
    emitted = _run(place, "analyze", "test_resnet", "--rate", "0.5", "--emit-plan", str(plan))
    assert emitted.returncode == 0, emitted.stderr
    document = json.loads(plan.read_text())
    name = next(iter(document["groups"]))
    document["groups"] = {name: {"keep": 3}}
    plan.write_text(json.dumps(document))
    common = ["--no-pretrained", "--no-training", "--images", str(photos), "--samples", "16"]
    done = _run(place, "prune", "test_resnet", "--plan", str(plan), "--json", *common)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kept"] == {name: 3}
    document["groups"] = {"nowhere": {"keep": 3}, name: {"keep": 10_000}}
    plan.write_text(json.dumps(document))
    refused = _run(place, "prune", "test_resnet", "--plan", str(plan), *common)
    assert refused.returncode == 3
    assert "nowhere" in refused.stderr
    assert "10000" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--rate", "0.3", "--epsilon", "0.1"], 2, "exclude each other"),
        ([], 2, "one of --rate"),
        (["--rate", "1"], 2, "out of range"),
        (["--rate", "-0.1"], 2, "out of range"),
        (["--epsilon", "0"], 2, "out of range"),
        (["--epsilon", "0.1", "--method", "l1"], 2, "needs a loss"),
        (["--rate", "0.3", "--lambda", "nan"], 2, "--lambda nan"),
        (["--rate", "0.3", "--cache-gb", "inf"], 2, "--cache-gb inf"),
        (["--rate", "0.3", "--stage-lr", "nan"], 2, "--stage-lr: nan is out of range"),
        (["--rate", "0.3", "--images", "missing"], 3, "missing"),
        (["--rate", "0.3", "--images", "photos"], 2, "--no-training"),
        (["--rate", "0.3", *UNLABELLED, "--keep", "*"], 3, "--keep leaves every group whole"),
        (["--plan", "empty.json", *UNLABELLED], 3, "it is empty"),
    ],
)
def test_bad_input_ends_early_and_writes_nothing(
    place: Path, photos: Path, arguments: list[str], code: int, says: str
) -> None:
    before = sorted(p.name for p in (place / "runs").iterdir()) if (place / "runs").exists() else []
    (place / "empty.json").write_text('{"dcptool_plan": 1, "groups": {}}')
    done = _run(place, "prune", "test_resnet", "--no-pretrained", *arguments)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    after = sorted(p.name for p in (place / "runs").iterdir()) if (place / "runs").exists() else []
    assert after == before


def test_weights_with_nan_are_refused(place: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from dcptool.network import models

    module = models.load("zoo:resnet20", pretrained=False).module
    state = module.state_dict()
    state["layer1.0.conv1.weight"][0, 0, 0, 0] = float("nan")
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "bad.safetensors")
    arguments = ["--rate", "0.3", "--checkpoint", str(tmp_path / "bad.safetensors")]
    done = _run(place, "prune", "zoo:resnet20", *arguments)
    assert done.returncode == 3
    assert "layer1.0.conv1.weight" in done.stderr
