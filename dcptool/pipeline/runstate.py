"""What a run folder remembers: its recipe, and for each step a digest, a document and files.

Finds the folder of a run that can go on, and results of other runs that can be taken over.
Folders are compared by what is in them; nothing of an earlier run is ever changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcptool import __version__, console, files
from dcptool.errors import DcptoolError, InputError
from dcptool.pipeline import rundir
from dcptool.pipeline.recipe import Recipe, plain

STATE_FILE = "run.json"
RECIPE_FILE = "recipe.toml"
TREE_DEPTH = 3


@dataclass
class State:
    """The memory of one run, written after every step."""

    folder: Path
    identity: Mapping[str, Any]
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished: bool = False

    @classmethod
    def open(cls, folder: Path, recipe: Recipe) -> State:
        """The state in `folder`, or a new one."""
        found = _read(folder)
        if found is not None:
            return cls(folder, found["identity"], dict(found["steps"]))
        state = cls(folder, identity_of(recipe))
        files.publish(folder / RECIPE_FILE, recipe.text.encode())
        state._save()
        return state

    def start(self, step: str, digest: str) -> None:
        """Note that a step is under way."""
        self.steps[step] = {"digest": digest, "done": False}
        self._save()

    def record(
        self, step: str, document: dict[str, Any], seconds: float, made: Sequence[Path]
    ) -> dict[str, Any]:
        """Note that a step is done, and what it left behind."""
        record = {
            "digest": self.steps[step]["digest"],
            "done": True,
            "skipped": False,
            "seconds": seconds,
            "files": {_below(self.folder, path): _sha256(path) for path in made},
            "document": document,
        }
        self.steps[step] = record
        self._save()
        return record

    def find(self, step: str, digest: str) -> dict[str, Any] | None:
        """The record of a step of this run that is done with these inputs."""
        record = self.steps.get(step)
        if record is None or not _is_whole(self.folder, record, digest):
            return None
        record["skipped"] = True
        return record

    def take_over(self, step: str, origin: Path, record: dict[str, Any]) -> dict[str, Any]:
        """Copy the files of another run's step, the manifest last."""
        names = sorted(record["files"], key=lambda name: name.endswith("manifest.json"))
        for name in names:
            target = self.folder / name
            files.make_folder(target.parent)
            files.publish(target, files.read_bytes(origin / name, what="result of a run"))
        # Paths inside the document follow.
        old, new = (json.dumps(str(path))[1:-1] for path in (origin, self.folder))
        document = json.loads(json.dumps(record["document"]).replace(old, new))
        self.steps[step] = {**record, "skipped": True, "document": document, "from": origin.name}
        self._save()
        return self.steps[step]

    def finish(self) -> None:
        """Note that all steps are done."""
        self.finished = True
        self._save()

    def _save(self) -> None:
        document = {
            "identity": self.identity,
            "finished": self.finished,
            "steps": self.steps,
        }
        files.publish_json(self.folder / STATE_FILE, document)


def identity_of(recipe: Recipe) -> dict[str, Any]:
    """What makes two runs the same."""
    return {
        "dcptool": __version__,
        "recipe": recipe.name,
        "settings": plain(recipe.sections),
    }


def digest_of(step: str, words: Sequence[str], reads: Sequence[object], upstream: str) -> str:
    """The digest of all that the result of a step depends on."""
    return files.sha256(json.dumps([__version__, step, words, reads, upstream]).encode())


def stamp(path: Path) -> list[object]:
    """What identifies a file (its content) or a folder (names and times of its folders).

    A folder of a million images is not read for this: adding and removing files changes the time
    of their folder; a file that is edited in place goes unnoticed.
    """
    if path.is_file():
        return [str(path), _sha256(path)]
    return [
        str(path),
        *([str(one.relative_to(path)), one.stat().st_mtime_ns] for one in _folders(path, 1)),
    ]


def _folders(path: Path, depth: int) -> Iterator[Path]:
    if not path.is_dir():
        return
    yield path
    if depth < TREE_DEPTH:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.is_dir():
                yield from _folders(Path(entry.path), depth + 1)


def choose(
    recipe: Recipe,
    runs: Path,
    *,
    resume: bool,
    half_done: Callable[[Path, str], bool],
    in_study: bool = False,
) -> Path:
    """The folder to work in: one that can go on, or a new one.

    A run with a step that was stopped in its middle is gone on with only when asked to. That
    there is none is news, but not of a point of a study, which begins when its turn comes.
    """
    mine = identity_of(recipe)
    stopped: tuple[Path, dict[str, Any]] | None = None
    for folder, state in _states(runs, recipe.name):
        open_steps = [step for step in state["steps"] if half_done(folder, step)]
        if state["identity"] == mine and (resume or not open_steps):
            return folder
        if not state["finished"] and stopped is None:
            stopped = folder, state
    if resume and stopped is not None:
        raise InputError(
            f"cannot go on with {stopped[0]}",
            why="\n".join(_differences(stopped[1]["identity"], mine)),
            try_="the same command without --resume; finished steps are used again",
        )
    if resume and not in_study:
        console.note(f"no run of {recipe.name} to go on with in {runs}; starting one")
    return rundir.new_run(runs, recipe.name)


def elsewhere(folder: Path, step: str, digest: str) -> tuple[Path, dict[str, Any]] | None:
    """Another run beside `folder` whose step had the same inputs and is still whole."""
    for other, state in _states(folder.parent, ""):
        record = state["steps"].get(step)
        if other != folder and record is not None and _is_whole(other, record, digest):
            return other, record
    return None


def _states(runs: Path, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Run folders with a state, newest first; of one recipe, or of all."""
    if not runs.is_dir():
        return
    found = [entry for entry in runs.iterdir() if (entry / STATE_FILE).is_file()]
    for folder in sorted(found, key=lambda entry: entry.name, reverse=True):
        stem, _, number = folder.name.rpartition("-")
        if folder.is_symlink() or (name and (stem != name or not number.isdigit())):
            continue
        state = _read(folder)
        if state is not None:
            yield folder, state


def _read(folder: Path) -> dict[str, Any] | None:
    """The state in a folder; a damaged one counts as none, so that its steps are done again."""
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = files.read_json(path, what="state of a run")
    except DcptoolError as err:
        console.warn(f"{err.message}: {err.why}")
        return None
    identity, steps = found.get("identity"), found.get("steps")
    if not isinstance(identity, dict) or not isinstance(steps, dict) or "finished" not in found:
        console.warn(f"{path} is no state of a run")
        return None
    return {**found, "steps": {k: v for k, v in steps.items() if isinstance(v, dict)}}


def _is_whole(folder: Path, record: Mapping[str, Any], digest: str) -> bool:
    if not record.get("done") or record.get("digest") != digest:
        return False
    known = record.get("files")
    return isinstance(known, dict) and all(
        _is_inside(name) and (folder / name).is_file() and _sha256(folder / name) == sha
        for name, sha in known.items()
    )


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def _below(folder: Path, path: Path) -> str:
    return str(path.relative_to(folder))


def _sha256(path: Path) -> str:
    return files.sha256(files.read_bytes(path, what="result of a run"))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys that changed between two identities, old -> new."""
    before, after = dict(_flat("", old)), dict(_flat("", new))
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    lines = [f"{key}: {before.get(key, '-')} -> {after.get(key, '-')}" for key in changed]
    return lines[:10] or ["it was made by another recipe of this name"]


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), below)
    else:
        yield name.removeprefix("settings."), value
