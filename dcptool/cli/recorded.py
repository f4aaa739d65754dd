"""Options of a run on the disk, so that `--resume` needs nothing but the folder.

What is typed beside --resume is laid over what was recorded; whether it may change is for the
run's own state to say. A run folder may be handed on, so paths below the user's home folder
are kept as `~/...`.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dcptool.cli import app
from dcptool.errors import InputError, UsageError

# What names images, and what of a folder of images a run remembers; data sets by a name are not
# taken over, as these may be fetched.
NAMED = ("data_dir", "dataset", "images")
FOLDERS = ("data_dir", "images", "train_split", "val_split", "val_fraction")
PATHS = frozenset(("data_dir", "images"))
# Where results go and how much is said may change when a run is resumed.
FREE = frozenset(("resume", "output", "runs_dir", "as_json", "quiet", "verbose", "debug"))


def read(
    ctx: click.Context, options: dict[str, Any], run: Path, name: str, paths: frozenset[str]
) -> dict[str, Any]:
    """The options a run was started with; those typed now are laid over them."""
    from dcptool import files

    if not (run / name).is_file():
        raise InputError(
            f"cannot resume {run}",
            why=f"there is no {name} in it, so it is no such run, or never began",
            try_="start it again without --resume",
        )
    saved: dict[str, Any] = files.read_json(run / name, what="the options of the run")
    result = dict(options)
    for group, values in _groups(options).items():
        for key, value in values.items():
            source = ctx.get_parameter_source(key)
            typed = source not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, None)
            old = saved.get(key, value)
            new = value if typed or key in FREE else _typed(old, key, paths)
            if group:
                result[group] = {**result[group], key: new}
            else:
                result[key] = new
    return result


def data_of(target: str, data: dict[str, Any], *, labelled: bool = False) -> dict[str, Any]:
    """The data options; where no data is named, the folder that an artifact was made with.

    What was typed stays. A folder without labels is no use to who has asked for a `labelled` one.
    """
    from dcptool import console, files

    run = Path(target).parent if target.endswith(".onnx") else Path(target)
    is_run = os.path.isfile(run / "manifest.json")  # noqa: PTH113 - never raises
    if not is_run or any(data.get(key) for key in NAMED):
        return data
    unlabelled = False
    for path in (run / "finetune.json", run / "prune.json"):
        if not path.is_file():
            continue
        saved = files.read_json(path, what="the options of the run")
        if saved.get("dataset"):
            return data
        found = {key: _typed(saved[key], key, PATHS) for key in FOLDERS if saved.get(key)}
        place = found.get("data_dir") or (not labelled and found.get("images"))
        if not place:
            unlabelled |= "images" in found
            continue
        if not place.is_dir():
            raise InputError(
                f"there is no folder {place}",
                why=f"no data is named, and {run} was made with this",
                try_="the same command with --data-dir",
            )
        console.note(f"no data named: taking {place}, as {run} was made with it")
        return {**data, **found, **_given(data)}
    if unlabelled:
        raise UsageError(
            f"no data named, and {run} was made with images without labels",
            try_="the same command with --data-dir, one folder for each class",
        )
    return data


def _given(data: dict[str, Any]) -> dict[str, Any]:
    """What was said of a folder of images without naming one."""
    context = click.get_current_context(silent=True)
    if context is None:
        return {}
    return {
        key: data[key]
        for key in FOLDERS
        if context.get_parameter_source(key) == ParameterSource.COMMANDLINE
    }


def replaced(run: Path, *names: str) -> dict[str, Any]:
    """What a run that starts with --force is about to replace, so that it is not taken for new."""
    from dcptool import files

    found = {
        name: files.sha256(files.read_bytes(run / name, what="an older result"))
        for name in names
        if (run / name).is_file()
    }
    return {"replaces": found} if found else {}


def is_finished(run: Path, options_name: str, name: str) -> bool:
    """Whether a run has left its result `name`, and not only an older run that it replaces."""
    from dcptool import files

    if not (run / name).is_file():
        return False
    old = files.read_json(run / options_name, what="the options of the run").get("replaces")
    found = files.sha256(files.read_bytes(run / name, what="the result"))
    return not (isinstance(old, dict) and old.get(name) == found)


def _typed(old: Any, key: str, paths: frozenset[str]) -> Any:
    if old is None:
        return None
    if isinstance(old, str):
        old = _swap(old, "~", _home())
    if key in paths:
        return Path(old)
    if old == "inf":
        return math.inf
    return tuple(old) if isinstance(old, list) else old


def _groups(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by the dictionary they came in; those that came alone under an empty name."""
    groups: dict[str, dict[str, Any]] = {"": {}}
    for key, value in options.items():
        if isinstance(value, dict):
            groups[key] = value
        else:
            groups[""][key] = value
    return groups


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON."""
    flat = {k: v for group in _groups(options).values() for k, v in group.items()}
    # In one order, whatever that of the groups was: the same run leaves the same bytes.
    return {key: _simple(value) for key, value in sorted(flat.items()) if key not in FREE}


def _simple(value: Any) -> Any:
    if isinstance(value, Path):
        value = str(value.resolve())
    if isinstance(value, str):
        return _swap(value, _home(), "~")
    if isinstance(value, float) and math.isinf(value):
        return "inf"  # JSON has no word for it
    return list(value) if isinstance(value, tuple) else value


def typed() -> str:
    """The command that is running, as it can be typed again."""
    words = []
    for word in app.called() or sys.argv[1:]:
        option, equals, value = word.partition("=")
        is_option = bool(equals) and option.startswith("--")
        for part in (option, value) if is_option else (word,):
            near = _swap(part, _home(), "~")
            # A shell expands the tilde only where it stands bare at the front of a word.
            is_home = near.startswith("~/")
            words.append("~/" + shlex.quote(near[2:]) if is_home else shlex.quote(near))
    return " ".join(["dcptool", *words])


def _home() -> str:
    home = os.path.expanduser("~")  # noqa: PTH111 - pathlib raises where there is none
    return home.rstrip("/") or "~"


def _swap(text: str, old: str, new: str) -> str:
    """Put one beginning of a path for another; `hfds/` may stand before a path."""
    return re.sub(rf"(?<![^/]){re.escape(old)}(?=/)", lambda _: new, text)
