"""Studies: the points of a recipe, each run once, and the figures that are taken from a run."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dcptool.cli import app, sections, study_run
from dcptool.errors import GateFailed, InputError, UsageError
from dcptool.pipeline import recipe, study
from dcptool.pipeline.study import Point

SCHEMA = sections.schema()
BASE = """# A study.
[model]
name = "zoo:resnet20"
[prune]
rate = 0.3
samples = 100
[finetune]
epochs = 40
decay_milestones = [16, 24]
sched = "step"
"""


def read(text: str) -> recipe.Recipe:
    return recipe.check("mine", text, recipe.parse(text, "x"), SCHEMA, where="x")


class Commands:
    """Stands for the commands: leaves a manifest, tells what it was called with."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.fails: set[str] = set()
        self.refuses: set[str] = set()

    def __call__(self, name: str, words: list[str]) -> dict[str, Any]:
        self.calls.append([name, *words])
        if self.fails & set(words):
            raise GateFailed("too bad")
        if self.refuses & set(words):
            raise InputError("cannot read it")
        place = next((w.partition("=")[2] for w in words if w.startswith("--output=")), None)
        if place:
            Path(place).mkdir(exist_ok=True)
            (Path(place) / "manifest.json").write_text(json.dumps(words))
        rate = next((float(w[7:]) for w in words if w.startswith("--rate=")), 0.0)
        return {
            "dense": {"params": 100, "macs": 1000, "top1": 90.0, "top5": 99.0},
            "slim": {"params": 50, "macs": round(1000 * (1 - rate)), "top1": 90 - 10 * rate},
            "before": {"top1": 0.0},
            "after": {"top1": 95 - 10 * rate, "top5": 98.0},
        }


def test_points_are_all_combinations():
    points = study.points_over({"prune.rate": [0.3, 0.5], "prune.method": ["dcp", "l1"]})
    assert [p.name for p in points] == [
        "rate 0.3, method dcp", "rate 0.3, method l1",
        "rate 0.5, method dcp", "rate 0.5, method l1",
    ]  # fmt: skip
    assert points[1].changes == {"prune.rate": 0.3, "prune.method": "l1"}
    assert [p.name for p in study.points_over({"prune.lambda": [0, Decimal("0.001")]})] == [
        "0",
        "0.001",
    ]
    for wrong in ({}, {"rate": [1]}, {"prune.rate": []}):
        with pytest.raises(UsageError):
            study.points_over(wrong)


def test_sweep_rows_and_values_make_a_grid():
    text = BASE + (
        '[sweep]\nover = "prune.rate"\nvalues = [0.3, 0.7]\nnames = { "0.7" = "most" }\n'
        '[[sweep.rows]]\nname = "WM+"\nset = { "prune.method" = "random" }\n'
        '[[sweep.rows]]\nname = "Adapt"\nset = { "prune.epsilon" = 0.01 }\n'
        'without = ["prune.rate"]\n'
    )
    points = study.points_of(read(text))
    assert [p.name for p in points] == [
        "WM+, 0.3", "WM+, most", "Adapt, 0.3", "Adapt, most",
    ]  # fmt: skip
    assert points[3].place == ("Adapt", "most")
    at = study.recipe_at(read(text), points[1])
    assert at.name == "WM-plus-most"
    assert (at.get("prune", "rate"), at.get("prune", "method")) == (Decimal("0.7"), "random")
    assert not at.has("sweep")
    assert points[2].without == ("prune.rate",)
    assert study.points_of(read(BASE)) == []


def test_points_take_keys_and_sections_out():
    point = Point("x", {"prune.epsilon": Decimal("0.01")}, ("prune.rate", "finetune"))
    at = study.recipe_at(read(BASE), point)
    assert at.words["prune"] == {"samples": ("--samples=100",), "epsilon": ("--epsilon=0.01",)}
    assert not at.has("finetune")
    # The recipe itself is as it was.
    assert read(BASE).get("prune", "rate") == Decimal("0.3")


def test_a_point_that_is_wrong_is_refused_before_anything_runs(tmp_path):
    commands = Commands()
    points = [Point("good", {}), Point("bad", {"prune.rate": 7})]
    with pytest.raises(UsageError, match="mine at bad"):
        study.run_study(read(BASE), points, tmp_path, invoke=commands)
    with pytest.raises(UsageError, match="two points"):
        study.run_study(read(BASE), [Point("a b"), Point("a-b")], tmp_path, invoke=commands)
    assert commands.calls == []


