"""Where runs live: one folder each, and a link `latest` to the newest.

The runs folder is --runs-dir, else $DCPTOOL_RUNS, else `runs` in the working folder. Imports
nothing heavy, so that commands can look here before they load a library.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dcptool import files
from dcptool.errors import EnvironmentFault, InputError

LATEST = "latest"


def runs_folder(option: Path | None = None) -> Path:
    """The folder that holds all runs."""
    return option or Path(os.environ.get("DCPTOOL_RUNS") or "runs")


def latest(option: Path | None = None) -> Path:
    """The folder of the newest finished run."""
    folder = runs_folder(option)
    link = folder / LATEST
    if not link.is_dir():
        why = f"{link} points to nothing" if link.is_symlink() else f"{link} does not exist"
        raise InputError(
            "there is no run to take",
            why=why,
            try_="dcptool prune resnet50 --rate 0.3, or name a model, an artifact or a file",
        )
    return folder / link.readlink() if link.is_symlink() else link


def make_runs(option: Path | None) -> Path:
    """The folder of all runs, made and open to writing."""
    folder = runs_folder(option)
    elsewhere = "the same command with --runs-dir DIR, or DCPTOOL_RUNS=DIR"
    try:
        files.make_folder(folder)
    except EnvironmentFault as err:
        err.try_ = f"{elsewhere}; {err.try_}"
        raise
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentFault(f"cannot write {folder}", why="permission denied", try_=elsewhere)
    return folder


def new_run(option: Path | None, stem: str) -> Path:
    """Create an empty run folder `stem-001`, counting up; safe beside other processes.

    Of a stem, letters, digits, `.`, `_` and `-` are taken.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:120].lstrip("._-") or "run"
    folder = make_runs(option)
    taken = [entry.name for entry in folder.iterdir() if entry.name.startswith(f"{stem}-")]
    numbers = [int(name[len(stem) + 1 :]) for name in taken if name[len(stem) + 1 :].isdigit()]
    number = max(numbers, default=0)
    for one in numbers:
        # A run that was killed before its first file was whole is not gone on with: this one is.
        files.sweep(folder / f"{stem}-{one:03d}")
    while True:
        number += 1
        path = folder / f"{stem}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as err:
            raise files.storage_fault(err, path) from err
        return path


def set_latest(path: Path) -> None:
    """Let `latest` beside `path` name it."""
    files.point_link(path.parent / LATEST, path.name)
