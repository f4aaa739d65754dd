"""Slips of somebody who starts: each message names the command to type next."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dcptool.cli import app


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DCPTOOL_RUNS", raising=False)


@pytest.mark.parametrize(
    ("words", "code", "command"),
    [
        # the name of a model
        ("prune resnet5 --rate 0.3", 2, "dcptool prune resnet50 --rate 0.3"),
        ("analyze zoo:resnet65", 2, "dcptool analyze zoo:resnet56"),
        # the name of a command, an option, a recipe
        ("prun resnet50 --rate 0.3", 2, "dcptool prune resnet50 --rate 0.3"),
        ("prune resnet50 --rat 0.3", 2, "dcptool prune resnet50 --rate 0.3"),
        ("run quikstart --set prune.rate=0.5", 2, "dcptool run quickstart --set prune.rate=0.5"),
        ("recipe show quikstart", 2, "dcptool recipe show quickstart"),
        ("run quickstart.toml", 3, "dcptool run quickstart"),
        ("run --dry-run", 2, "dcptool run --help"),
        # images that are not there, told before weights are looked for
        ("prune resnet50 --rate 0.3 --data-dir photo", 3, "ls ."),
        ("finetune resnet50 --data-dir photo", 3, "ls ."),
        ("prune resnet50 --rate 0.3 --no-training --images photo", 3, "ls ."),
        # a later command before an earlier one
        ("finetune", 3, "dcptool prune resnet50 --rate 0.3"),
        ("evaluate", 3, "dcptool prune resnet50 --rate 0.3"),
        ("export --onnx", 3, "dcptool prune resnet50 --rate 0.3"),
        ("bench", 3, "dcptool prune resnet50 --rate 0.3"),
        ("bench runs/latest", 2, "dcptool prune resnet50 --rate 0.3"),
        ("finetune runs/resnet50-dcp-001", 2, "dcptool prune resnet50 --rate 0.3"),
        ("bench slim.onnx", 3, "dcptool export --onnx slim.onnx"),
        ("evaluate slim.onnx", 3, "dcptool export --onnx slim.onnx"),
        # how much to remove
        ("prune resnet50", 2, "dcptool prune resnet50 --rate 0.3"),
        ("prune resnet50 --rate 30", 2, "dcptool prune resnet50 --rate 0.3"),
        ("run quickstart --set rate=0.5", 2, "--set prune.rate=0.5"),
        ("run quickstart --set prune.rate=half", 2, "dcptool recipe show quickstart"),
    ],
)
def test_the_next_command_is_named(words, code, command, capsys):
    assert app.run(words.split()) == code
    tries = capsys.readouterr().err.partition("  try: ")[2]
    assert command in tries
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_written(capsys):
    # Below a file nobody can make a folder, not even root.
    Path("file").write_text("")
    words = ["prune", "zoo:resnet20", "--no-pretrained", "--rate", "0.3", "--no-training"]
    Path("photos").mkdir()
    from PIL import Image

    for number in range(4):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(f"photos/{number}.png")
    assert app.run([*words, "--images", "photos", "--runs-dir", "file/runs"]) == 5
    text = capsys.readouterr().err
    assert "cannot write file/runs" in text
    assert "--runs-dir DIR" in text
    assert app.run(["run", "quickstart", "--runs-dir", "file/runs"]) == 5
    assert "--runs-dir DIR" in capsys.readouterr().err


def test_no_permission(capsys):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    Path("closed").mkdir(mode=0o500)
    assert app.run(["run", "quickstart", "--runs-dir", "closed/runs"]) == 5
    assert "--runs-dir DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "command"), [(2, "pip install --upgrade dcptool"), (0, "dcptool prune")]
)
@pytest.mark.parametrize("words", ["export artifact", "bench artifact", "finetune artifact"])
def test_an_artifact_of_another_version(number, command, words, capsys):
    Path("artifact").mkdir()
    manifest = {"format": number, "dcptool": "9.9"}
    Path("artifact/manifest.json").write_text(json.dumps(manifest))
    assert app.run(words.split()) == 3
    text = capsys.readouterr().err
    assert "made by dcptool 9.9" in text
    assert command in text.partition("  try: ")[2]
