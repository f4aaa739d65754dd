"""Commands leave a report in their run: prune, finetune and bench one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from dcptool.cli import app

NAMES = ("<i>sky</i>", "sea & shore")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes whose names are markup, as far as a folder may be called so."""
    from sklearn.datasets import load_sample_images

    folder = tmp_path_factory.mktemp("report")
    for name, image in zip(NAMES, load_sample_images().images, strict=True):
        inside = folder / "photos" / name.replace("/", "_")
        inside.mkdir(parents=True)
        for number in range(24):
            top, left = 100 * (number // 6), 100 * (number % 6)
            tile = Image.fromarray(image[top : top + 100, left : left + 100])
            tile.resize((32, 32)).save(inside / f"{number:02d}.png")
    return folder


def test_every_command_leaves_its_part(place, monkeypatch):
    monkeypatch.chdir(place)
    data = ["--data-dir", "photos", "--val-fraction", "0.3", "-q"]
    model = ["zoo:resnet20", "--no-pretrained", "--num-classes", "2"]
    few = ["--rate", "0.5", "--samples", "16", "--positions", "16", "--stage-steps", "1"]
    app.invoke("prune", [*model, *few, *data, "-o", "slim", "-b", "16"])
    text = (place / "slim" / "report.html").read_text()
    for section in ("answer", "architecture", "selection", "classes"):
        assert f'<section id="{section}"' in text
    assert '<section id="latency"' not in text
    assert "dcptool prune zoo:resnet20 --no-pretrained" in text
    assert "&lt;i&gt;sky" in text or "No class gained or lost." in text
    assert "<i>sky" not in text

    tuning = ["--steps", "2", "--log-interval", "1", "--batch-size", "8"]
    app.invoke("finetune", ["slim", *tuning, *data, "-o", "tuned"])
    app.invoke("bench", ["tuned", "--iterations", "8", "-b", "1", "--profile", "-q"])
    text = (place / "tuned" / "report.html").read_text()
    for section in ("answer", "architecture", "selection", "training", "classes", "latency"):
        assert f'<section id="{section}"' in text
    # The path of this machine is in no file that the report leaves behind.
    kept = json.loads((place / "tuned" / "bench.json").read_text())
    assert {row["file"] for row in kept["rows"]} == {"dense.onnx", "model.onnx"}
    assert len(kept["distribution"][0]["quantiles_ms"]) == 101

    document = app.invoke("report", ["tuned", "--features", "layer1.0.conv1", "--images", "2"])
    assert document["missing"] == {}
    assert document["bytes"] < 3_000_000
