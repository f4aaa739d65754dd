"""Options of a run on the disk: they come back as they were, and name nobody's home."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from dcptool.cli import recorded


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


def test_without_data_the_folder_of_the_run_is_taken(tmp_path: Path) -> None:
    nothing = dict.fromkeys((*recorded.NAMED, *recorded.FOLDERS))
    assert recorded.data_of(str(tmp_path), nothing) == nothing
    (tmp_path / "prune.json").write_text(
        json.dumps(recorded.plain({"data_dir": tmp_path / "old", "val_split": "test"}))
    )
    found = recorded.data_of(str(tmp_path), nothing)
    assert (found["data_dir"], found["val_split"]) == (tmp_path / "old", "test")
    (tmp_path / "finetune.json").write_text(
        json.dumps(recorded.plain({"data_dir": tmp_path / "new"}))
    )
    assert recorded.data_of(str(tmp_path), nothing)["data_dir"] == tmp_path / "new"
    named = {**nothing, "images": tmp_path / "others"}
    assert recorded.data_of(str(tmp_path), named) == named


def test_images_without_labels_are_for_those_who_need_none(tmp_path: Path) -> None:
    (tmp_path / "prune.json").write_text(json.dumps(recorded.plain({"images": tmp_path})))
    nothing = dict.fromkeys((*recorded.NAMED, *recorded.FOLDERS))
    assert recorded.data_of(str(tmp_path), nothing)["images"] == tmp_path
    assert recorded.data_of(str(tmp_path), nothing, labelled=True) == nothing


def test_data_sets_by_a_name_are_not_fetched_unasked(tmp_path: Path) -> None:
    (tmp_path / "prune.json").write_text(json.dumps({"dataset": "hfds/somebody/photos"}))
    nothing = dict.fromkeys((*recorded.NAMED, *recorded.FOLDERS))
    assert recorded.data_of(str(tmp_path), nothing) == nothing
