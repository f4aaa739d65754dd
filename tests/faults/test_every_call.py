"""Each call that writes a file fails, or is the last one: old or new stays, never a mix.

`every_call.py` says how one run of a command tries all of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import forked
import pytest

CODE = (Path(__file__).parent / "every_call.py").read_text()
PRUNE = ("prune", "zoo:resnet20", "--no-pretrained", "--rate", "0.5", "--no-training")
PRUNE += ("--images", "../photos", "--samples", "4", "--positions", "4", "--seed", "1")
FINETUNE = ("finetune", "SLIM", "--images", "../photos", "--steps", "2", "-b", "4")
FINETUNE += ("--save-every", "0", "--channels-last", "off")
RECIPE = """
[model]
name = "zoo:resnet20"
pretrained = false
[data]
images = "../photos"
[prune]
rate = 0.5
training = false
samples = 4
positions = 4
"""
COMMANDS = {
    # Where -o is not given, `runs/latest` is written as well.
    "prune": PRUNE,
    "finetune": FINETUNE,
    "prune again": (*PRUNE, "-o", "runs/old", "--force"),
    "export": ("export", "SLIM", "--onnx", "runs/m.onnx", "--force"),
    "report": ("report", "runs/old"),
    "run": ("run", "tiny.toml"),
}
RESUMED = {"prune.json": "prune", "finetune.json": "finetune"}


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepare(name: str, slim: Path, folder: Path) -> tuple[str, ...]:
    """A folder with what the command needs and what it may not lose; returns its words."""
    (folder / "runs").mkdir(parents=True)
    (folder / "tiny.toml").write_text(RECIPE)
    if not (folder.parent / "photos").exists():
        shutil.copytree(slim.parent / "photos", folder.parent / "photos")
    if name in ("prune again", "report"):
        shutil.copytree(slim, folder / "runs" / "old")
    if name == "export":
        (folder / "runs" / "m.onnx").write_text("old")
    return tuple(str(slim) if word == "SLIM" else word for word in COMMANDS[name])


def temps(folder: Path) -> list[Path]:
    return [*folder.rglob(".dcptool-*"), *folder.rglob(".features-*")]


def check_whole(folder: Path, finals: dict[str, set[str]]) -> None:
    """Whatever lies there can be read as what it says it is."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            assert (path / "manifest.json").is_file(), path
        elif path.name == "manifest.json":
            check_artifact(path.parent)
        elif path.name.startswith("state-"):
            assert path.stem.split("-")[2] == sha(path)[:32], path
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix in (".onnx", ".safetensors", ".html"):
            assert sha(path) in finals[path.name], path


def check_artifact(folder: Path) -> None:
    """As the loader finds it: by the manifest, or by the one that was about to take its place."""
    hashes = {
        json.loads(path.read_text())["files"]["model.safetensors"]["sha256"]
        for path in (folder / "manifest.json", folder / ".manifest.next.json")
        if path.exists()
    }
    assert sha(folder / "model.safetensors") in hashes, folder


