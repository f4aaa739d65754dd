"""Options of a run on the disk: they come back as they were, and name nobody's home."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from dcptool.cli import recorded
from dcptool.errors import InputError, UsageError


def again(folder: Path, options: dict[str, object]) -> dict[str, object]:
    (folder / "o.json").write_text(json.dumps(recorded.plain(options)))
    context = click.Context(click.Command("x"))
    empty = dict.fromkeys(options)
    return recorded.read(context, empty, folder, "o.json", frozenset(("data_dir",)))


def test_paths_below_home_are_kept_without_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "somebody"
    (home / "photos").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    options: dict[str, object] = {
        "data_dir": home / "photos",
        "dataset": f"hfds/{home}/photos",
        "target": f"{home}/runs/one",
        "teacher": f"/data{home}/x",
        "model": "zoo:resnet20",
        "rate": 0.5,
        "kept": None,
    }
    kept = recorded.plain(options)
    assert kept["data_dir"] == "~/photos"
    assert kept["dataset"] == "hfds/~/photos"
    assert kept["target"] == "~/runs/one"
    assert kept["teacher"] == f"/data{home}/x"
    assert again(tmp_path, options) == options


@pytest.mark.parametrize("home", ["/", "", None])
def test_without_a_home_paths_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    options: dict[str, object] = {"data_dir": tmp_path, "target": "runs/one"}
    assert again(tmp_path, options) == options


NOTHING: dict[str, object] = dict.fromkeys((*recorded.NAMED, *recorded.FOLDERS))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


def remember(folder: Path, name: str, **options: object) -> None:
    (folder / name).write_text(json.dumps(recorded.plain(options)))


def test_without_data_the_folder_of_the_run_is_taken(artifact: Path, tmp_path: Path) -> None:
    assert recorded.data_of(str(artifact), NOTHING) == NOTHING
    remember(artifact, "prune.json", data_dir=tmp_path / "old", val_split="test")
    for target in (artifact, artifact / "model.onnx"):
        found = recorded.data_of(str(target), NOTHING)
        assert (found["data_dir"], found["val_split"]) == (tmp_path / "old", "test")
    remember(artifact, "finetune.json", data_dir=tmp_path / "new")
    assert recorded.data_of(str(artifact), NOTHING)["data_dir"] == tmp_path / "new"
    named = {**NOTHING, "images": tmp_path / "others"}
    assert recorded.data_of(str(artifact), named) == named
    # A run that was stopped holds no artifact, whatever its name.
    (artifact / "manifest.json").unlink()
    assert recorded.data_of(str(artifact), NOTHING) == NOTHING
    assert recorded.data_of("x" * 300, NOTHING) == NOTHING


def test_what_is_typed_of_a_folder_stays(artifact: Path, tmp_path: Path) -> None:
    remember(artifact, "prune.json", data_dir=tmp_path / "old", val_fraction=0.1, val_split="test")
    found: dict[str, object] = {}

    @click.command()
    @click.option("--val-fraction", type=float, default=0.2)
    def command(**given: object) -> None:
        found.update(recorded.data_of(str(artifact), {**NOTHING, **given}))

    command.main(["--val-fraction", "0.5"], standalone_mode=False)
    assert (found["val_fraction"], found["val_split"]) == (0.5, "test")
    command.main([], standalone_mode=False)
    assert found["val_fraction"] == 0.1


def test_images_without_labels_are_for_those_who_need_none(artifact: Path, tmp_path: Path) -> None:
    remember(artifact, "prune.json", images=tmp_path / "old")
    assert recorded.data_of(str(artifact), NOTHING)["images"] == tmp_path / "old"
    with pytest.raises(UsageError, match="images without labels"):
        recorded.data_of(str(artifact), NOTHING, labelled=True)


def test_data_sets_by_a_name_are_not_fetched_unasked(artifact: Path, tmp_path: Path) -> None:
    remember(artifact, "prune.json", dataset="torch/cifar10", data_dir=tmp_path / "old")
    assert recorded.data_of(str(artifact), NOTHING) == NOTHING


def test_a_folder_that_was_moved_is_named(artifact: Path, tmp_path: Path) -> None:
    remember(artifact, "prune.json", data_dir=tmp_path / "gone")
    with pytest.raises(InputError, match="there is no folder") as caught:
        recorded.data_of(str(artifact), NOTHING)
    assert caught.value.try_ == "the same command with --data-dir"
