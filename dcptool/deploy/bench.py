"""Honest milliseconds: several ONNX files timed beside each other in one process.

Every file has passed the scan and a child process before it is timed here. Sessions are
made anew several times and run in random blocks; the comparison says how sure it is, and
says so when there is no measurable difference. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dcptool import console
from dcptool.deploy import guard, onnx_scan, profile, timing
from dcptool.deploy.onnx_graph import metadata
from dcptool.deploy.parity import Array
from dcptool.deploy.session import cores, feed_of, open_session
from dcptool.errors import UsageError

# Few sessions make the interval too narrow: each is one draw of how memory came to lie.
SESSIONS = 8
# As long as one call takes longer than the time there is.
ROUNDS_A_SESSION = 3


@dataclass(frozen=True)
class Entry:
    """One file to be timed, under the name it gets in the tables.

    `network` loads the torch network behind it, where there is one.
    """

    model: str
    path: Path
    network: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Settings:
    """What is varied and for how long."""

    providers: tuple[str, ...] = ("cpu",)
    batch_sizes: tuple[int, ...] = (1, 8)
    threads: tuple[int, ...] = ()
    warmup: int = 5
    duration_s: float = 4.0
    iterations: int | None = None
    size: int | None = None
    seed: int = 0
    memory_bytes: int = guard.MEMORY_DEFAULT
    denormal_as_zero: bool = False


@dataclass(frozen=True)
class Row:
    """Times of one file under one condition."""

    model: str
    file: str
    provider: str
    batch_size: int
    threads: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    std_ms: float
    iterations: int
    images_per_second: float
    peak_bytes: int | None
    bytes: int
    macs: int


@dataclass(frozen=True)
class Speedup:
    """One file against the baseline under one condition."""

    model: str
    baseline: str
    provider: str
    batch_size: int
    threads: int
    ratio: float
    low: float
    high: float
    measurable: bool
    macs_ratio: float
    efficiency: float | None


@dataclass(frozen=True)
class Report:
    """All rows, all comparisons."""

    rows: list[Row] = field(default_factory=list)
    speedup: list[Speedup] = field(default_factory=list)
    distribution: list[dict[str, object]] = field(default_factory=list)

    def document(self) -> dict[str, object]:
        """The names of the JSON contract."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "speedup": [asdict(entry) for entry in self.speedup],
            "distribution": self.distribution,
        }


@dataclass(frozen=True)
class Condition:
    """One cell of the grid."""

    provider: str
    batch_size: int
    threads: int


def distinct(entries: Sequence[Entry]) -> list[Entry]:
    """The same entries with names that differ."""
    seen: dict[str, int] = {}
    result = []
    for entry in entries:
        seen[entry.model] = seen.get(entry.model, 0) + 1
        number = seen[entry.model]
        name = entry.model if number == 1 else f"{entry.model} #{number}"
        result.append(replace(entry, model=name))
    return result


def bench(entries: Sequence[Entry], settings: Settings, *, baseline: int | None = 0) -> Report:
    """Time all entries under all conditions, and compare each with the one at `baseline`."""
    entries = distinct(entries)
    scanned = {entry.model: onnx_scan.scan(entry.path) for entry in entries}
    _check_batches(scanned, settings.batch_sizes)
    conditions = [
        Condition(provider, batch_size, threads)
        for provider in settings.providers
        for threads in settings.threads or (cores(),)
        for batch_size in settings.batch_sizes
    ]
    report = Report()
    generator = np.random.default_rng(settings.seed)
    with console.progress("bench", total=len(conditions) * (SESSIONS + len(entries))) as task:
        for condition in conditions:
            label = (
                f"{condition.provider}, batch {condition.batch_size}, threads {condition.threads}"
            )
            visits: dict[str, guard.Visit] = {}
            for entry in entries:
                visits[entry.model] = _visit(scanned[entry.model], condition, settings)
                task.advance(status=label)
            times = measure(scanned, condition, settings, generator, task.advance)
            rows = [
                _row(
                    entry, scanned[entry.model], condition, visits[entry.model], times[entry.model]
                )
                for entry in entries
            ]
            report.rows.extend(rows)
            report.distribution.extend(
                {"model": name, **asdict(condition), "quantiles_ms": timing.quantiles(found)}
                for name, found in times.items()
            )
            if baseline is not None:
                first = rows[baseline]
                precisions = [_precision(scanned[entry.model]) for entry in entries]
                report.speedup.extend(
                    _speedup(row, first, times, generator, same=precision == precisions[baseline])
                    for row, precision in zip(rows, precisions, strict=True)
                    if row is not first
                )
    return report


def _check_batches(scanned: Mapping[str, onnx_scan.Scanned], sizes: Sequence[int]) -> None:
    """Refuse batches that a file cannot take, before the first is timed."""
    for name, one in scanned.items():
        fixed = feed_of(one.proto).shape[0]
        wrong = [size for size in sizes if fixed not in (None, size)]
        if wrong:
            raise UsageError(
                f"{name} takes batches of {fixed} only, not {wrong[0]}",
                why=f"{one.path} was exported so",
                try_=f"--batch-size {fixed}, or export it with --dynamic batch",
            )


