"""What each width of each group costs in error, before anything is cut, and the best widths.

The curve of a group is the error with which its readers can be solved for from the units that
are left, relative to what they have to explain, on the dense network. One price on MACs then
picks all widths at once: every group gives up units until the next one is worth its price.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dcptool import console
from dcptool.network.base import Network
from dcptool.network.cost import plan_cost
from dcptool.network.graph import ChannelGraph, Group, build_graph
from dcptool.network.surgery import removed_units
from dcptool.selection.gram import Moments, backward_order
from dcptool.selection.samples import share
from dcptool.selection.settings import Selection
from dcptool.selection.stage import Stage, relative
from dcptool.selection.store import Room
from dcptool.training.dist import SINGLE, Dist

# Error at each number of units kept, from none to all.
Curve = tuple[float, ...]


def measure(
    network: Network,
    images: Sequence[Tensor],
    settings: Selection,
    dist: Dist = SINGLE,
    device: str = "cpu",
) -> dict[str, Curve]:
    """The curve of every group that is to be cut."""
    dense = copy.deepcopy(network.module).eval().to(device)
    room = Room(int(settings.cache_gb * 2**30), device=device)
    samples = share(images, dist, device)
    stage = Stage(network, dense, dense, {}, settings, room, samples, None, ())
    groups = settings.groups(stage.graph)
    order = {name: i for i, name in enumerate(stage.graph.sites)}
    ends: dict[str, list[Group]] = {}
    for group in groups:
        ends.setdefault(max(group.consumers, key=order.__getitem__), []).append(group)
    waiting = {name for group in groups for name in group.consumers}
    seen: dict[str, Moments] = {}
    found: dict[str, Curve] = {}
    try:
        with torch.no_grad(), console.progress("curves", len(groups)) as task:
            stage.probe.begin(0)
            for place in range(len(stage.chain.segments)):
                for name in stage.probe.segment.layers:
                    if name in waiting and stage.probe.readable(name):
                        seen[name] = relative(stage.weighed(name, stage.probe.moments(name, None)))
                    for group in ends.get(name, []):
                        found[group.name] = dist.broadcast(_curve(stage, group, seen))
                        task.advance(1, group.name)
                        groups = [g for g in groups if g is not group]
                    still = {reader for group in groups for reader in group.consumers}
                    seen = {reader: known for reader, known in seen.items() if reader in still}
                if place + 1 < len(stage.chain.segments):
                    stage.probe.advance()
    finally:
        room.close()
    return found


def _curve(stage: Stage, group: Group, seen: Mapping[str, Moments]) -> Curve:
    problems = [stage.about(seen[name], name, group) for name in group.consumers if name in seen]
    if not problems:
        return tuple(0.0 for _ in range(len(group.units) + 1))
    return backward_order(problems, len(group.units)).losses


def widths_at_rate(
    network: Network, settings: Selection, curves: Mapping[str, Curve]
) -> dict[str, int]:
    """The widths that lose least at the MACs of the uniform rate (and the rates by pattern)."""
    graph = build_graph(network.module, network.input.size)
    groups = settings.groups(graph)
    uniform = {group.name: settings.kept(group) or len(group.units) for group in groups}
    macs = macs_of(network, graph)
    return spread(groups, curves, macs(uniform), macs)


def macs_of(network: Network, graph: ChannelGraph) -> Callable[[Mapping[str, int]], int]:
    """A count of MACs for widths by group, whichever channels they are."""

    def count(widths: Mapping[str, int]) -> int:
        kept = {name: range(width) for name, width in widths.items()}
        return plan_cost(graph, network.module, removed_units(graph, kept)).macs

    return count


def spread(
    groups: Sequence[Group],
    curves: Mapping[str, Curve],
    budget: int,
    macs: Callable[[Mapping[str, int]], int],
) -> dict[str, int]:
    """Widths of least total error whose MACs do not exceed the budget."""
    full = {group.name: len(group.units) for group in groups}
    dense = macs(full)
    price_of = {}
    for name, units in full.items():
        half = max(1, units // 2)
        price_of[name] = (dense - macs({**full, name: half})) / max(1, units - half) / dense

    def best(name: str, price: float) -> int:
        each = price * price_of[name]
        return min(range(1, full[name] + 1), key=lambda k: (curves[name][k] + each * k, k))

    def at(price: float) -> dict[str, int]:
        return {name: best(name, price) for name in full}

    low, high = 0.0, 1.0
    while macs(at(high)) > budget and high < 1e12:
        high *= 4.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if macs(at(middle)) > budget else (low, middle)
    widths = at(high)
    return _fill(widths, full, curves, price_of, budget, macs)


def _fill(
    widths: dict[str, int],
    full: Mapping[str, int],
    curves: Mapping[str, Curve],
    price_of: Mapping[str, float],
    budget: int,
    macs: Callable[[Mapping[str, int]], int],
) -> dict[str, int]:
    """Give what is left of the budget to the units that are worth most."""
    closed: set[str] = set()
    while True:
        open_ = [n for n in full if widths[n] < full[n] and n not in closed]
        if not open_:
            return widths
        best = max(
            open_,
            key=lambda n: (curves[n][widths[n]] - curves[n][widths[n] + 1]) / price_of[n],
        )
        wider = {**widths, best: widths[best] + 1}
        if macs(wider) > budget:
            closed.add(best)
        else:
            widths = wider
