"""SIGKILL at random instants, resume, and compare with a run that was never stopped.

    python tests/benchmarks/kill_resume.py [--kills 20] [--seed 0]

The end must be bit-equal, weights and metrics. The instants are drawn over the time in which
steps and saves happen, found by watching the run.
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

OPTIONS = ("finetune", "zoo:resnet20", "--no-pretrained", "-b", "16", "--steps")
QUICK = ("--channels-last", "off", "--model-ema-decay", "0.9", "--log-interval", "3")
SAVES = ("--save-every", "0.2")


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dcptool", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(arguments: list[str]) -> None:
    process = start(arguments)
    _, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}: {err.decode()}")


def wait(process: subprocess.Popen[bytes], folder: Path, known: set[str]) -> bool:
    """Wait until this attempt saved something new; False when it ended first."""
    while process.poll() is None:
        place = folder / "checkpoints"
        if place.is_dir() and {p.name for p in place.iterdir()} - known:
            return True
        time.sleep(0.02)
    return False


def figures(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "images_per_second")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    draw = random.Random(options.seed)
    root = Path(tempfile.mkdtemp(prefix="dcptool-kill-"))
    whole, broken = root / "whole", root / "broken"
    base = [*OPTIONS, str(options.steps), *QUICK, *SAVES]
    finish([*base, "-o", str(whole)])
    command = [*base, "-o", str(broken)]
    kills = 0
    while kills < options.kills:
        place = broken / "checkpoints"
        known = {p.name for p in place.iterdir()} if place.is_dir() else set()
        process = start(command)
        alive = wait(process, broken, known)
        if alive:
            time.sleep(draw.uniform(0, 1.0))
            process.kill()
        _, err = process.communicate()
        if not alive and process.returncode:
            raise SystemExit(err.decode())
        if not alive:
            break
        kills += 1
        resumed = [line for line in err.decode().splitlines() if "resumed" in line]
        sys.stderr.write(f"kill {kills}: {resumed}\n")
        command = ["finetune", "--resume", str(broken)]
    finish(["finetune", "--resume", str(broken)])
    same = (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
    result = {
        "kills": kills,
        "weights_equal": same,
        "metrics_equal": figures(whole) == figures(broken),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    shutil.rmtree(root)
    if not all((same, result["metrics_equal"], kills == options.kills)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
