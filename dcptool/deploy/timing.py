"""Timing two or more functions beside each other, and what the times say.

Owns the schedule (random blocks, so that heat, neighbours and clocks strike all alike) and
the statistics (ratio of medians with a bootstrap interval). Knows nothing of networks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Runner = Callable[[], object]
Times = npt.NDArray[np.float64]

BLOCK_S = 0.05
ROUNDS_MIN, ROUNDS_MAX = 12, 200
RESAMPLES = 2000
CHUNK = 1 << 21
CONFIDENCE = 0.95
# Calls of a block that are drawn again for the interval: they share its fate, and more say no more.
DRAWN_CALLS = 8


@dataclass(frozen=True)
class Summary:
    """Milliseconds of one runner."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    std_ms: float
    iterations: int


@dataclass(frozen=True)
class Ratio:
    """How many times faster than the baseline, with its interval."""

    ratio: float
    low: float
    high: float

    @property
    def is_measurable(self) -> bool:
        """Whether the interval leaves 1.0 out."""
        return not self.low <= 1.0 <= self.high


@dataclass(frozen=True)
class Schedule:
    """How many rounds, and how many timed calls of each runner in a round."""

    rounds: int
    calls: Mapping[str, int]


def plan(
    runners: Mapping[str, Runner],
    *,
    warmup: int,
    duration_s: float,
    iterations: int | None,
    fewest: int = ROUNDS_MIN,
) -> Schedule:
    """Warm every runner up, and fit the rounds into `duration_s` seconds for each runner.

    There are at least `fewest`, however long they take.
    """
    once: dict[str, float] = {}
    for name, run in runners.items():
        spent = [_clock(run) for _ in range(max(warmup, 1) + 2)]
        once[name] = float(np.median(spent[-3:]))
    if iterations is not None:
        rounds = min(max(iterations // 4, 1), ROUNDS_MAX)
        return Schedule(rounds, dict.fromkeys(runners, -(-iterations // rounds)))
    block_s = min(BLOCK_S, duration_s / ROUNDS_MIN)
    calls = {name: max(1, min(50, round(block_s / spent))) for name, spent in once.items()}
    longest = max(once[name] * (calls[name] + 1) for name in runners)
    rounds = int(min(max(duration_s / longest, fewest), ROUNDS_MAX))
    # Long budgets on fast networks lengthen the blocks once there are enough of them.
    stretch = max(1.0, duration_s / (rounds * longest))
    return Schedule(rounds, {name: max(1, int(count * stretch)) for name, count in calls.items()})


def interleave(
    runners: Mapping[str, Runner],
    schedule: Schedule,
    generator: np.random.Generator,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Seconds of every timed call, as rounds x calls, in an order drawn anew each round.

    The first call of a block pays for caches that the others left behind; it is not counted.
    """
    names = list(runners)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(schedule.rounds):
        for index in generator.permutation(len(names)):
            name = names[index]
            run = runners[name]
            run()
            found[name].append([_clock(run) for _ in range(schedule.calls[name])])
        on_round()
    return {name: np.asarray(rows) for name, rows in found.items()}


def _clock(run: Runner) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) * 1e-9


def summarise(times: Times) -> Summary:
    """Percentiles, mean and deviation over all calls."""
    flat = times.ravel() * 1e3
    p50, p90, p99 = (float(q) for q in np.percentile(flat, (50, 90, 99)))
    return Summary(p50, p90, p99, float(flat.mean()), float(flat.std()), flat.size)


def quantiles(times: Sequence[Times]) -> list[float]:
    """Milliseconds at 0, 1 ... 100 percent of all calls."""
    flat = np.concatenate([block.ravel() for block in times]) * 1e3
    return [round(float(value), 4) for value in np.percentile(flat, range(101))]


def compare(
    baseline: Sequence[Times], other: Sequence[Times], generator: np.random.Generator
) -> Ratio:
    """Ratio of medians, baseline over other; one array for each pair of fresh sessions.

    The interval comes from drawing sessions, and rounds within them, again: calls of one
    block share its fate, and two sessions of one model may differ by where their memory lies.
    """
    base, rest = np.stack(baseline), np.stack(other)
    ratio = float(np.median(base) / np.median(rest))
    base, rest = (times[:, :, _spread(times.shape[2])] for times in (base, rest))
    sessions, rounds = base.shape[:2]
    draws: list[Times] = []
    at_once = max(1, CHUNK // max(base.size, rest.size))
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        session = generator.integers(0, sessions, (count, sessions, 1))
        round_ = generator.integers(0, rounds, (count, sessions, rounds))
        medians = [
            np.median(times[session, round_].reshape(count, -1), axis=1) for times in (base, rest)
        ]
        draws.append(medians[0] / medians[1])
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = (float(q) for q in np.percentile(np.concatenate(draws), (tail, 100 - tail)))
    return Ratio(ratio, low, high)


def _spread(calls: int) -> npt.NDArray[np.int64]:
    """Some of so many calls, evenly over all of them."""
    places: npt.NDArray[np.int64] = np.linspace(0, calls - 1, min(calls, DRAWN_CALLS)).astype(int)
    return places
