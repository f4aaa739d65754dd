"""`dcptool finetune` as a user runs it: result, resume, signals, several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from PIL import Image

from dcptool.cli.app import run
from dcptool.pipeline import finetune

BASE = ("finetune", "zoo:resnet20", "--no-pretrained", "-b", "16", "--channels-last", "off")


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder) if "loss" in row]


def start(cwd: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dcptool", *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    limit = time.monotonic() + 90
    while time.monotonic() < limit and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(losses(folder)) >= steps:
            return
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"no step {steps}: {process.communicate()[1]}")


def test_a_new_artifact_that_evaluate_agrees_with(dcptool, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    done = dcptool(*BASE, "--steps", "40", "--json", env=home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["command"] == "finetune"
    assert found["after"]["top1"] > found["before"]["top1"] + 20
    assert found["steps"] == 40
    assert "built-in sample set" in done.stderr
    made = tmp_path / found["artifact"]
    assert (tmp_path / "runs" / "latest").resolve() == made.resolve()
    assert not (made / "checkpoints").exists()
    assert (made / "metrics.csv").read_text().startswith("step,epoch,lr,loss")
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["input"]["size"] == [3, 32, 32]
    assert manifest["classes"] == list("0123456789")
    assert manifest["lineage"]["finetune"]["steps"] == 40
    again = dcptool("evaluate", "--json")
    assert json.loads(again.stdout)["top1"] == pytest.approx(found["after"]["top1"])
    second = dcptool("finetune", "--steps", "2", "--teacher", "runs/latest", "--json", env=home)
    assert second.returncode == 0, second.stderr
    child = tmp_path / json.loads(second.stdout)["artifact"]
    lineage = json.loads((child / "manifest.json").read_text())["lineage"]
    assert lineage["parent"]["name"] == made.name
    assert lineage["finetune"]["distilled"] is True
    twice = dcptool("finetune", "--resume", str(made), "--json")
    assert json.loads(twice.stdout)["after"] == found["after"]
    for path in (*made.rglob("*.*"), *child.rglob("*.*")):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_the_resumed_run_is_bit_equal(
    dcptool, tmp_path: Path, number: signal.Signals
) -> None:
    options = (*BASE, "--steps", "14", "--log-interval", "1")
    process = start(tmp_path, *options, "-o", "broken")
    wait_for_steps(process, tmp_path / "broken", 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "state saved" in err
    assert "Traceback" not in err
    command = next(line for line in err.splitlines() if "try:" in line).split("try: dcptool ")[1]
    resumed = dcptool(*command.split(), "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step" in resumed.stderr
    whole = dcptool(*options, "-o", "whole", "--json")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("broken", "whole")]
    assert weights[0] == weights[1]
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert json.loads(whole.stdout)["after"] == json.loads(resumed.stdout)["after"]


def test_a_changed_option_is_refused_by_name(tmp_path: Path, dcptool) -> None:
    process = start(tmp_path, *BASE, "--steps", "500", "--log-interval", "1", "-o", "run")
    wait_for_steps(process, tmp_path / "run", 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    changed = dcptool("finetune", "--resume", "run", "--momentum", "0.5", "--json")
    assert changed.returncode == 3
    assert json.loads(changed.stdout)["error"]["why"] == "training.momentum: 0.9 -> 0.5"


def test_bad_requests_have_their_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    cases = {
        ("finetune", "zoo:resnet20", "--no-pretrained", "-o", "full", "--steps", "1"): 2,
        ("finetune", "zoo:resnet20", "--no-pretrained", "--opt", "sdg"): 2,
        (*BASE, "--report-to", "nonsense", "-o", "strange"): 2,
        ("finetune", "--resume", "nowhere"): 3,
        ("finetune", "zoo:resnet20", "--no-pretrained", "--num-classes", "7"): 3,
        ("finetune", "zoo:resnet20", "--no-pretrained", "--device", "cuda"): 5,
        (*BASE, "--steps", "1", "--min-top1", "99", "-o", "gated"): 4,
        (*BASE, "--steps", "9", "--lr", "1e18", "-o", "blown"): 4,
    }
    for arguments, code in cases.items():
        assert run(list(arguments)) == code, arguments
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert "  why: " in said or "  try: " in said
    assert (tmp_path / "full" / "x").read_text() == "mine"
    assert not (tmp_path / "strange").exists()
    assert not (tmp_path / "gated" / "manifest.json").exists()
    assert not (tmp_path / "blown" / "manifest.json").exists()


def test_without_labels_the_teacher_says_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*BASE, "--steps", "20", "-o", "taught", "--json"]) == 0
    photos = tmp_path / "photos"
    photos.mkdir()
    draw = numpy.random.default_rng(0)
    for number in range(40):
        pixels = draw.integers(0, 256, (32, 32, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(photos / f"{number}.png")
    capsys.readouterr()
    options = ["finetune", "taught", "--images", "photos", "-b", "8", "--val-fraction", "0.5"]
    options += ["--channels-last", "off", "--json"]
    taught = ["--teacher", "taught", "--steps", "4"]
    harm = [*options, *taught, "--lr", "0.5", "--clip-grad", "1", "-o", "harmed"]
    assert run(harm) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["after"] is None
    before, after = (found["agreement"][key] for key in ("before", "after"))
    assert (before["top1"], after["top1"], after["images"]) == (100.0, 100.0, 10)
    assert after["kl"] == before["kl"]
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("taught", "harmed")]
    assert same[0] == same[1]
    assert run([*options, "-o", "alone"]) == 2
    assert not (tmp_path / "alone").exists()
    capsys.readouterr()
    for words in (
        ["--min-top1", "50"],
        ["--mixup", "0.2"],
        ["--cutmix", "0.2"],
        ["--smoothing", "0.1"],
        ["--losses", "2"],
    ):
        assert run([*options, *taught, *words, "-o", "refused"]) == 2
        assert f"{words[0]} needs labels" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()


def test_where_val_is_known_images_of_train_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*BASE, "--steps", "20", "-o", "first"]) == 0
    seen: list[tuple[str, str]] = []
    plain = finetune._accuracy

    def accuracy(module, images, job, classes, dist, title, *rest):
        seen.append((title, images.name))
        return plain(module, images, job, classes, dist, title, *rest)

    monkeypatch.setattr(finetune, "_accuracy", accuracy)
    monkeypatch.setattr(finetune, "knows_held_out", lambda *_, **__: True)
    capsys.readouterr()
    harm = ["finetune", "first", "--steps", "4", "-b", "16", "--lr", "0.5", "--clip-grad", "1"]
    assert run([*harm, "--channels-last", "off", "-o", "harmed"]) == 0
    assert "images of train choose" in capsys.readouterr().err
    assert [name for title, name in seen if title == "validation"] == ["samples"] * 2
    assert [name for title, name in seen if title != "validation"] == ["test"] * 2
    manifest = json.loads((tmp_path / "harmed" / "manifest.json").read_text())
    assert manifest["lineage"]["finetune"]["chosen_by"] == "train"
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "harmed")]
    assert same[0] == same[1]


def test_an_angular_loss_has_no_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        photo = tmp_path / "photos" / f"{number % 2}" / f"{number}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (30 * number, 90, 9)).save(photo)
    model = ("zoo:resnet20", "--no-pretrained", "--num-classes", "2")
    small = ("--images", "photos", "--no-training", "--samples", "4", "--positions", "4")
    assert run(["prune", *model, "--rate", "0.5", *small, "-o", "slim"]) == 0
    angular = ["finetune", "slim", "--data-dir", "photos", "--loss", "angular", "-b", "4"]
    for words in (["--kd"], ["--teacher", "slim"], ["--teacher-checkpoint", "x.safetensors"]):
        capsys.readouterr()
        assert run([*angular, *words, "-o", "refused"]) == 2
        assert "--loss angular has no place for a teacher" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
    for words, distilled in ((angular, False), (angular[:4], True)):
        made = f"distilled-{distilled}"
        assert run([*words, "--channels-last", "off", "--steps", "1", "-o", made]) == 0
        assert ("no distillation" in capsys.readouterr().err) != distilled
        lineage = json.loads((tmp_path / made / "manifest.json").read_text())["lineage"]
        assert lineage["finetune"]["distilled"] is distilled


@pytest.mark.slow
def test_two_processes_follow_one(dcptool, tmp_path: Path) -> None:
    options = ("finetune", "zoo:resnet20", "--no-pretrained", "--steps", "20", "--lr", "1e-4")
    options += ("--norms", "eval", "--no-aug", "--log-interval", "1", "--channels-last", "off")
    options += ("--clip-grad", "1", "--json")
    one = dcptool(*options, "-b", "32", "-o", "one", timeout=240)
    two = dcptool(*options, "-b", "16", "-o", "two", "--nproc-per-node", "2", timeout=240)
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    pairs = list(zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True))
    assert len(pairs) == 20
    assert max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs) < 1e-4
    assert json.loads(one.stdout)["images"] == json.loads(two.stdout)["images"] == 400


@pytest.mark.slow
def test_torchrun_gives_our_codes_back(dcptool, tmp_path: Path) -> None:
    both = (*BASE, "--nproc-per-node", "2", "--log-interval", "1", "--steps", "400")
    blown = dcptool(*both, "--lr", "1e18", "-o", "blown", "--json", timeout=240)
    assert blown.returncode == 4
    assert json.loads(blown.stdout)["error"]["code"] == 4
    assert json.loads((tmp_path / "blown" / "status.1.json").read_text())["code"] == 4
    process = start(tmp_path, *both, "-o", "stopped")
    wait_for_steps(process, tmp_path / "stopped", 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err.count("state saved") == 1