def test_every_point_runs_once_and_a_study_goes_on(tmp_path):
    commands = Commands()
    points = study.points_over({"prune.rate": [Decimal("0.3"), Decimal("0.5")]})
    heard: list[int] = []
    base = read(BASE)
    measured = study.run_study(
        base, points, tmp_path, invoke=commands, after=lambda all_: heard.append(len(all_))
    )
    assert [call[0] for call in commands.calls] == ["prune", "finetune"] * 2
    assert heard == [1, 2]
    assert [one.run for one in measured] == [tmp_path / "0.3-001", tmp_path / "0.5-001"]
    assert [one.macs for one in measured] == [700, 500]
    again = study.run_study(base, points, tmp_path, invoke=commands)
    assert len(commands.calls) == 4
    assert [one.figures["top1"] for one in again] == [one.figures["top1"] for one in measured]


def test_a_step_that_points_share_is_done_once(tmp_path):
    commands = Commands()
    points = study.points_over({"finetune.lr": [Decimal("0.1"), Decimal("0.2")]})
    study.run_study(read(BASE), points, tmp_path, invoke=commands)
    assert [call[0] for call in commands.calls] == ["prune", "finetune", "finetune"]


def test_a_gate_that_fails_is_kept_and_stops_nothing(tmp_path):
    commands = Commands()
    commands.fails = {"--rate=0.3"}
    points = study.points_over({"prune.rate": [Decimal("0.3"), Decimal("0.5")]})
    measured = study.run_study(read(BASE), points, tmp_path, invoke=commands)
    assert [one.failure is None for one in measured] == [False, True]
    assert measured[0].accuracy is None
    failure = study.failure_of(measured)
    assert failure is not None
    assert "1 of 2 points" in failure.message
    assert study.failure_of(measured[1:]) is None
    json.dumps([one.plain() for one in measured])


def test_a_later_point_that_cannot_be_done_stops_nothing_either(tmp_path):
    commands = Commands()
    commands.refuses = {"--rate=0.5"}
    points = study.points_over({"prune.rate": [Decimal(r) for r in ("0.3", "0.5", "0.7")]})
    measured = study.run_study(read(BASE), points, tmp_path, invoke=commands)
    assert [one.failure is None for one in measured] == [True, False, True]
    failure = study.failure_of(measured)
    assert isinstance(failure, InputError)
    assert failure.why == "0.5: cannot read it"
    # What the first cannot use is not tried with all the others.
    commands.calls.clear()
    with pytest.raises(InputError) as caught:
        study.run_study(read(BASE), points[1:], tmp_path, invoke=commands)
    assert caught.value.message == "0.5: cannot read it"
    assert len(commands.calls) == 1


def test_figures_of_a_run():
    steps = [
        {"name": "prune", "document": {
            "dense": {"params": 100, "macs": 1000, "top1": 93.0, "top5": 99.0},
            "slim": {"params": 50, "macs": 400, "top1": 88.0, "top5": 97.0}}},
        {"name": "finetune", "document": {"after": {"top1": 92.5, "top5": 98.5}}},
        {"name": "evaluate", "document": {"top1": 97.0, "top5": 99.9, "split": "train"}},
        {"name": "bench", "document": {
            "rows": [{"model": "dense", "p50_ms": 9.0}, {"model": "slim", "p50_ms": 4.5}],
            "speedup": [{"model": "slim", "baseline": "dense", "ratio": 2.0}]}},
    ]  # fmt: skip
    found = study.figures({"steps": steps, "seconds": 3.0})
    wanted = {
        "params_ratio": 2.0, "macs_ratio": 2.5, "error": 7.5, "error_gap": 0.5,
        "pruned_error": 12.0,
        "pruned_gap": 5.0, "train_error": 3.0, "top5_gap": 0.5, "latency_ms": 4.5, "speedup": 2.0,
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    steps[2]["document"]["split"] = "test"
    assert study.figures({"steps": steps})["error"] == 3.0
    assert study.figures({"steps": steps})["train_error"] is None


def test_scale_shortens_everything_by_one_number():
    words = read(BASE + "[scale]\nfactor = 0.1\n").words
    assert words["prune"]["samples"] == ("--samples=10",)
    assert words["prune"]["rate"] == ("--rate=0.3",)
    assert words["finetune"]["epochs"] == ("--epochs=4.0",)
    assert words["finetune"]["decay_milestones"] == ("--decay-milestones=1.6,2.4",)
    assert read(BASE + "[scale]\nfactor = 0.0001\n").words["prune"]["samples"] == ("--samples=1",)
    with pytest.raises(UsageError):
        read(BASE.replace("epochs = ", "epochs = nan # ") + "[scale]\nfactor = 0.5\n")
    for wrong in ("0", "2", "true", "'x'", "nan"):
        with pytest.raises(UsageError, match="1 fault"):
            read(f"{BASE}[scale]\nfactor = {wrong}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('over = "prune.rate"', "belong together"),
        ("values = [1]", "belong together"),
        ('names = { a = "b" }', "over and values, or rows"),
        ('over = "rate"\nvalues = [1]', "such as prune.lambda"),
        ('over = "prune.rate"\nvalues = []', "a list is wanted"),
        ("rows = [{ set = {} }]", "a row needs a name"),
        ('rows = [{ name = "a", sets = {} }]', "no sets"),
    ],
)
def test_sweeps_that_make_no_sense(text, words):
    with pytest.raises(UsageError) as caught:
        read(f"{BASE}[sweep]\n{text}\n")
    assert words in caught.value.why


