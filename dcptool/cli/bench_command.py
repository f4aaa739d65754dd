"""`dcptool bench`: honest milliseconds, dense beside slim."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from dcptool import console
from dcptool.cli import idle
from dcptool.cli.app import emit
from dcptool.cli.numbers import FiniteRange
from dcptool.cli.options import data_options, model_options, output_options, runs_option
from dcptool.errors import GateFailed, UsageError

if TYPE_CHECKING:
    from dcptool.deploy.precision import Four


@click.command("bench")
@click.argument("targets", nargs=-1, metavar="[ARTIFACT|MODEL|FILE.onnx]...")
@click.option(
    "--provider",
    "providers",
    multiple=True,
    default=("cpu",),
    show_default=True,
    metavar="NAME",
    help="onnxruntime provider: cpu, cuda, tensorrt, openvino ... or all; repeatable.",
)
@click.option(
    "-b",
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 8),
    show_default=True,
    help="Images in one call; repeatable.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    multiple=True,
    help="Threads of onnxruntime (all cores); repeatable.",
)
@click.option(
    "--warmup", type=click.IntRange(1), default=5, show_default=True, help="Calls before timing."
)
@click.option(
    "--duration",
    type=FiniteRange(0, min_open=True),
    default=4.0,
    show_default=True,
    help="Seconds of timed calls for each row; at least 24 calls.",
)
@click.option("--iterations", type=click.IntRange(1), help="Timed calls for each row, instead.")
@click.option(
    "--baseline",
    metavar="TARGET",
    help="What to compare with: a target; `dense` for its dense network.",
)
@click.option(
    "--min-speedup", type=FiniteRange(0), help="Exit 4 when a speed-up is smaller than this."
)
@click.option(
    "--onnx-memory",
    type=FiniteRange(0.5),
    default=4.0,
    show_default=True,
    help="GiB that checking a file may take beside eight times its size.",
)
@click.option(
    "--denormal-as-zero", is_flag=True, help="Let onnxruntime treat subnormal numbers as zero."
)
@click.option(
    "--profile", "with_profile", is_flag=True, help="Add the time by layer, models side by side."
)
@click.option(
    "--torch", "with_torch", is_flag=True, help="Add forward and backward time in PyTorch."
)
@click.option(
    "--int8",
    "with_int8",
    is_flag=True,
    help="Dense and slim in float and in INT8: accuracy, time and size of all four.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Images to calibrate --int8 with.",
)
@data_options
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the tables as Markdown.")
@model_options
@runs_option
@output_options
def command(
    targets: tuple[str, ...],
    providers: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    threads: tuple[int, ...],
    warmup: int,
    duration: float,
    iterations: int | None,
    baseline: str | None,
    min_speedup: float | None,
    onnx_memory: float,
    denormal_as_zero: bool,
    with_profile: bool,
    with_torch: bool,
    with_int8: bool,
    samples: int,
    data: dict[str, Any],
    as_csv: bool,
    as_markdown: bool,
    runs_dir: Path | None,
    as_json: bool,
    **model: Any,
) -> None:
    """Time exported networks beside each other.

    Without a target: the newest run against its dense network. Of several targets the first
    is what the others are compared with.

    \b
        dcptool bench
        dcptool bench dense.onnx slim.onnx --batch-size 1 --threads 1
        dcptool bench runs/latest --min-speedup 1.3 --json
        dcptool bench runs/latest --int8 --data-dir photos
    """
    if as_json + as_csv + as_markdown > 1:
        raise UsageError("--json, --csv and --markdown exclude each other")
    if not targets:
        from dcptool.pipeline import rundir

        targets = (str(rundir.latest(runs_dir)),)
    from dcptool.deploy import bench, bench_table, bench_targets, machine, profile, session

    if not with_int8:
        idle.refuse((*data, "samples"), "without --int8")
    named = (*targets, baseline) if baseline else targets
    if not any(bench_targets.is_model(target) for target in named):
        own = ("checkpoint", "num_classes", "pretrained")
        idle.refuse(own, "here: artifacts and files have their own weights and classifier")
    settings = bench.Settings(
        providers=tuple(session.choose(providers)),
        batch_sizes=tuple(dict.fromkeys(batch_sizes)),
        threads=tuple(dict.fromkeys(threads)),
        warmup=warmup,
        duration_s=duration,
        iterations=iterations,
        size=model["img_size"],
        seed=model["seed"],
        memory_bytes=int(onnx_memory * 2**30),
        denormal_as_zero=denormal_as_zero,
    )
    with ExitStack() as stack:
        precision = None
        reference: int | None = 0
        if with_int8:
            place = Path(stack.enter_context(TemporaryDirectory(prefix="dcptool-bench-")))
            precision = _four(targets, baseline, data, samples, model, place)
            entries: list[bench.Entry] = precision.entries
        else:
            resolved = bench_targets.resolved(targets, baseline, model)
            entries, reference = stack.enter_context(resolved)
        if min_speedup is not None and reference is None:
            raise UsageError(
                "--min-speedup needs something to compare with",
                try_="name two targets, or --baseline TARGET",
            )
        noise = machine.disturbance()
        if noise:
            console.warn(noise)
        document: dict[str, Any] = {
            "machine": machine.facts(),
            "denormal_as_zero": denormal_as_zero,
        }
        if with_torch:
            document["torch"] = _torch_rows(bench.distinct(entries), settings)
        document |= bench.bench(entries, settings, baseline=reference).document()
        if precision is not None:
            document["precision"] = bench_table.precision(document, precision.top1)
        if with_profile:
            document["profile"] = profile.document(bench.profiles(entries, settings))
    failure = _gate(document, min_speedup)
    if with_int8:
        pass  # the files were made for this, and are gone
    elif (
        len(targets) == 1 and bench_targets.is_artifact(targets[0]) and baseline in (None, "dense")
    ):
        from dcptool.cli import recorded
        from dcptool.report import page

        # A run may be handed on, so no path of this machine goes with it.
        rows = [{**row, "file": Path(row["file"]).name} for row in document["rows"]]
        kept = {**document, "rows": rows}
        page.after(Path(targets[0]), "bench", kept, recorded.typed())
    text = bench_table.text(
        document, style="csv" if as_csv else "markdown" if as_markdown else "plain"
    )
    emit("bench", document, text, as_json=as_json, failure=failure)


def _four(
    targets: tuple[str, ...],
    baseline: str | None,
    data: dict[str, Any],
    samples: int,
    model: dict[str, Any],
    place: Path,
) -> Four:
    """The files of --int8, and their accuracies."""
    from dcptool.cli import recorded
    from dcptool.deploy import bench_targets, precision
    from dcptool.training.data import spec_of

    if len(targets) != 1 or not bench_targets.is_artifact(targets[0]) or baseline is not None:
        raise UsageError("--int8 is for one artifact", try_="dcptool bench runs/latest --int8")
    data = recorded.data_of(targets[0], data)
    spec = spec_of(data, seed=model["seed"], offline=model["offline"])
    return precision.four(Path(targets[0]), spec, samples, model["seed"], place)


def _torch_rows(entries: Any, settings: Any) -> list[dict[str, object]]:
    without = [entry.model for entry in entries if entry.network is None]
    if without:
        raise UsageError(
            f"--torch needs an artifact or a model name, and {without[0]} is a file",
            try_="dcptool bench runs/latest --torch",
        )
    from dcptool.deploy import torch_time
    from dcptool.deploy.session import cores

    networks = {entry.model: entry.network() for entry in entries}
    return [
        row.document()
        for threads in settings.threads or (cores(),)
        for batch_size in settings.batch_sizes
        for row in torch_time.measure(
            networks,
            batch_size=batch_size,
            threads=threads,
            warmup=settings.warmup,
            duration_s=settings.duration_s,
            seed=settings.seed,
        )
    ]


def _gate(document: dict[str, Any], limit: float | None) -> GateFailed | None:
    if limit is None:
        return None
    worst = min(document["speedup"], key=lambda entry: entry["ratio"])
    ok = worst["ratio"] >= limit
    document["gates"] = [{"name": "speedup", "limit": limit, "value": worst["ratio"], "ok": ok}]
    if ok:
        return None
    return GateFailed(
        f"{worst['model']} is {worst['ratio']:.2f} times as fast as {worst['baseline']}; "
        f"wanted {limit:g}",
        why=f"interval {worst['low']:.2f} to {worst['high']:.2f} at batch size "
        f"{worst['batch_size']}, threads {worst['threads']}",
        try_="dcptool bench --profile, which shows where the time goes",
    )
