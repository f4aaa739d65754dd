"""SIGKILL `prune`, `finetune`, `export` and `run` at random instants, and go on each time.

    python tests/benchmarks/kill_anything.py [--kills 200] [--log kills.jsonl] [--only run]

After every kill all that lies on the disk must be readable as what it says it is; after the
last one of a life the result must be equal, to the bit, to that of a command that was never
stopped. Each life is a line in the log; started again with the same log, it goes on where it
was. Commands are forked from a process that has the libraries, so that the instants fall into
the work and not into imports; states are saved every twentieth of a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import forked

# No option asks for this: the state of a run of hours is due every half minute.
OFTEN = """
from dcptool.pipeline import prune, stage_training
prune.SAVE_EVERY_S = stage_training.SAVE_EVERY_S = 0.05
"""
IMAGES = ("--images", "../photos")
PRUNE = ("prune", "zoo:resnet20", "--no-pretrained", "--rate", "0.5", "--prune-residual")
PRUNE += ("--no-training", *IMAGES, "--samples", "8", "--positions", "8")
FINETUNE = ("finetune", "../slim", *IMAGES, "--steps", "12", "-b", "4", "--save-every", "0.05")
RECIPE = """
[model]
name = "zoo:resnet20"
pretrained = false
[data]
images = "../photos"
[prune]
rate = 0.5
training = false
samples = 8
positions = 8
[finetune]
steps = 8
batch_size = 4
save_every = 0.05
channels_last = "off"
[export]
"""
COMMANDS = {
    "prune": PRUNE,
    "finetune": (*FINETUNE, "--log-interval", "1", "--channels-last", "off"),
    "export": ("export", "../slim", "--onnx", "runs/m.onnx", "--force"),
    "run": ("run", "tiny.toml"),
}
SAME = ("model.safetensors", "dense.safetensors", "steps.jsonl", "m.onnx", "model.onnx")
OPTIONS = {"prune": "prune.json", "finetune": "finetune.json"}
MOST_KILLS = 4


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check(folder: Path) -> int:
    """Everything there is whole; returns the number of saved states."""
    states = 0
    for path in folder.rglob("*"):
        if path.is_symlink():
            assert (path / "manifest.json").is_file(), path
        elif path.name.startswith("state-"):
            assert path.stem.split("-")[2] == sha(path)[:32], path
            states += 1
        elif path.name == "manifest.json":
            entry = json.loads(path.read_text())["files"]["model.safetensors"]
            assert sha(path.parent / "model.safetensors") == entry["sha256"], path
        elif path.suffix == ".json" and not path.name.startswith("."):
            json.loads(path.read_text())
    return states


def result(folder: Path) -> dict[str, str]:
    """Digests of what a command leaves, and its figures without those of time."""
    found = {}
    for path in sorted(folder.rglob("*.*")):
        # Where a run was killed before it had a state, the next one has the next number.
        parts = [part for part in path.relative_to(folder).parts if not part[-3:].isdigit()]
        if path.name in SAME:
            found["/".join(parts)] = sha(path)
        elif path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            timed = ("seconds", "images_per_second")
            kept = [{k: v for k, v in row.items() if k not in timed} for row in rows]
            found["/".join(parts)] = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    return found


def again(name: str, folder: Path) -> tuple[str, ...]:
    """What a user types after the kill."""
    if name == "run":
        return (*COMMANDS[name], "--resume")
    if name in OPTIONS:
        for path in sorted(folder.glob(f"runs/*/{OPTIONS[name]}"), reverse=True):
            return name, "--resume", str(path.parent.relative_to(folder))
    return COMMANDS[name]


def life(
    server: forked.Server, name: str, folder: Path, seconds: float, draw: random.Random, most: int
) -> dict[str, Any]:
    """One command, killed a few times and then left alone; returns what was seen."""
    words, kills, states = COMMANDS[name], 0, 0
    for _ in range(draw.randint(1, min(most, MOST_KILLS))):
        process = server.start(*words, cwd=folder, code=OFTEN)
        time.sleep(draw.uniform(0.02, seconds))
        if process.runs():
            process.kill()
        ended = process.wait()
        kills += ended.code == -9
        states += check(folder / "runs") > 0
        words = again(name, folder)
        # The kill before may have come after the last file was published.
        if ended.code == 0 or (ended.code == 2 and "is finished already" in ended.err):
            break
        assert ended.code == -9, (name, ended.code, ended.err)
    done = server.run(*again(name, folder), cwd=folder, code=OFTEN, timeout=300)
    finished = done.code == 2 and "is finished already" in done.err
    assert done.code == 0 or finished, done.err
    check(folder / "runs")
    return {"command": name, "kills": kills, "with_state": states}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--only", choices=COMMANDS)
    options = parser.parse_args()
    os.environ["DCPTOOL_OFFLINE"] = "1"
    lines = []
    if options.log is not None and options.log.exists():
        lines = [json.loads(line) for line in options.log.read_text().splitlines()]
    with tempfile.TemporaryDirectory(prefix="dcptool-kills-") as place:
        lines += work(Path(place), options, lines)
    total = {
        "kills": sum(line["kills"] for line in lines),
        "by_command": {
            name: sum(line["kills"] for line in lines if line["command"] == name)
            for name in COMMANDS
        },
        "lives": len(lines),
        "with_state": sum(line["with_state"] for line in lines),
        "equal": all(line["equal"] for line in lines),
    }
    sys.stdout.write(json.dumps(total) + "\n")


def work(root: Path, options: argparse.Namespace, before: list[dict[str, Any]]) -> list[Any]:
    from PIL import Image

    for number in range(8):
        (root / "photos").mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), (30 * number, 90, 9)).save(root / "photos" / f"{number}.png")
    (root / "said").mkdir()
    server = forked.Server(root / "said")
    names = [options.only] if options.only else list(COMMANDS)
    wanted: dict[str, tuple[dict[str, str], float]] = {}
    made: list[dict[str, Any]] = []

    def fresh(name: str) -> Path:
        folder = root / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "runs").mkdir(parents=True)
        (folder / "tiny.toml").write_text(RECIPE)
        return folder

    def whole(name: str) -> tuple[dict[str, str], float]:
        folder = fresh(name)
        began = time.monotonic()
        done = server.run(*COMMANDS[name], cwd=folder, code=OFTEN, timeout=300)
        assert done.code == 0, done.err
        if name == "prune" and not (root / "slim").exists():
            shutil.copytree(next((folder / "runs").glob("zoo*")), root / "slim")
        return result(folder / "runs"), time.monotonic() - began

    whole("prune")
    kills = sum(line["kills"] for line in before)
    while kills < options.kills:
        number = len(before) + len(made)
        name = names[number % len(names)]
        if name not in wanted:
            wanted[name] = whole(name)
            assert wanted[name][0], f"{name} has left nothing"
        draw = random.Random(f"{options.seed} {number}")
        folder = fresh(name)
        line = life(server, name, folder, wanted[name][1], draw, options.kills - kills)
        line["equal"] = result(folder / "runs") == wanted[name][0]
        assert line["equal"], (line, result(folder / "runs"), wanted[name][0])
        assert not list(folder.rglob(".dcptool-*")), f"{name} has left temporary files"
        kills += line["kills"]
        made.append(line)
        sys.stderr.write(f"{kills} kills: {json.dumps(line)}\n")
        if options.log is not None:
            with options.log.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
    server.close()
    return made


if __name__ == "__main__":
    main()
