"""How long `dcptool --help` takes beside `python -c "import click, rich"`.

Both are started in turn, so that a busy machine slows both; what counts is the ratio of the
medians (at most 3).

    python tests/benchmarks/help_time.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "import click, rich": [sys.executable, "-c", "import click, rich"],
    "dcptool --help": [sys.executable, "-m", "dcptool", "--help"],
    "dcptool prune --help": [sys.executable, "-m", "dcptool", "prune", "--help"],
    "dcptool --version": [sys.executable, "-m", "dcptool", "--version"],
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - start)
    base = statistics.median(times["import click, rich"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:24} {1000 * median:6.0f} ms   {median / base:.2f} x")


main()
