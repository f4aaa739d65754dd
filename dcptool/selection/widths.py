"""How many units each group keeps: a rate for all, or one budget spent where it loses least.

Widths are multiples that the hardware likes. Which units stay is the method's business, and what
a network of given widths costs is asked of a function: MACs, parameters or milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dcptool.network.base import Network
from dcptool.network.cost import plan_cost
from dcptool.network.graph import ChannelGraph, Group
from dcptool.network.surgery import removed_units
from dcptool.selection.settings import Selection

# Error at each number of units kept, from none to all.
Curve = tuple[float, ...]
Widths = dict[str, int]
CostOf = Callable[[Mapping[str, int]], float]

# A group narrower than this many steps is rounded more finely: whole blocks would be most of it.
FEWEST_STEPS = 4
# Share of the MACs by which rounding may move what a rate asked for.
SLACK = 0.01


def step_of(units: int, multiple: int) -> int:
    """The multiple for a group of this size."""
    step = multiple
    while step > 1 and units < FEWEST_STEPS * step:
        step //= 2
    return max(step, 1)


def good_widths(units: int, multiple: int) -> list[int]:
    """Widths worth having, small to large; the whole group is always one.

    Below the first multiple they are halves of it, down to one: a rate may ask for less.
    """
    step = step_of(units, multiple)
    parts = {step >> half for half in range(1, step.bit_length())}
    return sorted({*parts, *range(step, units + 1, step), units})


def nearest(units: int, kept: int, multiple: int) -> int:
    """The good width next to `kept`, the larger of two."""
    return min(good_widths(units, multiple), key=lambda width: (abs(width - kept), -width))


def macs_of(network: Network, graph: ChannelGraph) -> CostOf:
    """MACs for widths by group, whichever channels they are."""

    def count(widths: Mapping[str, int]) -> float:
        return plan_cost(graph, network.module, removed_by(graph, widths)).macs

    return count


def params_of(network: Network, graph: ChannelGraph) -> CostOf:
    """Parameters for widths by group."""

    def count(widths: Mapping[str, int]) -> float:
        return plan_cost(graph, network.module, removed_by(graph, widths)).params

    return count


def removed_by(graph: ChannelGraph, widths: Mapping[str, int]) -> set[int]:
    """The units that go when the first ones of each group stay."""
    return removed_units(graph, {name: range(width) for name, width in widths.items()})


def rounded(
    groups: Sequence[Group], exact: Mapping[str, int], multiple: int, cost: CostOf
) -> Widths:
    """Good widths next to the exact ones, up or down, so that the cost stays what it was."""
    sizes = {group.name: len(group.units) for group in groups}
    widths = {name: nearest(sizes[name], kept, multiple) for name, kept in exact.items()}
    wanted = cost(exact)
    while abs(cost(widths) / wanted - 1) > SLACK:
        up = cost(widths) < wanted
        moves = []
        for name, width in widths.items():
            good = good_widths(sizes[name], multiple)
            place = good.index(width) + (1 if up else -1)
            if 0 <= place < len(good):
                away = abs(good[place] - exact[name]) / exact[name]
                moves.append((away, name, good[place]))
        off = abs(cost(widths) - wanted)
        for _, name, width in sorted(moves):
            moved = {**widths, name: width}
            if abs(cost(moved) - wanted) < off:
                widths = moved
                break
        else:
            return widths
    return widths


def at_rate(network: Network, graph: ChannelGraph, settings: Selection) -> Widths:
    """Good widths next to the counts of the rate, at its MACs."""
    groups = settings.groups(graph)
    exact = {group.name: settings.kept(group) or len(group.units) for group in groups}
    if settings.round_to == 1:
        return exact
    return rounded(groups, exact, settings.round_to, macs_of(network, graph))


def reach(groups: Sequence[Group], multiple: int, cost: CostOf) -> tuple[float, float]:
    """The least and the greatest cost that widths of these groups can have."""
    least = {group.name: good_widths(len(group.units), multiple)[0] for group in groups}
    return cost(least), cost({group.name: len(group.units) for group in groups})


def spread(
    groups: Sequence[Group],
    curves: Mapping[str, Curve],
    budget: float,
    cost: CostOf,
    multiple: int = 1,
) -> Widths:
    """Widths of least total error whose cost does not exceed the budget.

    One price picks all widths at once: every group gives up units until the next one is worth
    its price. What is left of the budget goes to the units that are worth most.
    """
    full = {group.name: len(group.units) for group in groups}
    good = {name: good_widths(units, multiple) for name, units in full.items()}
    dense = cost(full)
    price_of = {}
    for name, units in full.items():
        half = max(1, units // 2)
        saved = dense - cost({**full, name: half})
        price_of[name] = max(saved, 1e-9 * dense) / max(1, units - half) / dense

    def at(price: float) -> Widths:
        return {
            name: min(good[name], key=lambda k: (curves[name][k] + price * price_of[name] * k, k))
            for name in full
        }

    low, high = 0.0, 1.0
    while cost(at(high)) > budget and high < 1e12:
        high *= 4.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(at(middle)) > budget else (low, middle)
    widths = at(high)
    step = multiple
    while True:
        good = {name: good_widths(units, step) for name, units in full.items()}
        widths = _fill(widths, good, curves, price_of, budget, cost)
        if step == 1 or cost(widths) >= (1 - SLACK / 2) * budget:
            return widths
        step //= 2  # too coarse for what is left


def _fill(
    widths: Widths,
    good: Mapping[str, Sequence[int]],
    curves: Mapping[str, Curve],
    price_of: Mapping[str, float],
    budget: float,
    cost: CostOf,
) -> Widths:
    """Give what is left of the budget to the units that are worth most."""
    closed: set[str] = set()
    while True:
        ways = {}
        for name, width in widths.items():
            wider = next((w for w in good[name] if w > width), None)
            if wider is not None and name not in closed:
                gain = curves[name][width] - curves[name][wider]
                ways[name] = wider, gain / (wider - width) / price_of[name]
        if not ways:
            return widths
        best = max(ways, key=lambda name: ways[name][1])
        larger = {**widths, best: ways[best][0]}
        if cost(larger) > budget:
            closed.add(best)
        else:
            widths = larger