def test_a_part_of_a_study():
    text = BASE + '[sweep]\nover = "prune.lambda"\nvalues = [0, 0.1, inf]\n'
    assert [p.name for p in study.points_of(read(text + 'only = ["inf", "0"]\n'))] == ["0", "inf"]
    with pytest.raises(UsageError, match="no point '2'"):
        study.points_of(read(text + 'only = ["2"]\n'))


def test_sections_and_keys_are_left_out(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(BASE)
    found = recipe.read(str(path), SCHEMA, ["prune.epsilon=0.1"], ["finetune", "prune.rate"])
    assert set(found.sections) == {"model", "prune"}
    assert found.words["prune"] == {"samples": ("--samples=100",), "epsilon": ("--epsilon=0.1",)}
    for wrong in ("baseline", "prune.lambda", ""):
        with pytest.raises(UsageError, match="no such thing"):
            recipe.read(str(path), SCHEMA, (), [wrong])


def test_lambda_may_be_infinite_and_nothing_else():
    text = BASE + '[sweep]\nover = "prune.lambda"\nvalues = [0, 0.5, inf]\n'
    found = read(text)
    checked = study_run.check(found)
    assert [params["prune"]["discrimination"] for _, params in checked] == [0, 0.5, float("inf")]
    assert json.loads(json.dumps(recipe.plain(found.sections), allow_nan=False))


PAPER = """[paper]
table = "Two rates"
layout = "down"
measures = ["params_ratio", "error_gap"]
baseline = { error = 6.2 }
[paper.quoted]
"0.5" = { error_gap = 0.31 }
"0.9" = { error_gap = 2.5 }
"""


def test_run_of_a_study_leaves_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(app, "invoke", Commands())
    sweep = '[sweep]\nover = "prune.rate"\nvalues = [0.3, 0.5]\n'
    Path("mine.toml").write_text(BASE + sweep + PAPER)
    assert app.run(["run", "./mine.toml", "-q"]) == 0
    out = capsys.readouterr().out
    assert "Error of the dense network: 10.00 % ours, 6.2 % quoted." in out
    text = Path("runs/mine/table.md").read_text()
    assert "| 0.3 | 2.00x | -5.00 | - |" in text
    assert "| 0.5 | 2.00x | -5.00 | +0.31 |" in text
    # What only the paper has stands there, too, and the conditions below.
    assert "| 0.9 | - | - | +2.50 |" in text
    assert "- [prune] rate = 0.3, samples = 100" in text
    assert Path("runs/mine/table.csv").is_file()
    assert Path("runs/mine/table.svg").is_file()
    assert app.run(["run", "./mine.toml", "-q", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [point["macs"] for point in document["points"]] == [700, 500]
    assert app.run(["run", "./mine.toml", "-q", "--set", 'sweep.only=["0.5"]']) == 0
    assert "0.9" not in capsys.readouterr().out


def test_run_of_one_column_leaves_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = Commands()
    monkeypatch.setattr(app, "invoke", commands)
    monkeypatch.setattr("dcptool.report.page.after", lambda *_: None)
    text = BASE + PAPER.replace('"down"', '"down"\ncolumn = "0.5"')
    Path("mine.toml").write_text(text)
    assert app.run(["run", "./mine.toml", "-q"]) == 0
    assert "| 0.5 | 2.00x | -5.00 | +0.31 |" in Path("runs/mine-001/table.md").read_text()
