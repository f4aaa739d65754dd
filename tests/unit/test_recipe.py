"""Recipes: what is read, what is refused, and that all faults come at once with their lines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dcptool.cli import app, run_command, sections, study_run
from dcptool.errors import InputError, UsageError
from dcptool.pipeline import recipe, run
from dcptool.selection.methods import METHODS

SCHEMA = sections.schema()
GOOD = '[model]\nname = "zoo:resnet20"\n[prune]\nrate = 0.3\n'


def check(text: str, *changes: str) -> recipe.Recipe:
    tables = recipe.parse(text, "test.toml")
    for change in changes:
        recipe._lay_over(tables, recipe._change(change))
    return recipe.check("test", text, tables, SCHEMA, where="test.toml")


def faults(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        check(text)
    return caught.value.why


def words(text: str, step: str = "prune") -> list[str]:
    found = check(text)
    one = next(s for s in run.STEPS if s.name == step)
    return run.words_of(found, one, "T", on_artifact=False)


def test_keys_become_words_of_the_command():
    text = """
[model]
name = "zoo:resnet20"
pretrained = false
seed = 3
[data]
data_dir = "photos"
mean = [0.1, 0.2, 0.3]
[prune]
rate = 0.30
training = false
keep = ["layer1.*", "layer2.0.*"]
lambda = 0.5
[finetune]
sched = "step"
kd = false
decay_milestones = [1.5, 2]
epochs = 1e-1
"""
    assert words(text) == [
        "T", "--no-pretrained", "--seed=3", "--data-dir=photos", "--mean", "0.1", "0.2", "0.3",
        "--rate=0.30", "--no-training", "--keep=layer1.*", "--keep=layer2.0.*", "--lambda=0.5",
    ]  # fmt: skip
    assert words(text, "finetune")[-3:] == ["--no-kd", "--decay-milestones=1.5,2", "--epochs=0.1"]
    # The commands themselves understand them.
    assert run_command.check(check(text))["finetune"]["decay_milestones"] == "1.5,2"


def test_later_steps_take_no_weights_but_the_seed():
    found = check('[model]\nname = "x"\nseed = 1\nnum_classes = 3\ncheckpoint = "w"\n[finetune]\n')
    step = next(s for s in run.STEPS if s.name == "finetune")
    assert run.words_of(found, step, "runs/a", on_artifact=True) == ["runs/a", "--seed=1"]
    assert "--checkpoint=w" in run.words_of(found, step, "x", on_artifact=False)


def test_all_faults_at_once_with_lines_and_suggestions():
    why = faults(
        '[modle]\nname = "x"\n[prune]\nrat = 0.3\npositions = "many"\nmethod = "best"\n'
        "[finetune]\nlr = 0\noutput = 'x'\n[bench]\nbatch_size = [1, true]\n"
    )
    assert why.splitlines() == [
        "line 1: there is no section [modle]; did you mean model?",
        "line 4: there is no key prune.rat; did you mean rate?",
        "line 5: prune.positions: a whole number is wanted, not 'many'",
        "line 6: prune.method: 'best' is not one of " + ", ".join(f"{name!r}" for name in METHODS),
        "line 8: finetune.lr: 0.0 is not in the range x>0",
        "line 9: finetune.output: `dcptool run` chooses the folder",
        "line 11: bench.batch_size: a whole number is wanted, not true",
        "model.name is missing",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("positions = true", "a whole number is wanted, not true"),
        ("positions = 1.5", "a whole number is wanted, not 1.5"),
        ("samples = 1000000000000000000000000000000", "out of range"),
        ("samples = 0", "neither a count"),
        ("epsilon = nan", "out of range"),
        ("epsilon = inf", "out of range"),
        ("epsilon = 1e999", "out of range"),
        ("epsilon = 1979-05-27", "a number is wanted"),
        ("training = 0", "true or false is wanted, not 0"),
        ("plan = 5", "a text is wanted, not 5"),
        ("mean = [0.5, 0.5]", "a list of 3 is wanted"),
        ("method = ['dcp']", "a text is wanted"),
    ],
)
def test_wrong_types_and_values(line, words):
    why = faults(f'[model]\nname = "x"\n[prune]\n{line}\n')
    assert why.startswith(f"line 4: prune.{line.partition(' ')[0]}: ")
    assert words in why


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 30000,
        "a = " + "[" * 200 + "]" * 200,
        "a." * 30000 + "a = 1",
        "[" + "a." * 30000 + "a]",
        "a = {" + "b." * 20000 + "b = 1}",
        "x = " + "9" * 5000,
        "x = 1e" + "9" * 40,
        "name = ",
        "a = 1\na = 2",
        "a = \x00",
    ],
)
def test_text_that_is_no_recipe_is_refused_at_once(text):
    began = time.monotonic()
    with pytest.raises(UsageError) as caught:
        check(text)
    assert time.monotonic() - began < 1
    assert caught.value.code == 2


def test_brackets_in_strings_and_comments_are_no_depth():
    text = f'# {"[" * 50}\n{GOOD}keep = "{"[" * 50}"\n'
    assert check(text).get("prune", "keep") == "[" * 50


def test_encodings(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert recipe.read(str(path), SCHEMA).has("prune")
    path.write_bytes(GOOD.encode("utf-16"))
    with pytest.raises(UsageError, match="cannot read recipe") as caught:
        recipe.read(str(path), SCHEMA)
    assert "encoding" in caught.value.why
    path.write_bytes(b"#" * (recipe.SIZE_LIMIT + 1))
    with pytest.raises(InputError, match="cannot read recipe"):
        recipe.read(str(path), SCHEMA)


def test_a_file_that_is_not_there_and_a_name_that_is_misspelt(tmp_path):
    with pytest.raises(InputError, match="cannot read recipe"):
        recipe.read(str(tmp_path / "none.toml"), SCHEMA)
    with pytest.raises(InputError) as caught:
        recipe.read("quickstart.toml", SCHEMA)
    assert "dcptool run quickstart" in caught.value.try_
    with pytest.raises(UsageError, match="there is no recipe 'quikstart'") as misspelt:
        recipe.read("quikstart", SCHEMA)
    assert misspelt.value.try_ == "dcptool run quickstart"


@pytest.mark.parametrize(
    ("change", "section", "key", "value"),
    [
        ("prune.rate=0.5", "prune", "rate", 0.5),
        ("prune.training=false", "prune", "training", False),
        ("data.data_dir=/some where/photos", "data", "data_dir", "/some where/photos"),
        ("bench.batch_size=[1, 2]", "bench", "batch_size", [1, 2]),
        ("model.name=resnet50", "model", "name", "resnet50"),
    ],
)
def test_set_changes_one_value(change, section, key, value):
    assert recipe.plain(check(GOOD, change).get(section, key)) == value


@pytest.mark.parametrize("change", ["rate", "rate=0.5", "prune.=1", "=", "a" + ".a" * 99 + "=1"])
def test_set_without_a_key_is_refused(change):
    with pytest.raises(UsageError):
        check(GOOD, change)


def test_digits_stay_as_they_were_written():
    assert "--rate=0.7000000000000000001" in words(GOOD.replace("0.3", "0.7000000000000000001"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[model]\nname = "x"\n', "it has no step"),
        (f"{GOOD}epsilon = 0.1\n", "[prune]: --rate and --epsilon exclude each other"),
        (GOOD.replace("rate = 0.3", ""), "[prune]: one of --rate, --epsilon, --target-macs"),
        (f"{GOOD}[finetune]\nsteps = 1\nepochs = 1\n", "[finetune]: --epochs and --steps say"),
        (f"{GOOD}[gates]\nmin_speedup = 2\n", "gates.min_speedup needs a section [bench]"),
        (f'{GOOD}[data]\nimages = "x"\n[gates]\nmax_accuracy_drop = 1\n', "needs labels"),
    ],
)
def test_combinations_that_cannot_work(text, words):
    with pytest.raises(UsageError) as caught:
        run_command.check(check(text))
    assert words in caught.value.why


def test_a_model_that_nobody_has_is_one_fault_of_many():
    text = GOOD.replace("zoo:resnet20", "zoo:resnet2")
    assert text != GOOD
    with pytest.raises(UsageError, match="there is no model 'zoo:resnet2'"):
        run_command.check(check(text))
    with pytest.raises(UsageError) as caught:
        run_command.check(check(f"{text}epsilon = 0.1\n"))
    assert "exclude each other\nmodel.name: there is no model" in caught.value.why


@pytest.mark.parametrize(
    ("gates", "values", "budget", "advice"),
    [
        ("min_speedup = 2", {"speedup": 1}, "rate = 0.3", "a larger prune.rate: "),
        ("min_speedup = 2", {"speedup": 1}, "target_macs = 0.3", "a smaller prune.target_macs: "),
        ("max_accuracy_drop = 1", {"top1": 80}, "rate = 0.3", "a smaller prune.rate, or more fine"),
        (
            "max_accuracy_drop = 1\nmin_speedup = 2",
            {"top1": 80, "speedup": 1},
            "rate = 0.3",
            "a larger prune.rate with more finetune.epochs",
        ),
    ],
)
def test_what_may_help_a_gate_that_failed(gates, values, budget, advice):
    found = check(f"{GOOD.replace('rate = 0.3', budget)}[bench]\n[gates]\n{gates}\n")
    documents = {
        "prune": {"dense": {"top1": 90}, "slim": {"top1": values.get("top1", 90)}},
        "bench": {"speedup": [{"ratio": values.get("speedup", 9)}]},
    }
    failure = run._failure(run.verdicts(found, documents), Path("runs/x"), found)
    assert failure is not None
    assert failure.try_.startswith(advice)


def test_rates_of_single_groups_become_options():
    text = f'{GOOD}[prune.rates]\n"layer1.*" = 0.10\n"layer2.0.conv1" = 0\n'
    assert words(text)[-2:] == ["--rate-of=layer1.*=0.10", "--rate-of=layer2.0.conv1=0"]
    run_command.check(check(text))
    why = faults(f'{GOOD}[prune.rates]\n"layer1.*" = true\n')
    assert "prune.rates: the rate of layer1.* must be a number, not true" in why


def test_every_option_is_a_key_or_refused_with_a_reason():
    for name in ("analyze", "prune", "finetune", "export", "evaluate", "bench"):
        section = SCHEMA[name]
        left = set(sections.keys_of(name)) - set(section.keys) - {sections.PER_GROUP}
        assert left == set(section.refused)


@pytest.mark.parametrize("name", list(recipe.shipped()))
def test_shipped_recipes_are_right_and_say_what_they_are(name):
    found = recipe.read(name, SCHEMA)
    if found.has("sweep"):
        assert study_run.check(found)
    else:
        run_command.check(found)
    comment = found.text.partition("\n\n[")[0]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert f"\n# Command  dcptool run {name}" in comment
    for word in ("# Table  ", "# Job  "):
        if word in comment:
            break
    else:
        pytest.fail("neither the table it follows nor its job")
    assert "\n# Needs  " in comment
    assert "measured" in comment or "counted by us" in comment
    assert 20 < len(found.purpose) <= 100


def test_shipped_recipes_are_those_that_were_promised():
    assert set(recipe.shipped()) >= {
        "quickstart",
        "resnet50-imagenet-30",
        "resnet50-imagenet-50",
        "resnet50-imagenet-70",
        "mobilenetv2-imagenet",
        "resnet56-cifar10",
        "finetune-your-folder",
        "fast-cpu",
    }


def test_recipe_commands(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert app.run(["recipe", "list"]) == 0
    assert "quickstart" in capsys.readouterr().out
    assert app.run(["recipe", "show", "quickstart"]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip("\n") == recipe.shipped()["quickstart"].read_text().rstrip("\n")
    assert app.run(["recipe", "copy", "quickstart", "mine.toml"]) == 0
    assert "dcptool run ./mine.toml" in capsys.readouterr().out
    assert Path("mine.toml").read_text() == recipe.shipped()["quickstart"].read_text()
    assert app.run(["recipe", "copy", "quickstart", "mine.toml"]) == 2
    assert "--force" in capsys.readouterr().err
    assert app.run(["recipe", "copy", "quickstart", "mine.toml", "--force"]) == 0
    assert app.run(["recipe", "validate", "mine.toml", "quickstart"]) == 0
    assert "analyze -> prune -> finetune -> export -> bench" in capsys.readouterr().out
    assert app.run(["recipe", "validate", "mine.toml", "--set", "prune.ratte=1"]) == 2
    assert "did you mean rate?" in capsys.readouterr().err
