"""The paper's experiments as recipes: they validate, they dry-run, and their costs are exact."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from dcptool.cli import analyze_recipe, app, sections, study_run
from dcptool.errors import UsageError
from dcptool.pipeline import complexity, estimate, recipe, study
from dcptool.report import paper_table, structure_table
from dcptool.report.paper_table import Entry, Table

SCHEMA = sections.schema()
NAMES = sorted(name for name in recipe.shipped() if name.startswith("paper-"))
# Params and MACs by point, as an independent count has them (the paper's tables, to its digits).
EXACT = {
    "paper-cifar10-resnet56": {"dense": (855_770, 125_747_840), "DCP": (430_826, 63_226_496)},
    "paper-cifar10-mobilenet-v1": {
        "dense": (3_217_226, 213_084_160),
        "DCP": (2_249_139, 121_716_672),
    },
    "paper-cifar10-mobilenet-v2": {
        "dense": (2_236_682, 76_585_472),
        "DCP": (1_695_497, 56_182_272),
    },
    "paper-imagenet-mobilenet-v1": {
        "dense": (4_231_976, 568_740_352),
        "DCP": (2_106_760, 162_854_144),
    },
    "paper-imagenet-mobilenet-v2": {"DCP": (2_601_416, 171_498_944)},
    "paper-lfw-spherenet4": {
        "dense": (12_562_496, 164_613_632),
        "DCP (prune 50 %)": (5_894_432, 45_148_160),
        "DCP (prune 65 %)": (4_064_094, 24_162_104),
    },
}
# The same to the three digits of METHOD's table, where it gives no more.
ROUNDED = {
    "paper-study-lambda": {"dense": (855_770, 1.257e8), "1.0": (607_946, 9.126e7)},
    "paper-imagenet-resnet18-rates": {
        "dense": (11_689_512, 1.814e9),
        "0.3": (8_410_928, 1.316e9),
        "0.5": (6_194_856, 9.759e8),
        "0.7": (4_009_328, 6.490e8),
    },
    "paper-imagenet-resnet50-rates": {
        "dense": (25_557_032, 4.089e9),
        "0.3": (17_021_126, 2.630e9),
        "0.5": (12_381_864, 1.822e9),
        "0.7": (8_713_982, 1.185e9),
    },
    "paper-cifar10-vggnet": {
        "dense": (20_040_522, 3.981e8),
        "DCP-Adapt, the paper's structure": (1_284_006, 1.390e8),
    },
}


def costs(name: str) -> dict[str, tuple[float | None, float | None]]:
    found = recipe.read(name, SCHEMA)
    table = complexity.table(found, analyze_recipe.costs_of(found))
    return {
        entry.name: (entry.ours.get("params"), entry.ours.get("macs")) for entry in table.entries
    }


@pytest.mark.parametrize("name", EXACT)
def test_complexity_to_the_digit(name):
    found = costs(name)
    assert {point: found[point] for point in EXACT[name]} == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_complexity_of_the_larger_networks(name):
    found = costs(name)
    for point, (params, macs) in ROUNDED[name].items():
        assert found[point][0] == params
        assert float(f"{found[point][1]:.3e}") == macs
    assert found.get("DCP-Adapt", (None, None)) == (None, None)


def test_vggnet_to_the_papers_digits():
    table = costs("paper-cifar10-vggnet")
    params, macs = table["DCP"]
    assert (f"{params:.3e}", f"{macs:.3e}") == ("1.036e+07", "1.987e+08")
    dense, slim = table["dense"], table["DCP-Adapt, the paper's structure"]
    assert f"{dense[0] / slim[0]:.2f} {dense[1] / slim[1]:.2f}" == "15.61 2.86"


@pytest.mark.parametrize("name", NAMES)
def test_recipes_of_the_paper_dry_run(name, monkeypatch, capsys):
    monkeypatch.setattr(estimate, "measure", lambda _network: estimate.Speed(1e-3, 3e-3, 1e9))
    found = recipe.read(name, SCHEMA)
    checked = study_run.check(found)
    assert len(checked) == len(study.points_of(found)) >= 2
    assert "scale" in found.sections
    assert "paper" in found.sections
    # One network of each recipe is built, not one for each of 32 points.
    whole = study_run.check
    monkeypatch.setattr(study_run, "check", lambda one: whole(one)[:1])
    study_run.dry_run(found, Path("runs"), as_json=False)
    text = capsys.readouterr().out
    assert "in all: 1 points" in text
    # The data are not here, and the recipe tells where they must lie.
    assert "no images: " in text
    comment = found.text.partition("\n\n[")[0]
    assert any(
        word in comment
        for word in ("/CLASS/*.png", "/WNID/*.JPEG", "/NAME_0001.jpg", "photos/*.jpg")
    )


def test_every_experiment_has_its_recipe():
    assert len(NAMES) == 18
    counts = {name: len(study.points_of(recipe.read(name, SCHEMA))) for name in NAMES}
    assert counts["paper-cifar10-resnet56"] == counts["paper-cifar10-vggnet"] == 8
    assert counts["paper-study-lambda"] == 9
    assert counts["paper-study-blocks"] == 32


def test_single_blocks_are_cut_alone():
    found = recipe.read("paper-study-blocks", SCHEMA)
    cut = {point.name: set(kept or ()) for point, _, kept in analyze_recipe.costs_of(found)}
    assert cut["APoZ, res-3b"] == {"layer2.1.conv1"}
    assert {frozenset(groups) for groups in cut.values()} == {
        frozenset([f"layer{stage}.{block}.conv1"]) for stage in (1, 2, 3, 4) for block in (0, 1)
    }


def test_the_structure_of_dcp_adapt(tmp_path):
    found = recipe.read("paper-cifar10-vggnet", SCHEMA)
    paper, costed = found.sections["paper"], analyze_recipe.costs_of(found)[0][1]
    kept = costed.plan_of(list(paper["structure"].values()))
    layers = complexity.structure(paper, costed, kept)
    assert [(layer.ours, layer.quoted) for layer in layers] == [
        (count, count) for count in paper["structure"].values()
    ]
    structure_table.write("Title", layers, tmp_path)
    text = (tmp_path / "structure.md").read_text()
    assert "| conv3-4 | 256 | 123 | 51.95 | 123 | 51.95 |" in text
    assert "| conv1-1 | 3 | 3 | 0.00 |" in text
    assert (tmp_path / "structure.svg").read_text().count("<path") > 32
    assert len((tmp_path / "structure.csv").read_text().splitlines()) == 17
    with pytest.raises(UsageError, match="3 layers"):
        costed.plan_of([1, 2, 3])


def test_the_command(capsys, tmp_path):
    plot = tmp_path / "layers.svg"
    assert app.run(["analyze", "--recipe", "paper-cifar10-vggnet", "--plot", str(plot), "-q"]) == 0
    out = capsys.readouterr().out
    assert "conv4-8" in out
    assert "15.61x" in out
    assert plot.stat().st_size > 1000
    assert app.run(["analyze", "resnet18", "--recipe", "paper-study-lambda"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert app.run(["analyze"]) == 2
    assert "MODEL is missing" in capsys.readouterr().err


TABLE = [
    Entry("A", {"error_gap": 0.5, "params_ratio": 2.0}, {"error_gap": 0.31}, ("s", "1")),
    Entry("B|b", {"error_gap": -0.25}, {}, ("s", "2")),
    Entry("C", {}, {"error_gap": "+1.0"}, ("t", "1")),
]


def test_layouts():
    across = Table("T", ["params_ratio", "error_gap"], TABLE).cells()
    assert across == (
        ["", "A", "B|b", "C"],
        [
            ["#Param. reduction, ours", "2.00x", "-", "-"],
            ["Err. gap (%), ours", "+0.50", "-0.25", "-"],
            ["Err. gap (%), quoted", "+0.31", "-", "+1.0"],
        ],
    )
    header, lines = Table("T", ["error_gap"], TABLE, "down").cells()
    assert header == ["", "Err. gap (%), ours", "Err. gap (%), quoted"]
    assert lines[0] == ["A", "+0.50", "+0.31"]
    header, lines = Table("T", ["error_gap"], TABLE, "grid").cells()
    assert header == ["Err. gap (%)", "s, ours", "s, quoted", "t, ours", "t, quoted"]
    assert lines == [["1", "+0.50", "+0.31", "-", "+1.0"], ["2", "-0.25", "-", "-", "-"]]


def test_a_table_as_files(tmp_path):
    table = Table("T", ["error_gap"], TABLE, notes=["A note."])
    paper_table.write(table, tmp_path, ["[prune] rate = 0.5"])
    text = (tmp_path / "table.md").read_text()
    assert "|  | A | B\\|b | C |" in text
    assert "Quoted figures are the paper's, not measured here" in text
    assert "- [prune] rate = 0.5" in text
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert rows[0] == {"point": "A", "measure": "error_gap", "ours": "0.5", "quoted": "0.31"}
    assert len(rows) == 3
    assert "</svg>" in (tmp_path / "table.svg").read_text()
