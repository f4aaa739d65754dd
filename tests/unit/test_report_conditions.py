"""What a page tells of its conditions: targets, dense weights, how many images, how slow calls."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dcptool.network import artifact
from dcptool.report import card, conditions, latency, page, record, sections


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def changed(run: Path, key: str, entries: dict[str, Any]) -> record.Record:
    """The run with other entries in its manifest."""
    path = run / artifact.MANIFEST
    manifest = json.loads(path.read_text())
    manifest[key] = entries
    path.write_text(json.dumps(manifest))
    return record.collect(run)


@pytest.mark.parametrize(
    ("pruned", "words"),
    [
        ({"rate": 0.5, "widths": "curves", "round_to": 16}, "rate 0.5, widths curves, round to 16"),
        ({"rate": 0.5, "rates": {"a.*": 0.2}, "round_to": 1}, "rate 0.5, rate 0.2 of a.*"),
        ({"epsilon": 0.05}, "epsilon 0.05"),
        ({"plan": {"a": 3}}, "plan"),
        ({"target_macs": 0.4, "round_to": 8}, "at most 40 % of the MACs, round to 8"),
        ({"target_macs": 2.1e9}, "at most 2.1 G MACs"),
        ({"target_params": 0.25}, "at most 25 % of the params"),
        ({"target_latency": 12.0}, "at most 12 ms"),
        (
            {"max_accuracy_drop": 1.5, "target_macs": 0.274, "round_to": 16},
            "accuracy drop of at most 1.5, round to 16",
        ),
        ({"target_macs": [], "round_to": "x"}, "at most [] MACs"),
    ],
)
def test_what_was_asked(run, pruned, words):
    found = changed(run, "lineage", {"prune": {"method": "dcp", "solver": "gram", **pruned}})
    assert ", ".join(conditions.asked(found)) == words
    line = f"pruned by {words}, method dcp, solver gram, without training in stages"
    assert line in sections.answer(found, None)["conditions"]
    assert line in card.text_of(found)
    document = page.compare([run, run])
    assert document["runs"][0]["budget"] == words


@pytest.mark.parametrize(
    ("kind", "asked", "wanted", "reached", "words"),
    [
        ("macs", 0.4, 4.1e8, 4.0e8, "at most 40 % of the MACs (reached 400 M MACs)"),
        ("params", 2e6, 2e6, 1.9e6, "at most 2 M params (reached 1.9 M params)"),
        ("latency", 0.7, 8.4, 8.25, "at most 70 % of the latency (reached 8.25 ms)"),
        ("latency", 0.7, 0.7, 0.68, "at most 0.7 ms (reached 0.68 ms)"),
    ],
)
def test_what_a_target_came_to(run, kind, asked, wanted, reached, words):
    target = {"kind": kind, "wanted": wanted, "reached": reached}
    record.keep_result(run, "prune", {"target": target}, "dcptool prune x")
    found = changed(run, "lineage", {"prune": {f"target_{kind}": asked, "target": "block"}})
    assert conditions.asked(found) == [words]


def test_where_the_dense_weights_come_from(run):
    found = changed(run, "lineage", {"dense": {"weights": "fitted on built-in digits"}})
    assert "dense weights: fitted on built-in digits" in conditions.lines(found)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"agreement": 0.0, "agreement_images": 1}, "on 0.0 % of 1 image"),
        ({"agreement": 99.0, "agreement_images": 100}, "on 99.0 % of 100 images"),
        ({"agreement": 99.0}, "on 99.0 % of images"),
    ],
)
def test_agreement_is_of_so_many_images(run, metrics, words):
    lines = conditions.lines(changed(run, "metrics", metrics))
    assert f"after pruning it agreed with the dense network {words}" in lines


SETTINGS = {
    "solver": "gram",
    "target": "block",
    "score": "rise",
    "lambda": 1.0,
    "samples": 512,
    "positions": 128,
    "seed": 0,
}


@pytest.mark.parametrize(
    ("method", "used"),
    [
        ("dcp", set(SETTINGS)),
        ("thinet", set(SETTINGS) - {"score", "lambda"}),
        ("apoz", {"samples", "seed"}),
        ("l1", {"seed"}),
        ("somebody's", set(SETTINGS)),
    ],
)
def test_settings_that_play_no_part_are_no_facts(method, used):
    assert set(conditions.facts({"method": method, **SETTINGS})) == {"method", *used}


def test_a_method_without_losses_has_no_curves(run):
    step = {"group": "g", "units": 4, "kept": [0, 1], "losses": [], "stopped": "count"}
    (run / "steps.jsonl").write_text(json.dumps(step))
    changed(run, "lineage", {"prune": {"rate": 0.5, "method": "l1", **SETTINGS}})
    page.write(run)
    text = (run / "report.html").read_text()
    for words in ("<summary>Curves", "the dot is", "loss there", "lambda", "Gradient norms"):
        assert words not in text
    assert "How many channels each group keeps." in text
    document = page.write(run, pictures=run / "out")
    assert not [path for path in document["pictures"] if Path(path).name.startswith("loss")]


def bench(*times: list[float]) -> dict[str, Any]:
    where = {"provider": "cpu", "batch_size": 8, "threads": 1}
    names = ("dense", "slim")
    return {
        "rows": [{"model": name, **where, "p50_ms": 1.0} for name in names],
        "distribution": [
            {"model": name, **where, "quantiles_ms": found}
            for name, found in zip(names, times, strict=False)
        ],
        "profile": [
            {"layer": "a", "kind": "Conv", "ms": {"dense": 3.0, "slim": 1.0}},
            {"layer": "b", "kind": "Conv", "ms": {"dense": 0.5, "slim": None}},
        ],
    }


def test_time_by_layer_has_a_condition_and_a_total():
    found = latency.section(bench())
    assert found is not None
    assert found["profile"]["condition"] == "cpu, batch 8, 1 thread"
    assert found["profile"]["total"] == {"ms": [3.5, 1.0], "saved": 2.5}


def test_slow_calls_are_told_instead_of_drawn():
    busy = [0.8] * 80 + [9.0] * 21
    found = latency.section(bench(busy, [0.5] * 101))
    assert found is not None
    chart = found["charts"][0]
    assert chart["name"] == "cpu, batch 8, 1 thread; slower than 2.4 ms: 21 % of dense"
    assert ">8</text>" not in chart["chart"]
    calm = latency.section(bench([0.8] * 101, [0.5] * 101))
    assert calm is not None
    assert calm["charts"][0]["name"] == "cpu, batch 8, 1 thread"
