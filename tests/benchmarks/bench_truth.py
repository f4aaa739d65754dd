"""How far `bench` can be trusted: a file against itself, and against 10 % more work.

python tests/benchmarks/bench_truth.py FILE.onnx [--runs 20] [--duration 4]
The slow copy runs the same session and then burns a tenth of the processor time of a call.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from dcptool.deploy import bench, onnx_scan, timing


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--duration", type=float, default=4.0)
    parser.add_argument("--slow-down", type=float, default=0.10)
    given = parser.parse_args()
    scanned = {"one": onnx_scan.scan(given.file), "two": onnx_scan.scan(given.file)}
    settings = bench.Settings(duration_s=given.duration)
    condition = bench.Condition("cpu", 1, 1)
    work_s = processor_time(bench._runner(scanned["one"], condition, settings))
    held = seen = 0
    for number in range(given.runs):
        generator = np.random.default_rng(number)
        times = bench.measure(scanned, condition, settings, generator)
        same = timing.compare(times["one"], times["two"], generator)
        held += not same.is_measurable
        median_s = float(np.median(np.stack(times["one"])))
        maker = slowed(bench._runner, scanned["two"], given.slow_down * work_s)
        with mock.patch.object(bench, "_runner", maker):
            times = bench.measure(scanned, condition, settings, generator)
        slow = timing.compare(times["one"], times["two"], generator)
        seen += slow.high < 1
        print(
            f"{number + 1:2}  itself {same.ratio:.3f} [{same.low:.3f} {same.high:.3f}]   "
            f"slower {slow.ratio:.3f} [{slow.low:.3f} {slow.high:.3f}]   {median_s * 1e3:.1f} ms",
            flush=True,
        )
    print(
        f"1.0 inside the interval: {held} of {given.runs}; slow-down seen: {seen} of {given.runs}"
    )
    return 0 if held >= 0.85 * given.runs else 1


def processor_time(run: Callable[[], object]) -> float:
    """Seconds of work in one call on one thread, whoever else uses the machine."""
    spent = []
    for _ in range(30):
        start = time.thread_time()
        run()
        spent.append(time.thread_time() - start)
    return float(np.median(spent))


def slowed(
    make: Callable[..., Callable[[], object]], target: onnx_scan.Scanned, extra_s: float
) -> Callable[..., Callable[[], object]]:
    """A maker of runners in which those of `target` do more work than they should."""

    def maker(scanned: onnx_scan.Scanned, *rest: object) -> Callable[[], object]:
        run = make(scanned, *rest)
        if scanned is not target:
            return run

        def slow() -> object:
            result = run()
            # Processor time: waiting for a clock would hide inside another process's slice.
            end = time.thread_time() + extra_s
            while time.thread_time() < end:
                pass
            return result

        return slow

    return maker


if __name__ == "__main__":
    sys.exit(main())
