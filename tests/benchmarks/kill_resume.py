"""SIGKILL `finetune` at random instants, resume, and compare with a run that was never stopped.

    python tests/benchmarks/kill_resume.py [--kills 20] [--seed 0] [-- OPTIONS OF FINETUNE]

The instants are drawn over the whole life of each attempt, start and publication included. Weights
and metrics must be equal to the bit. Which memory layout is faster a clock decides, so the run that
is never stopped gets the layout that the killed one recorded; all other options are the defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OPTIONS = ("finetune", "zoo:resnet20", "--no-pretrained", "-b", "16", "--steps", "150")
SAVES = ("--save-every", "0.2")


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dcptool", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(arguments: list[str]) -> float:
    began = time.monotonic()
    process = start(arguments)
    _, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}: {err.decode()}")
    return time.monotonic() - began


def figures(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "images_per_second")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


def layout(folder: Path) -> str:
    manifest = json.loads((folder / "manifest.json").read_text())
    return "on" if manifest["lineage"]["finetune"]["channels_last"] else "off"


def equal(one: Path, other: Path) -> bool:
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, other)]
    return weights[0] == weights[1] and figures(one) == figures(other)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("more", nargs="*", help="further options of finetune, after --")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    draw = random.Random(options.seed)
    root = Path(tempfile.mkdtemp(prefix="dcptool-kill-"))
    base = [*OPTIONS, *SAVES, *options.more]
    whole: dict[str, Path] = {}
    seconds = finish([*base, "-o", str(root / "first")])
    whole[layout(root / "first")] = root / "first"
    broken = root / "broken"
    kills = runs = 0
    while kills < options.kills:
        while not (broken / "manifest.json").exists():
            begun = (broken / "finetune.json").exists()
            command = ["finetune", "--resume", str(broken)] if begun else [*base, "-o", str(broken)]
            process = start(command)
            at = draw.uniform(0, seconds)
            if kills < options.kills:
                try:
                    process.wait(at)
                except subprocess.TimeoutExpired:
                    process.kill()
                    kills += 1
            _, err = process.communicate()
            told = [line for line in err.decode().splitlines() if "resumed" in line]
            sys.stderr.write(f"{kills}: after {at:.1f} s, exit {process.returncode}, {told}\n")
            if process.returncode not in (0, -9):
                raise SystemExit(err.decode())
        runs += 1
        chosen = layout(broken)
        if chosen not in whole:
            whole[chosen] = root / chosen
            finish([*base, "--channels-last", chosen, "-o", str(whole[chosen])])
        if not equal(whole[chosen], broken):
            raise SystemExit(f"not the same; kept for a look: {root}")
        shutil.rmtree(broken)
    sys.stdout.write(json.dumps({"kills": kills, "runs": runs, "equal": True}) + "\n")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
