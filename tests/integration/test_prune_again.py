"""Runs that follow other runs: pruned again, replaced, taken up by another method, taught on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from dcptool.cli.app import run

TINY = ["timm:test_resnet", "--no-pretrained", "--num-classes", "3", "--img-size", "64"]
FAST = ["--samples", "8", "--positions", "8", "--batch-size", "8"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of three classes, and of two."""
    folder = tmp_path_factory.mktemp("again")
    draw = numpy.random.default_rng(0)
    for name, classes in (("three", "abc"), ("two", "ab")):
        for split, count in (("train", 8), ("val", 4)):
            for label in classes:
                where = folder / name / split / label
                where.mkdir(parents=True)
                for number in range(count):
                    pixels = draw.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
                    Image.fromarray(pixels).save(where / f"{number}.png")
    return folder


@pytest.fixture
def dcptool(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in the folder; returns its code and its document."""
    monkeypatch.chdir(place)

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = run([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def _prune(*more: str) -> list[str]:
    return ["prune", *TINY, "--data-dir", "three", *FAST, *more]


def _lineage(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())["lineage"]


def test_what_was_pruned_twice_learns_from_the_dense_network(dcptool, place: Path) -> None:
    assert dcptool(*_prune("--rate", "0.5", "--no-training", "-o", "once"))[0] == 0
    more = ("--data-dir", "three", *FAST, "--rate", "0.5", "--no-training", "-o", "twice")
    assert dcptool("prune", "once", *more)[0] == 0
    dense = [(place / name / "dense.safetensors").read_bytes() for name in ("once", "twice")]
    assert dense[0] == dense[1]
    lineage = _lineage(place / "twice")
    assert lineage["parent"]["name"] == "once"
    assert lineage["dense"]["weights"] == _lineage(place / "once")["dense"]["weights"]
    train = ("--steps", "1", "-b", "8")
    code, _ = dcptool("finetune", "twice", "--data-dir", "three", *train, "-o", "taught")
    assert code == 0
    assert _lineage(place / "taught")["finetune"]["distilled"] is True

    # A new head knows other classes than the dense network does.
    other = ("finetune", "once", "--data-dir", "two", "--reset-head", *train)
    assert dcptool(*other, "-o", "other")[0] == 0
    lineage = _lineage(place / "other")
    assert lineage["finetune"]["distilled"] is False
    assert "dense" not in lineage
    code, document = dcptool(*other, "--kd", "-o", "refused")
    assert code == 2
    assert "3 classes" in document["error"]["message"]
    assert not (place / "refused").exists()


def test_the_next_commands_name_what_is_not_the_newest_run(
    dcptool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*_prune("--rate", "0.5", "--no-training", "-o", "my net")]) == 0
    assert "next: dcptool finetune 'my net', dcptool export 'my net' --onnx" in (
        capsys.readouterr().err
    )


def test_a_replaced_run_leaves_nothing_to_the_new_one(dcptool) -> None:
    fresh = dcptool(*_prune("--rate", "0.7", "--no-training", "-o", "fresh"))[1]
    assert dcptool(*_prune("--rate", "0.3", "--no-training", "-o", "old"))[0] == 0
    code, replaced = dcptool(*_prune("--rate", "0.7", "--no-training", "-o", "old", "--force"))
    assert code == 0
    assert replaced["slim"] == fresh["slim"]
    assert replaced["kept"] == fresh["kept"]


def test_orders_serve_their_own_method_and_network(dcptool) -> None:
    assert dcptool(*_prune("--rate", "0.5", "--no-training", "-o", "ordered"))[0] == 0
    again = ("--rate", "0.6", "--no-training", "--reuse", "ordered")
    code, document = dcptool(*_prune(*again, "--method", "l1", "-o", "never"))
    assert code == 2
    assert "are those of dcp" in document["error"]["why"]
    other = ["prune", "zoo:resnet20", *TINY[1:], "--data-dir", "three", *FAST]
    assert dcptool(*other, *again, "-o", "never")[0] == 3


def test_a_stage_may_have_nothing_to_cut(dcptool) -> None:
    options = ("--rate", "0.5", "--stage-steps", "1", "--keep", "layer[12]*", "-o", "kept")
    code, document = dcptool(*_prune(*options))
    assert code == 0
    assert all(name.startswith(("layer3", "layer4")) for name in document["kept"])


def test_a_target_says_what_was_reached(dcptool) -> None:
    code, document = dcptool(*_prune("--target-macs", "0.7", "--no-training", "-o", "aimed"))
    assert code == 0
    target = document["target"]
    assert target["kind"] == "macs"
    assert target["wanted"] == pytest.approx(0.7 * document["dense"]["macs"])
    assert target["reached"] == document["slim"]["macs"]


def test_what_cannot_be_is_refused_before_a_baseline_is_fitted(
    dcptool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    for impossible in (("--target-macs", "0.0001"), ("--rate", "0.5", "--keep", "*")):
        code, _ = dcptool("prune", "timm:test_resnet", "--no-pretrained", *impossible)
        assert code in (2, 3)
    assert not (place / "cache").exists()
    assert not (place / "runs").exists()


@pytest.mark.parametrize("source", ["--data-dir", "--images"])
def test_without_training_the_own_loss_is_asked_only_where_lambda_says_so(
    dcptool, source: str
) -> None:
    """With labels by them, without by the dense network's answers."""
    small = ["zoo:resnet20", "--no-pretrained", "--num-classes", "3"]
    model = ["prune", *small, source, "three", *FAST, "--rate", "0.5", "--no-training"]
    kept, said = {}, {}
    for strength in (None, "0", "inf"):
        name = f"aware{source}{strength}"
        chosen = [] if strength is None else ["--lambda", strength]
        assert dcptool(*model, *chosen, "-o", name)[0] == 0
        manifest = json.loads(Path(name, "manifest.json").read_text())
        said[strength] = manifest["lineage"]["prune"]["lambda"]
        kept[strength] = manifest["cuts"]
    assert said == {None: 0, "0": 0, "inf": "inf"}
    assert kept[None] == kept["0"] != kept["inf"]