def image_size(scanned: onnx_scan.Scanned, settings: Settings) -> int | None:
    """Height and width for inputs that leave them free."""
    if settings.size:
        return settings.size
    try:
        found = json.loads(metadata(scanned.proto)["input_size"])
        return int(found[1])
    except (KeyError, ValueError, TypeError, IndexError):
        return None


def _precision(scanned: onnx_scan.Scanned) -> str:
    return metadata(scanned.proto).get("precision", "fp32")


def _visit(scanned: onnx_scan.Scanned, condition: Condition, settings: Settings) -> guard.Visit:
    return guard.visit(
        scanned.path,
        batch_size=condition.batch_size,
        threads=condition.threads,
        size=image_size(scanned, settings),
        memory_bytes=settings.memory_bytes,
    )


def measure(
    scanned: Mapping[str, onnx_scan.Scanned],
    condition: Condition,
    settings: Settings,
    generator: np.random.Generator,
    on_session: Callable[[], None] = lambda: None,
) -> dict[str, list[timing.Times]]:
    """Seconds of each call: one array for each generation of sessions."""
    found: dict[str, list[timing.Times]] = {name: [] for name in scanned}
    schedule: timing.Schedule | None = None
    names = list(scanned)
    for _ in range(SESSIONS):
        runners = {}
        # The order of creation decides where memory lies, so it is drawn as well.
        for index in generator.permutation(len(names)):
            name = names[index]
            runners[name] = _runner(scanned[name], condition, settings)
        per_session = None if settings.iterations is None else -(-settings.iterations // SESSIONS)
        planned = timing.plan(
            runners,
            warmup=settings.warmup,
            duration_s=settings.duration_s / SESSIONS,
            iterations=per_session,
            fewest=ROUNDS_A_SESSION,
        )
        # One schedule for all generations, so that each weighs the same.
        schedule = schedule or planned
        for name, times in timing.interleave(runners, schedule, generator).items():
            found[name].append(times)
        on_session()
    return found


def _runner(
    scanned: onnx_scan.Scanned, condition: Condition, settings: Settings
) -> Callable[[], object]:
    session = open_session(
        scanned.data,
        provider=condition.provider,
        threads=condition.threads,
        folder=scanned.folder,
        denormal_as_zero=settings.denormal_as_zero,
    )
    feed = feed_of(scanned.proto)
    feeds: dict[str, Array] = feed.random(
        condition.batch_size, size=image_size(scanned, settings), seed=settings.seed
    )

    def run() -> object:
        return session.run(None, feeds)

    return run


def _row(
    entry: Entry,
    scanned: onnx_scan.Scanned,
    condition: Condition,
    visit: guard.Visit,
    times: list[timing.Times],
) -> Row:
    flat = np.concatenate([block.ravel() for block in times])
    summary = timing.summarise(flat)
    return Row(
        model=entry.model,
        file=str(entry.path),
        provider=condition.provider,
        batch_size=condition.batch_size,
        threads=condition.threads,
        p50_ms=summary.p50_ms,
        p90_ms=summary.p90_ms,
        p99_ms=summary.p99_ms,
        mean_ms=summary.mean_ms,
        std_ms=summary.std_ms,
        iterations=summary.iterations,
        images_per_second=condition.batch_size * 1e3 / summary.p50_ms,
        # The child ran on the CPU: what another provider needs is not known here.
        peak_bytes=visit.peak_bytes if condition.provider == "cpu" else None,
        bytes=scanned.bytes,
        macs=visit.macs,
    )


def _speedup(
    row: Row,
    first: Row,
    times: Mapping[str, list[timing.Times]],
    generator: np.random.Generator,
    *,
    same: bool,
) -> Speedup:
    """One row against the first; what coarser numbers save is not due to fewer MACs."""
    found = timing.compare(times[first.model], times[row.model], generator)
    macs_ratio = first.macs / row.macs if row.macs else 1.0
    return Speedup(
        row.model,
        first.model,
        row.provider,
        row.batch_size,
        row.threads,
        found.ratio,
        found.low,
        found.high,
        found.is_measurable,
        macs_ratio,
        found.ratio / macs_ratio if same else None,
    )


def profiles(entries: Sequence[Entry], settings: Settings) -> dict[str, profile.Profile]:
    """Time by layer of each entry, under the first condition."""
    found = {}
    for entry in distinct(entries):
        scanned = onnx_scan.scan(entry.path)
        found[entry.model] = profile.profile(
            scanned,
            provider=settings.providers[0],
            batch_size=settings.batch_sizes[0],
            threads=(settings.threads or (cores(),))[0],
            size=image_size(scanned, settings),
        )
    return found
