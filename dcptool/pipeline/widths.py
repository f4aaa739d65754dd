"""From what was asked (a rate, MACs, parameters, milliseconds) to the width of every group.

Says before any training what can be reached, and refuses what cannot. Milliseconds are
predicted from a table and then measured on the real widths, until both agree.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import Tensor

from dcptool import console, files
from dcptool.errors import GateFailed, UsageError
from dcptool.network.base import Network
from dcptool.network.cost import plan_cost
from dcptool.network.graph import ChannelGraph, Group, build_graph
from dcptool.network.surgery import cut, plan_cuts
from dcptool.pipeline.job import Job
from dcptool.pipeline.prune_record import WIDTHS_FILE
from dcptool.selection import curves
from dcptool.selection.methods.slimming import global_counts, norm_scales
from dcptool.selection.settings import Budget, Selection
from dcptool.selection.widths import (
    CostOf,
    Curve,
    Widths,
    at_rate,
    good_widths,
    macs_of,
    nearest,
    params_of,
    reach,
    removed_by,
    rounded,
    spread,
)
from dcptool.training.dist import SINGLE, Dist

TOLERANCE = {"macs": 0.01, "params": 0.01, "latency": 0.05}
UNITS = {"macs": "MACs", "params": "parameters", "latency": "ms"}
# Widths at which the latency table is measured.
SHARES = (1.0, 0.75, 0.5, 0.25)
ATTEMPTS = 5


def check_reach(network: Network, settings: Selection, dist: Dist = SINGLE) -> None:
    """Refuse a budget that no widths can meet, naming the range; one process measures for all."""
    budget = settings.budget
    if budget is None:
        return
    graph = build_graph(network.module, network.input.size)
    groups = settings.groups(graph)
    if budget.kind == "latency":
        ends = [_least(groups, settings), {group.name: len(group.units) for group in groups}]
        found = _measured(network, graph, ends, budget) if dist.is_writer else (0.0, 0.0)
        low, high = dist.broadcast(found)
    else:
        low, high = reach(groups, settings.round_to, _cost(network, graph, budget.kind))
    wanted = budget.value * high if budget.is_share else budget.value
    if low <= wanted < high:
        return
    raise UsageError(
        f"a target of {_say(budget.kind, wanted)} is out of reach",
        why=f"widths of {len(groups)} groups give {_say(budget.kind, low)} to "
        f"{_say(budget.kind, high)}: {low / high:.3f} to 1 of the dense network",
        try_=f"--target-{budget.kind} {min(max(0.5, low / high + 0.05), 0.95):.2f}"
        + (", or --prune-residual for a wider range" if not settings.prune_residual else ""),
    )


def by_scale(network: Network, graph: ChannelGraph, settings: Selection) -> Widths:
    """The widths that one threshold on all norm scales leaves (network slimming)."""
    groups = settings.groups(graph)
    scales = {group.name: norm_scales(network.module, graph, group) for group in groups}
    found = {name: values for name, values in scales.items() if values is not None}
    # A group without a norm is named and refused when its turn comes.
    counts = dict.fromkeys(scales, 1) | global_counts(found, settings.rate or Fraction(0))
    return rounded(groups, counts, settings.round_to, macs_of(network, graph))


def decide(
    network: Network,
    images: list[Tensor],
    job: Job,
    folder: Path,
    dist: Dist,
    marks: Mapping[str, str],
) -> Selection:
    """The settings with a width for each group, where something but a plain rate is asked.

    They are recorded with `marks`, what the run was asked for: whoever asks for something else
    takes none of them.
    """
    settings = job.selection
    by_curves = settings.budget is not None or settings.widths == "curves"
    by_scales = settings.method == "slimming"
    if settings.plan is not None or settings.epsilon is not None or settings.removes_nothing:
        return settings
    if not (by_curves or by_scales) and settings.round_to == 1:
        return settings
    path = folder / WIDTHS_FILE
    known = _recorded(path, marks) if dist.is_writer else None
    known = dist.broadcast(known)
    if known is not None:
        return replace(settings, plan=known)
    graph = build_graph(network.module, network.input.size)
    groups = settings.groups(graph)
    record: dict[str, object] = {"asked": dict(marks), "round_to": settings.round_to}
    if by_curves:
        found = job.curves or curves.measure(network, images, settings, dist, job.device)
        widths: Widths = {}
        if dist.is_writer:
            widths = _within(network, graph, groups, found, settings, record)
        record["curves"] = {n: [float(f"{e:.4g}") for e in curve] for n, curve in found.items()}
        widths = dist.broadcast(widths)
    elif by_scales:
        widths = by_scale(network, graph, settings)
    else:
        widths = at_rate(network, graph, settings)
    if dist.is_writer:
        files.publish_json(path, {"widths": widths, **record})
    dist.barrier()
    return replace(settings, plan=widths)


def target_of(folder: Path) -> dict[str, Any]:
    """What a budget asked for and what its widths come to, as the document tells it."""
    path = folder / WIDTHS_FILE
    saved: Any = files.read_json(path, what="the widths of the run") if path.is_file() else {}
    return {"target": saved["target"]} if "target" in saved else {}


def _recorded(path: Path, marks: Mapping[str, str]) -> Widths | None:
    """The widths that a run has chosen before it was stopped, if it was asked for the same."""
    if not path.is_file():
        return None
    saved: Any = files.read_json(path, what="the widths of the run")
    if saved.get("asked") != dict(marks):
        return None
    return {str(name): int(width) for name, width in saved["widths"].items()}


def read_curves(path: Path) -> dict[str, Curve]:
    """The curves that a run recorded with its widths."""
    saved: Any = files.read_json(path, what="the widths of a run")["curves"]
    return {str(name): tuple(float(e) for e in errors) for name, errors in saved.items()}


def _within(
    network: Network,
    graph: ChannelGraph,
    groups: list[Group],
    found: Mapping[str, Curve],
    settings: Selection,
    record: dict[str, object],
) -> Widths:
    """The widths that lose least within the budget; says in the record what they come to."""
    budget = settings.budget
    multiple = settings.round_to
    if budget is None:
        cost = macs_of(network, graph)
        exact = {group.name: settings.kept(group) or len(group.units) for group in groups}
        return spread(groups, found, cost(exact), cost, multiple)
    if budget.kind == "latency":
        widths, dense, wanted, reached = _by_latency(network, graph, groups, found, settings)
    else:
        cost = _cost(network, graph, budget.kind)
        dense = cost({group.name: len(group.units) for group in groups})
        wanted = budget.value * dense if budget.is_share else budget.value
        widths = spread(groups, found, wanted, cost, multiple)
        reached = cost(widths)
    target = {"dense": dense, "wanted": wanted, "reached": reached}
    record["target"] = {"kind": budget.kind, **target}
    off = reached / wanted - 1
    if budget.met and abs(off) > TOLERANCE[budget.kind]:
        raise GateFailed(
            f"the target of {_say(budget.kind, wanted)} was missed",
            why=f"the nearest widths come to {_say(budget.kind, reached)} ({100 * off:+.1f} %)",
            try_="--round-to 1"
            if budget.kind != "latency"
            else "again on a quiet machine, or another target",
        )
    console.note(f"widths chosen for {_say(budget.kind, wanted)}: {_say(budget.kind, reached)}")
    return widths


def _by_latency(
    network: Network,
    graph: ChannelGraph,
    groups: list[Group],
    found: Mapping[str, Curve],
    settings: Selection,
) -> tuple[Widths, float, float, float]:
    """Widths, and milliseconds: of the dense network, wanted, and measured."""
    from dcptool.deploy.latency import exported, milliseconds, tabulate

    budget = settings.budget
    assert budget is not None
    full = {group.name: len(group.units) for group in groups}
    steps = [
        {n: nearest(u, max(1, round(s * u)), settings.round_to) for n, u in full.items()}
        for s in SHARES
    ]
    steps.append(_least(groups, settings))
    console.note("measuring the time of each layer at several widths")
    table = tabulate(
        [(cut_to(network, graph, w), _site_macs(network, graph, w)) for w in steps],
        _condition(budget),
    )

    def predicted(widths: Mapping[str, int]) -> float:
        return table.predict(_site_macs(network, graph, widths))

    dense = predicted(full)
    aim = budget.value if budget.is_share else budget.value / dense
    best: tuple[float, Widths, float, float, float] | None = None
    with exported({"dense": cut_to(network, graph, full)}) as whole:
        for _ in range(ATTEMPTS):
            widths = spread(groups, found, aim * dense, predicted, settings.round_to)
            with exported({"slim": cut_to(network, graph, widths)}) as slim:
                times = milliseconds({**whole, **slim}, _condition(budget))
            dense_ms, ms = times["dense"], times["slim"]
            wanted = budget.value * dense_ms if budget.is_share else budget.value
            console.detail(f"aimed at {aim:.3f} of dense, measured {ms / dense_ms:.3f}")
            if best is None or abs(ms / wanted - 1) < best[0]:
                best = abs(ms / wanted - 1), widths, dense_ms, wanted, ms
            if best[0] <= TOLERANCE["latency"] / 2:
                break
            aim *= wanted / ms
    assert best is not None
    return best[1:]


def _measured(
    network: Network, graph: ChannelGraph, widths: list[Widths], budget: Budget
) -> tuple[float, float]:
    """Milliseconds of two networks, timed beside each other."""
    from dcptool.deploy import latency

    slim = {str(i): cut_to(network, graph, each) for i, each in enumerate(widths)}
    with latency.exported(slim) as scanned:
        times = latency.milliseconds(scanned, _condition(budget))
    return times["0"], times["1"]


def measure_multiple(network: Network, settings: Selection, budget: Budget) -> int:
    """The multiple of channels at which this network is fastest here, per MAC; kept for later."""
    from dcptool.deploy import granularity, latency, machine

    facts = machine.facts()
    key = (
        f"{network.base} {network.input.size} {budget.provider} {budget.batch_size} "
        f"{budget.threads} {facts['cpu']} {facts['onnxruntime']}"
    )
    known = granularity.recall(key)
    if known is not None:
        return known
    graph = build_graph(network.module, network.input.size)
    cost = macs_of(network, graph)
    console.note("timing this network at several multiples of channels")
    plans = {}
    for multiple in granularity.CANDIDATES:
        plans[multiple] = at_rate(network, graph, replace(settings, round_to=multiple))
    slim = {str(m): cut_to(network, graph, widths) for m, widths in plans.items()}
    with latency.exported(slim) as scanned:
        times = latency.milliseconds(scanned, _condition(budget))
    found = granularity.best({m: times[str(m)] / cost(plans[m]) for m in plans})
    granularity.remember(key, found)
    return found


def _condition(budget: Budget) -> Any:
    from dcptool.deploy.bench import Condition
    from dcptool.deploy.session import cores

    return Condition(budget.provider, budget.batch_size, budget.threads or cores())


def _least(groups: list[Group], settings: Selection) -> Widths:
    return {g.name: good_widths(len(g.units), settings.round_to)[0] for g in groups}


def _cost(network: Network, graph: ChannelGraph, kind: str) -> CostOf:
    return macs_of(network, graph) if kind == "macs" else params_of(network, graph)


def _site_macs(network: Network, graph: ChannelGraph, widths: Mapping[str, int]) -> dict[str, int]:
    found = plan_cost(graph, network.module, removed_by(graph, widths))
    return {name: macs for name, (_, macs) in found.by_site.items() if macs}


def cut_to(network: Network, graph: ChannelGraph, widths: Mapping[str, int]) -> Network:
    """A network of these widths, with whichever channels: it runs as fast as the final one."""
    module = copy.deepcopy(network.module).cpu().eval()
    cut(module, plan_cuts(graph, removed_by(graph, widths)))
    return Network(module, network.base, network.input, network.classes)


def _say(kind: str, value: float) -> str:
    return f"{value:.2f} ms" if kind == "latency" else f"{value:,.0f} {UNITS[kind]}"