def again(folder: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    """What a user types after the fault."""
    if words[0] in ("export", "report", "run"):
        return words if words[0] != "run" else (*words, "--resume")
    for path in sorted(folder.glob("runs/*/*.json"), reverse=True):
        if path.name in RESUMED and RESUMED[path.name] == words[0]:
            if "--force" in words and '"replaces"' not in path.read_text():
                return words  # what lies there is the old run, and whole
            return words[0], "--resume", str(path.parent.relative_to(folder))
    return words


@pytest.mark.parametrize(
    ("kinds", "recoveries"),
    [
        pytest.param("die 5", 4, id="some"),
        pytest.param("die 5 28+ 13 18", 40, id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_call(
    name: str, kinds: str, recoveries: int, server: forked.Server, slim: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    words = prepare(name, slim, whole)
    finals: dict[str, set[str]] = {}
    note(finals, whole)
    clean = server.run(*words, cwd=whole)
    assert clean.code == 0, clean.err
    note(finals, whole)

    place, log = tmp_path / "place", tmp_path / "log"
    prepare(name, slim, place)
    log.mkdir()
    done = server.run(
        *words,
        cwd=place,
        code=CODE,
        timeout=600,
        FAULT_FOLDER=str(place / "runs"),
        FAULT_LOG=str(log),
        FAULT_KINDS=kinds,
        # Inside `run` they are the calls of `prune`, which has its own turn.
        FAULT_SKIP="/tiny-001/prune",
    )
    assert done.code == 0, done.err
    note(finals, place)
    rows = [json.loads(line) for line in (log / "log.jsonl").read_text().splitlines()]
    assert len(rows) >= 6 * len(kinds.split())
    assert {row["call"] for row in rows} >= {"open", "write", "fsync", "rename", "unlink"}
    for row in rows:
        judge(row, log / f"{row['number']}-{row['kind']}", finals)
    died = [log / f"{row['number']}-die" for row in rows if row["kind"] == "die"]
    for number, state in enumerate(died[:: max(1, len(died) // recoveries)]):
        recover(state, words, server, whole, tmp_path / f"again-{number}", slim, number)


def note(finals: dict[str, set[str]], folder: Path) -> None:
    for path in (folder / "runs").rglob("*.*"):
        if path.is_file():
            finals.setdefault(path.name, set()).add(sha(path))


def judge(row: dict[str, object], state: Path, finals: dict[str, set[str]]) -> None:
    """The code, the message and what is left after one fault."""
    check_whole(state, finals)
    if row["kind"] == "die":
        assert row["code"] == 137
        return
    said = state.with_name(state.name + ".err").read_text()
    assert "Traceback" not in said, row
    assert row["code"] in (0, 5), (row, said)
    if row["code"] == 5:
        assert "\n  why: " in said, (row, said)
        assert "\n  try: " in said, (row, said)
        assert "runs" in said.splitlines()[-3], (row, said)
    elif row["call"] not in ("unlink", "mkdir"):
        # A folder that is there need not be made. Otherwise the work is done, and only its page
        # could not be written, or the number in the lock.
        assert "no report written" in said or str(row["path"]).endswith(".lock"), (row, said)
    left = temps(state)
    assert len(left) <= (row["call"] == "unlink"), (row, left)


def recover(
    state: Path,
    words: tuple[str, ...],
    server: forked.Server,
    whole: Path,
    folder: Path,
    slim: Path,
    number: int,
) -> None:
    """The same result after the end of a process, also when the next one ends early as well."""
    folder.mkdir()
    shutil.copytree(state, folder / "runs", symlinks=True)
    (folder / "tiny.toml").write_text(RECIPE)
    if number % 2:
        died = server.run(
            *again(folder, words),
            cwd=folder,
            code=CODE,
            FAULT_FOLDER=str(folder / "runs"),
            FAULT_LOG=str(folder),
            FAULT_KINDS="",
            FAULT_DIE_AT=str(2 + 7 * number),
        )
        assert died.code in (137, 0, 2), died.err
    done = server.run(*again(folder, words), cwd=folder)
    finished = "is finished already" in done.err
    assert done.code == 0 or (done.code == 2 and finished), (state, done.err)
    # What has nothing to write does not clean up either; the next one that writes there does.
    if not finished:
        # A run that ended before it had a state is left behind as it is.
        begun = [run for run in (folder / "runs").glob("tiny-*") if not (run / "run.json").exists()]
        assert not [one for one in temps(folder) if one.parent not in begun], state
    for path in whole.glob("runs/**/*.safetensors"):
        # A recipe that ended before it had a state is followed by a run of the next number.
        name = str(path.relative_to(whole)).replace("tiny-001", "tiny-*")
        assert {sha(one) for one in folder.glob(name)} == {sha(path)}, (state, path)
    known: dict[str, set[str]] = {}
    note(known, folder)
    check_whole(folder / "runs", known)
