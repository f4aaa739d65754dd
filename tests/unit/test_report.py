"""The report: every part, nothing unescaped, and a page whatever the files hold."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from dcptool import files
from dcptool.cli import app, recorded
from dcptool.errors import InputError, UsageError
from dcptool.network import artifact, models
from dcptool.pipeline import run as recipes
from dcptool.report import architecture, card, features, page, record, sections

SECTIONS = ["answer", "architecture", "selection", "features", "training", "classes", "latency"]


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / whole_run.name))


def test_all_parts(run):
    document = app.invoke("report", [str(run), "-q"])
    assert document["command"] == "report"
    assert document["sections"] == SECTIONS
    assert document["missing"] == {}
    text = (run / "report.html").read_text()
    assert document["file"] == str(run / "report.html")
    assert document["bytes"] == len(text.encode())
    assert [name for name in SECTIONS if f'<section id="{name}"' not in text] == []
    # The answer, with its ratios and its lights.
    for words in (
        "92.25 %",
        "91.50 %",
        "-0.75",
        "1.97x fewer",
        "2.00x faster",
        "● holds",
        "▲ fails",
    ):
        assert words in text
    assert "the loss no longer fell by more than epsilon" in text


def test_names_cannot_do_harm(run):
    page.write(run)
    text = (run / "report.html").read_text()
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "<b>run" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert len(re.findall(r"<script", text)) == 1


def test_page_is_valid_and_loads_nothing(run):
    html5lib = pytest.importorskip("html5lib")
    page.write(run)
    text = (run / "report.html").read_text()
    tree = html5lib.HTMLParser(strict=True).parse(text)
    ids = [node.get("id") for node in tree.iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    for node in tree.iter():
        for key in ("src", "href", "{http://www.w3.org/1999/xlink}href"):
            assert (node.get(key) or "#").startswith(("#", "data:"))
    assert "url(" not in text
    assert "@import" not in text


def test_without_records_lines_say_what_fills_them(run):
    for name in ("steps.jsonl", "metrics.jsonl", "bench.json", "classes.json", "features.json"):
        (run / name).unlink()
    document = page.write(run)
    assert document["sections"] == ["answer", "architecture"]
    text = (run / "report.html").read_text()
    for how in ("dcptool bench --profile", "dcptool finetune", "dcptool report --features"):
        assert how in text


@pytest.mark.parametrize(
    "content",
    [
        "nonsense",
        "[]",
        '{"rows": 3, "speedup": [1], "gates": {}, "machine": [], "profile": [{"ms": 1}]}',
        '{"rows": [{"model": [1], "p50_ms": "x"}], "speedup": [{"model": {}, "ratio": []}]}',
        '{"names": [1], "dense": ["x"], "slim": [null], "typed": 7}',
        '{"images": [{"kept": "http://x/", "removed": "", "input": ""}], "layer": 1, "kept": 0,'
        ' "removed": 0, "shown_kept": 0, "shown_removed": 0}',
        '{"dense": [], "agreement": 4, "gates": [{"ok": "yes"}], "command": "prune"}',
    ],
)
@pytest.mark.parametrize("name", ["bench.json", "classes.json", "features.json", "result.json"])
def test_a_page_whatever_the_files_hold(run, name, content):
    (run / name).write_text(content)
    found = page.contexts(record.collect(run), None)
    text = page.render("template.html", record=record.collect(run), found=found, missing={})
    assert "http://x/" not in text


def test_a_page_whatever_the_steps_hold(run):
    lines = ["[]", "{}", '{"group": "g", "units": 4, "kept": 3}', '{"units": 2, "kept": []}', "{"]
    (run / "steps.jsonl").write_text("\n".join(lines))
    found = sections.selection(record.collect(run))
    assert found is not None
    assert [group["kept"] for group in found["groups"]] == [0]


def test_curves_of_the_closed_form_end_with_all_units(run):
    step = {"group": "g", "units": 8, "kept": [0, 1, 2, 3], "losses": [4.0, 3.0, 2.0, 1.0, 0.5]}
    (run / "steps.jsonl").write_text(json.dumps(step | {"stopped": "count"}))
    found = sections.selection(record.collect(run))
    assert found is not None
    assert found["groups"][0]["loss"] == 4.0


def test_layers_before_and_after(run):
    found = architecture.read(record.collect(run))
    assert found is not None
    layers = {layer.name: layer for layer in found.layers}
    assert list(layers)[:2] == ["conv1", "layer1.0.conv1"]
    assert (layers["layer1.0.conv1"].before, layers["layer1.0.conv1"].after) == (16, 8)
    assert layers["layer1.0.conv1"].tip == "layer1.0.conv1: 16 to 8 channels, 50 % removed; pruned"
    assert layers["layer1.0.conv2"].status == "coupled"
    assert layers["layer1.0.conv2"].reason
    assert found.params == 272474
    assert [band.first for band in found.bands] == sorted({band.first for band in found.bands})
    assert found.bands[0].first == 0
    assert found.bands[-1].last == len(found.layers) - 1
    assert "head" in found.bands[0].end


def finetuned(run: Path, name: str = "tuned") -> Path:
    """An artifact that came out of `run`."""
    folder = run.parent / name
    folder.mkdir()
    manifest = json.loads((run / artifact.MANIFEST).read_text())
    sha = files.sha256((run / artifact.MANIFEST).read_bytes())
    manifest["lineage"]["parent"] = {"name": run.name, "manifest_sha256": sha}
    manifest["cost"] = {"params": 138506, "macs": 20759168}
    manifest["metrics"] = {"source": "x", "top1": 93.0}
    (folder / artifact.MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_what_an_ancestor_recorded_is_shown(run):
    found = record.collect(finetuned(run))
    assert len(found.parts) == 2
    assert found.steps
    assert sections.accuracies(found) == (92.25, 93.0)
    assert sections.costs(found, None)["dense"] == {"params": 272474, "macs": 40813184}


def test_another_artifact_of_that_name_is_no_ancestor(run):
    folder = finetuned(run)
    path = run / artifact.MANIFEST
    path.write_text(path.read_text() + " ")
    assert len(record.collect(folder).parts) == 1


def test_a_run_of_a_recipe(run, tmp_path):
    folder = tmp_path / "recipe-001"
    folder.mkdir()
    run.rename(folder / "prune")
    exported = {"file": "runs/my run/prune/model.onnx"}
    steps = {"evaluate": {"document": {"top1": 90.0}}, "bad": 3, "export": {"document": exported}}
    settings = {"export": {"opset": 17, "softmax": True, "fp16": False}}
    state = {"steps": steps, "identity": {"settings": settings}}
    (folder / "run.json").write_text(json.dumps(state))
    gates = [{"name": "max_accuracy_drop", "limit": 1.0, "value": 0.5, "ok": True}]
    record.keep_result(folder, "run", {"gates": gates}, "dcptool run x")
    found = record.collect(folder)
    assert sections.accuracies(found) == (92.25, 90.0)
    assert "max_accuracy_drop" in {gate["name"] for gate in found.gates}
    assert [line.split()[1] for line in found.commands] == ["prune", "export", "bench", "run"]
    wanted = "dcptool export 'runs/my run/prune' --onnx 'runs/my run/prune/model.onnx'"
    assert found.commands[1] == f"{wanted} --opset 17 --softmax"
    assert page.write(folder)["file"] == str(folder / "report.html")


def test_no_run(tmp_path):
    with pytest.raises(InputError, match="is no run"):
        record.collect(tmp_path)


def test_a_failure_is_only_told(tmp_path, capsys):
    page.after(tmp_path)
    assert "warning: no report written" in capsys.readouterr().err
    page.after(tmp_path / "gone", "bench", {}, "dcptool bench")
    assert "warning: no report written" in capsys.readouterr().err


def test_a_new_result_ends_what_was_measured_of_the_old_one(run):
    record.keep_result(run, "prune", {"slim": {"top1": None}}, "dcptool prune x")
    for name in ("bench.json", "features.json", "classes.json"):
        assert not (run / name).exists()


def test_classes_of_a_new_prune_with_labels_stay(run):
    record.keep_result(run, "prune", {"slim": {"top1": 90.0}}, "dcptool prune x")
    assert (run / "classes.json").exists()


def test_reports_are_no_result_of_a_step(run):
    page.write(run)
    step = next(step for step in recipes.STEPS if step.name == "prune")
    names = {path.name for path in recipes._files(step, run, {})}
    assert {"manifest.json", "steps.jsonl", "classes.json"} <= names
    assert not names & {"report.html", "bench.json", "features.json"}


def test_classes_that_gained_and_lost(run):
    found = sections.classes(record.collect(run))
    assert found is not None
    assert [row["change"] for row in found["lost"]] == [-5.0, -4.0, -3.0, -2.0, -1.0]
    assert [row["change"] for row in found["gained"]] == [4.0, 3.0, 2.0, 1.0]


def test_dense_accuracy_of_classes_comes_from_the_run_before(run, tmp_path):
    names = json.loads((run / "classes.json").read_text())["names"]
    record.keep_classes(tmp_path, names, [1.0] * 10, before=run)
    assert json.loads((tmp_path / "classes.json").read_text())["dense"] == [95.0] * 10
    record.keep_classes(tmp_path, ["other"], [1.0], before=run)
    assert json.loads((tmp_path / "classes.json").read_text())["dense"] is None


def test_pareto():
    dots = [(3.0, 90.0), (1.0, 80.0), (2.0, 79.0), (2.0, 85.0), (4.0, 90.0)]
    assert page.pareto(dots) == [(1.0, 80.0), (2.0, 85.0), (3.0, 90.0)]


def test_several_runs(run):
    html5lib = pytest.importorskip("html5lib")
    other = run.parent / "other"
    shutil.copytree(run, other)
    document = app.invoke("report", [str(run), str(other), "-q"])
    assert document["sections"] == ["comparison"]
    assert [row["name"] for row in document["runs"]] == [run.name, "other"]
    assert (other / "report.html").is_file()
    text = (run.parent / "comparison.html").read_text()
    html5lib.HTMLParser(strict=True).parse(text)
    assert 'href="a%20%3Cb%3Erun/report.html"' in text
    assert "<b>run" not in text
    assert 'class="front"' in text
    assert "<td>cpu, batch 1, 2 threads</td>" in text
    assert document["runs"][0]["budget"] == "rate 0.5"
    assert "dense zoo:resnet20" in text


def test_options_that_do_not_fit_together(run):
    with pytest.raises(UsageError, match="--images needs --features"):
        app.invoke("report", [str(run), "--images", "3"])
    with pytest.raises(UsageError, match="for one run"):
        app.invoke("report", [str(run), str(run), "--card"])


def pixels(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text.partition(",")[2])))


def test_feature_maps(run):
    found = json.loads((run / "features.json").read_text())
    assert (found["layer"], found["kept"], found["removed"]) == ("layer1.0.conv1", 8, 8)
    assert len(found["images"]) == 2
    # Two rows of four maps of 32 pixels, with gaps of two.
    assert pixels(found["images"][0]["kept"]).size == (4 * 34 - 2, 2 * 34 - 2)
    assert (
        pixels(found["images"][0]["kept"]).tobytes()
        != pixels(found["images"][0]["removed"]).tobytes()
    )


def test_feature_maps_of_a_folder(run, tmp_path):
    place = tmp_path / "photos"
    place.mkdir()
    for i in range(5):
        Image.new("RGB", (40, 40), (40 * i, 20, 90)).save(place / f"{i}.png")
    features.keep_features(
        record.collect(run), "layer2.0.conv1", *features.parse_images(str(place))
    )
    assert json.loads((run / "features.json").read_text())["layer"] == "layer2.0.conv1"


def test_layers_without_removed_channels_have_no_maps(run):
    with pytest.raises(UsageError, match="no channel of conv1 was removed") as err:
        features.keep_features(record.collect(run), "conv1", None, 2)
    assert err.value.try_ == "--features layer1.0.conv1"


@pytest.mark.parametrize("text", ["0", "17"])
def test_number_of_images(text):
    with pytest.raises(UsageError, match="1 to 16"):
        features.parse_images(text)


def test_card(run, hostile):
    yaml = pytest.importorskip("yaml")
    document = app.invoke("report", [str(run), "--card", "-q"])
    text = Path(document["card"]).read_text()
    _, head, body = text.split("---\n", 2)
    found = yaml.safe_load(head)
    assert found["pipeline_tag"] == "image-classification"
    result = found["model-index"][0]["results"][0]
    assert result["dataset"]["name"] == hostile
    assert result["metrics"] == [{"type": "accuracy", "value": 0.915}]
    assert "| top-1 | 92.25 % | 91.50 % | -0.75 |" in body
    assert "<b>" not in body
    app.invoke("report", [str(run), "--card", "-q"])


def test_a_card_of_somebody_else_stays(run):
    (run / "README.md").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        card.write_card(record.collect(run))
    assert (run / "README.md").read_text() == "mine"


def test_pictures_stand_alone(run, tmp_path):
    document = app.invoke("report", [str(run), "--pictures", str(tmp_path / "out"), "-q"])
    names = {Path(path).name for path in document["pictures"]}
    assert {"architecture.svg", "loss-layer1.0.conv1.svg", "latency-1.svg"} <= names
    assert "norms-layer1.0.conv1.svg" in names
    drawn = (tmp_path / "out" / "architecture.svg").read_text()
    for words in ("dense", "slim", "not open to pruning", "removed", "head of a stage"):
        assert f">{words}</text>" in drawn
    for path in (tmp_path / "out").iterdir():
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_command_as_typed(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    words = [
        "dcptool",
        "prune",
        "--data-dir=/home/ann/my photos",
        "/home/ann/x",
        "a b",
        "/home/anna",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert recorded.typed() == "dcptool prune --data-dir ~/'my photos' ~/x 'a b' /home/anna"


def test_accuracies_of_other_images_are_not_compared():
    pruned = {"dense": {"top1": 99.0}, "slim": {"top1": 98.0}, "split": "test"}
    for split, wanted in (("test", 97.0), ("val", None), ("train", None)):
        documents = {"prune": pruned, "evaluate": {"top1": 97.0, "split": split}}
        assert record.evaluated(documents).get("top1") == wanted
    assert record.evaluated({"evaluate": {"top1": 97.0, "split": "val"}})


def test_what_was_only_trained_is_not_called_pruned(tmp_path):
    network = models.load("zoo:resnet20", pretrained=False, num_classes=10)
    metrics = {"source": "photos", "images": "test", "top1": 60.0, "top1_before": 8.5}
    cost = {"params": 272474, "macs": 40813184}
    artifact.save(network, tmp_path / "run", cost=cost, metrics=metrics, lineage={"finetune": {}})
    found = record.collect(tmp_path / "run")
    text = card.text_of(found)
    assert "zoo:resnet20 trained by dcptool" in text
    assert "| top-1 | 8.50 % | 60.00 % | +51.50 |" in text
    assert "channel-pruning" not in text
    page.write(tmp_path / "run")
    shown = (tmp_path / "run" / "report.html").read_text()
    assert "zoo:resnet20: run</h1>" in shown
    assert ">before</th>" in shown
