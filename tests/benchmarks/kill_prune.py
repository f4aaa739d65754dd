"""End `prune` at random instants, resume, and compare with a run that was never stopped.

    python tests/benchmarks/kill_prune.py [--kills 20] [--seed 0] [--solver gram] [--processes 1]

Half of the ends are SIGKILL, the others SIGTERM and SIGINT. Weights and record must be equal to
the bit. The instants are drawn over the whole run: baseline, stages, curves, publication. States
are saved every fifth of a second, so that a tiny network has some to go on from.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

NETWORK = ("prune", "zoo:resnet20", "--no-pretrained", "--rate", "0.5", "--prune-residual")
SMALL = ("--samples", "24", "--positions", "8", "--batch-size", "8", "--stage-steps", "6")
# Which memory layout is faster a clock decides, in each run anew.
LAYOUT = ("--channels-last", "off")
# Saves often, which no option asks for: the state of a run of hours is due every half minute.
PROGRAM = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _frame: sys.exit(128 + number))
from functools import partial
from dcptool.cli.app import main
from dcptool.pipeline import baseline, prune, stage_training
prune.SAVE_EVERY_S = stage_training.SAVE_EVERY_S = 0.2
baseline.Checkpoints = partial(baseline.Checkpoints, every_s=0.2)
baseline.STEPS = 40
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
main(sys.argv[1:])
"""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def start(arguments: list[str], processes: int) -> subprocess.Popen[bytes]:
    program = ["-c", PROGRAM] if processes == 1 else ["-m", "dcptool"]
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(arguments: list[str], processes: int) -> float:
    began = time.monotonic()
    process = start(arguments, processes)
    _, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}: {err.decode()}")
    return time.monotonic() - began


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> str:
    """Send the signal and wait; returns what the program said."""
    process.send_signal(number)
    _, err = process.communicate()
    expected = (-number,) if number == signal.SIGKILL else (128 + number, -number)
    told = err.decode(errors="replace")
    if process.returncode not in (*expected, 0):
        raise SystemExit(f"exit {process.returncode} after {number.name}: {told}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--solver", choices=("gram", "sgd"), default="gram")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("more", nargs="*", help="further options of prune, after --")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    draw = random.Random(options.seed)
    root = Path(tempfile.mkdtemp(prefix="dcptool-kill-"))
    whole, broken = root / "whole", root / "broken"
    base = [*NETWORK, *SMALL, *LAYOUT, "--solver", options.solver, *options.more]
    if options.processes > 1:
        base += ["--nproc-per-node", str(options.processes)]
    os.environ["XDG_CACHE_HOME"] = str(root / "cache-whole")
    seconds = finish([*base, "-o", str(whole)], options.processes)
    os.environ["XDG_CACHE_HOME"] = str(root / "cache-broken")
    ends: Counter[str] = Counter()
    runs, equal = 0, True
    while sum(ends.values()) < options.kills:
        again = ["prune", "--resume", str(broken)]
        if options.processes > 1:
            again += ["--nproc-per-node", str(options.processes)]
        while sum(ends.values()) < options.kills and not (broken / "manifest.json").exists():
            fresh = not (broken / "prune.json").exists()
            if fresh:
                shutil.rmtree(broken, ignore_errors=True)
            process = start([*base, "-o", str(broken)] if fresh else again, options.processes)
            time.sleep(draw.uniform(0.5, 0.6 * seconds))
            # Of several processes the launcher alone can be killed; its workers would live on.
            number = draw.choice(SIGNALS if options.processes == 1 else SIGNALS[2:])
            told = end(process, number)
            ends[number.name] += 1
            states = len(list(broken.rglob("state-*.safetensors")))
            last = told.strip().splitlines()[-1:] or [""]
            sys.stderr.write(f"{number.name}: {states} states; {last[0][:80]}\n")
        if not (broken / "manifest.json").exists():
            rest = again if (broken / "prune.json").exists() else [*base, "-o", str(broken)]
            finish(rest, options.processes)
        runs += 1
        equal &= same(whole, broken, "model.safetensors") and same(whole, broken, "steps.jsonl")
        if not equal or (broken / "checkpoints").exists():
            raise SystemExit(f"not the same, or not cleared; kept for a look: {root}")
        shutil.rmtree(broken)
    sys.stdout.write(json.dumps({"ends": dict(ends), "runs": runs, "equal": equal}) + "\n")
    shutil.rmtree(root)


def same(one: Path, other: Path, name: str) -> bool:
    return (one / name).read_bytes() == (other / name).read_bytes()


if __name__ == "__main__":
    main()
