"""Slips of somebody who starts: each message names the command to type next."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dcptool.cli import app
from dcptool.errors import InputError


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
        ("run quickstart --set model.name=resnet5", 2, "--set model.name=resnet50"),
        ("recipe validate quickstart --set model.name=resnet5", 2, "--set model.name=resnet50"),
        (
            "sweep zoo:resnet65 --over prune.rate=0.3,0.5",
            2,
            "dcptool sweep zoo:resnet56 --over prune.rate=0.3,0.5",
        ),
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
        ("prune zoo:resnet20 --rate 50", 2, "dcptool prune zoo:resnet20 --rate 0.5"),
        ("prune zoo:resnet20 --rate x", 2, "dcptool prune zoo:resnet20 --rate 0.3"),
        ("run quickstart --set rate=0.5", 2, "--set prune.rate=0.5"),
        ("run quickstart --set prune.rate=half", 2, "dcptool recipe show quickstart"),
    ],
)
def test_the_next_command_is_named(words, code, command, capsys):
    assert app.run(words.split()) == code
    tries = capsys.readouterr().err.partition("  try: ")[2]
    assert command in tries
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "says", "command"),
    [
        (
            "sweep zoo:resnet20",
            "sweep needs --over SECTION.KEY=V1,V2,...",
            "dcptool sweep zoo:resnet20 --over prune.target_macs=0.3,0.5,0.7",
        ),
        (
            "sweep zoo:resnet20 --over rate=0.3,0.4",
            "--over rate=0.3,0.4 names no section",
            "dcptool sweep zoo:resnet20 --over prune.rate=0.3,0.4",
        ),
        (
            "sweep zoo:resnet20 --over rat=0.3,0.4",
            "--over rat=0.3,0.4 names no section",
            "dcptool sweep zoo:resnet20 --over prune.rate=0.3,0.5",
        ),
        ("sweep zoo:resnet20 --over prune.=0.3", "--over prune.=0.3 is no key", "--over prune."),
        ("prune resnet50 --round-to foo", "nor auto nor measure", "dcptool prune --help"),
        ("prune resnet50 --samples foo", "at least 1 nor auto\n", "dcptool prune --help"),
        (
            "prune zoo:resnet20 --rate 0.3 --smallest-by latency --latency-batch 8 --threads 2",
            "--smallest-by does nothing without --max-accuracy-drop\n"
            "       --latency-batch does nothing without --target-latency",
            "dcptool prune zoo:resnet20 --rate 0.3",
        ),
        (
            "prune resnet50 --rate 0.3 --no-training --loop-epochs 2",
            "--loop-epochs does nothing without --solver sgd or a --lambda",
            "dcptool prune resnet50 --rate 0.3",
        ),
        (
            "prune zoo:resnet20 --rate 0.3 --rate-of layer1.*=0.1 --widths curves",
            "--rate-of and --widths curves exclude each other",
            "dcptool prune",
        ),
        ("prune zoo:resnet20 --rate 0.3 --seed -1", "-1 is not in the range", "dcptool prune"),
        (
            "analyze --recipe quickstart --rate 0.3 --scope all",
            "--rate and --scope do nothing beside --recipe",
            "a recipe of your own, or MODEL",
        ),
        ("export zoo:resnet20 --samples 8", "--samples does nothing without --int8", "add --int8"),
        (
            "bench zoo:resnet20 --data-dir photos",
            "--data-dir does nothing without --int8",
            "the same command without --data-dir",
        ),
        (
            "bench a.onnx b.onnx --no-pretrained",
            "--no-pretrained does nothing here: artifacts and files have their own weights",
            "the same command without",
        ),
    ],
)
def test_what_is_wrong_is_named_as_it_was_typed(words, says, command, capsys):
    assert app.run(words.split()) == 2
    what, _, tries = capsys.readouterr().err.partition("  try: ")
    assert says in what
    assert command in tries


def test_a_recipe_may_set_what_plays_no_part():
    text = '[model]\nname = "zoo:resnet20"\n[prune]\nrate = 0.3\nlatency_batch = 8\n'
    Path("mine.toml").write_text(text)
    assert app.run(["recipe", "validate", "./mine.toml"]) == 0
    # Refused for its data, which comes after the options.
    with pytest.raises(InputError, match="no folder photos"):
        app.invoke("prune", ["zoo:resnet20", "--rate=0.3", "--threads=2", "--data-dir=photos"])


def test_a_report_of_no_run(capsys):
    assert app.run(["report", "runs/mine"]) == 3
    assert "there is no folder runs/mine" in capsys.readouterr().err
    for name in ("runs/my-sweep/0.3-001/prune", "runs/my-sweep/0.5-001", "runs/my-sweep/empty"):
        Path(name).mkdir(parents=True)
    for name in ("runs/my-sweep/0.3-001/prune", "runs/my-sweep/0.5-001"):
        Path(name, "manifest.json").write_text("{}")
    assert app.run(["report", "runs/my-swep"]) == 3
    assert "try: dcptool report runs/my-sweep\n" in capsys.readouterr().err
    assert app.run(["report", "runs/my-sweep"]) == 3
    said = capsys.readouterr().err
    assert "runs/my-sweep is no run, but holds 2\n  why: 0.3-001, 0.5-001\n" in said
    assert "try: dcptool report runs/my-sweep/0.3-001 runs/my-sweep/0.5-001\n" in said


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("export --onnx runs/mine", "dcptool export runs/mine --onnx"),
        ("export resnet50 --onnx runs/mine", "dcptool export resnet50 --onnx runs/mine/model.onnx"),
        ("export runs/mine", "another file with --onnx FILE, or --force"),
        ("export runs/mine --safetensors there", "another file with --safetensors FILE"),
        ("recipe copy quickstart there", "dcptool recipe copy quickstart OTHER.toml, or --force"),
    ],
)
def test_the_next_command_where_something_is_there(words, command, capsys):
    Path("runs/mine").mkdir(parents=True)
    for name in ("runs/mine/manifest.json", "runs/mine/model.onnx", "there"):
        Path(name).write_text("{}")
    assert app.run(words.split()) == 2
    assert command in capsys.readouterr().err.partition("  try: ")[2]


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
