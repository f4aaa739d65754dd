"""Algorithm 1: stage by stage, fine-tune with a head, then choose the channels of its layers.

Owns the order of the work and nothing else: ranking is a method's, counting the budget's, moments
the probe's, training `fit`'s. Inside a stage channels are masked; at its end they are cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from dcptool import console
from dcptool.errors import InputError
from dcptool.network.base import Cut, Network
from dcptool.network.cost import plan_cost
from dcptool.network.graph import ChannelGraph, build_graph
from dcptool.network.surgery import Proof, bake_all, compose, cut, plan_cuts, prove
from dcptool.selection.chain import build_chain
from dcptool.selection.choice import Choice, Report
from dcptool.selection.greedy import LossAt
from dcptool.selection.probe import Tick, nothing
from dcptool.selection.samples import share
from dcptool.selection.settings import Selection
from dcptool.selection.stage import Stage
from dcptool.selection.store import Room
from dcptool.training.dist import SINGLE, Dist


@dataclass
class Outcome:
    """A pruned network and how it came about."""

    network: Network
    choices: list[Choice] = field(default_factory=list)
    proof: Proof | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)


# Fine-tunes before a stage, unless that is done already (the last argument); returns the loss of
# the stage's head, one for each batch of images.
FitStage = Callable[[nn.Module, str | None, int, bool], Sequence[LossAt]]


@dataclass(frozen=True)
class Progress:
    """Where the work stands between two layers: enough to go on from there."""

    stage: int
    place: int
    layer: int
    cuts: Mapping[str, Cut]
    removed: tuple[int, ...]
    choices: tuple[Choice, ...]
    weights: Mapping[str, Tensor]
    slopes: Mapping[str, Tensor]


Listen = Callable[[Progress], None]


def select(
    network: Network,
    images: Sequence[Tensor],
    settings: Selection,
    *,
    fit_stage: FitStage | None = None,
    losses: Sequence[LossAt] = (),
    report: Report | None = None,
    edge: Listen | None = None,
    tick: Tick = nothing,
    start: Progress | None = None,
    dist: Dist = SINGLE,
    device: str = "cpu",
) -> Outcome:
    """Prune a network on batches of calibration images; the given module is left alone.

    `fit_stage(module, pivot, stage, is_fitted)` fine-tunes before a stage and gives the head's
    losses; without it nothing is trained, and `losses` of the network's own scores, one for each
    batch, stand in for the heads', or channels are ordered by reconstruction alone.
    `edge` hears of the progress between two layers and may raise to end the work, as may `tick`,
    which is called more often: the last progress holds until the next. `start` is such a progress
    to go on from, with the same result as if there had been no end. Several processes each hand
    in all images and work on their rows of each batch.
    """
    graph = build_graph(network.module, network.input.size)
    if not settings.groups(graph):
        raise nothing_to_prune(network, graph, settings)
    dense = copy.deepcopy(network.module).eval().to(device)
    current = copy.deepcopy(dense)
    # Weights that are solved for must be those that are used.
    cuts = {} if settings.removes_nothing else bake_all(current)
    outcome = Outcome(network)
    stages = plan_stages(network, graph, settings) if fit_stage is not None else [(None, 10**9)]
    room = Room(int(settings.cache_gb * 2**30), device=device)
    samples = share(images, dist, device)
    begun, first = 0, 0
    before: Stage | None = None
    if start is not None:
        begun, first, cuts = start.stage, start.place, dict(start.cuts)
        cut(current.cpu(), cuts)
        current.load_state_dict(start.weights)
        outcome.choices = list(start.choices)
    try:
        work = _work(network, graph, settings)
        with console.progress("prune", sum(work.values())) as task:

            def tell(choice: Choice) -> None:
                said = f"{choice.group}: {len(choice.kept)} of {choice.units} channels"
                task.advance(work.pop(choice.group, 0.0), said)

            def passed(layer: str) -> None:
                task.advance(work.pop(_layer(layer), 0.0))

            for choice in outcome.choices:
                tell(choice)
            for number, (pivot, last) in list(enumerate(stages))[begun:]:
                goes_on = start is not None and number == begun
                if fit_stage is not None:
                    losses = fit_stage(current, pivot, number, goes_on)
                current.eval().to(device)
                stage = Stage(
                    network, dense, current, cuts, settings, room, samples, pivot, losses, tick
                )
                if before is not None:
                    stage.probe.inherit(before.probe)
                before = stage
                for segment in stage.chain.segments[:first]:
                    for layer in segment.layers:
                        passed(layer)
                skip = 0
                if start is not None and goes_on:
                    stage.removed, skip = set(start.removed), start.layer
                    stage.problems.slopes = start.slopes

                def at_edge(
                    place: int, layer: int, stage: Stage = stage, number: int = number
                ) -> None:
                    if edge is not None:
                        removed, choices = tuple(sorted(stage.removed)), tuple(outcome.choices)
                        weights, known = current.state_dict(), stage.probe.cuts
                        now = (number, place, layer, known, removed, choices, weights)
                        edge(Progress(*now, stage.problems.slopes))

                removed = stage.run(
                    first, last, outcome.choices, tell, report, at_edge, skip, passed
                )
                first = min(last, len(stage.chain.segments))
                fresh = plan_cuts(stage.graph, removed)
                proof = prove(current.cpu(), stage.graph, removed, network.input.size)
                worst = outcome.proof is None or proof.difference >= outcome.proof.difference
                outcome.proof = proof if worst else outcome.proof
                cut(current, fresh)
                cuts = compose(cuts, fresh)
    finally:
        room.close()
    outcome.cuts = cuts
    outcome.network = Network(
        current,
        network.base,
        network.input,
        network.classes,
        compose(network.cuts, cuts),
        network.weights,
    )
    return outcome


def _work(network: Network, graph: ChannelGraph, settings: Selection) -> dict[str, float]:
    """About how long each group and each layer takes: the MACs that are looked at for it."""
    macs = {name: macs for name, (_, macs) in plan_cost(graph, network.module).by_site.items()}
    groups = {
        group.name: float(sum(macs.get(name, 0) for name in (*group.producers, *group.consumers)))
        for group in settings.groups(graph)
    }
    solved = (site.name for site in graph.sites.values() if site.is_dense)
    return groups | {_layer(name): float(macs.get(name, 0)) for name in solved}


def _layer(name: str) -> str:
    """The key of a layer beside groups, which are named after layers."""
    return f"layer {name}"


def solve_again(
    network: Network,
    outcome: Outcome,
    images: Sequence[Tensor],
    settings: Selection,
    *,
    tick: Tick = nothing,
    dist: Dist = SINGLE,
    device: str = "cpu",
) -> nn.Module:
    """The slim network with every layer solved once more, near the weights that it has."""
    dense = copy.deepcopy(network.module).eval().to(device)
    current = copy.deepcopy(outcome.network.module).eval().to(device)
    nothing_goes = replace(settings, plan={})
    room = Room(int(settings.cache_gb * 2**30), device=device)
    samples = share(images, dist, device)
    cuts = dict(outcome.cuts)
    try:
        with console.progress("sweep"):
            stage = Stage(
                network, dense, current, cuts, nothing_goes, room, samples, None, (), tick
            )
            stage.run(0, len(stage.chain.segments), [], lambda _: None, None, lambda *_: None)
    finally:
        room.close()
    return current.cpu()


def plan_stages(
    network: Network, graph: ChannelGraph, settings: Selection
) -> list[tuple[str | None, int]]:
    """Pivot module and end (in segments) of each stage; the last one has the network's own loss."""
    dense = [site.name for site in graph.sites.values() if site.is_dense]
    chain = build_chain(network.module, network.input.size, dense)
    losses = settings.losses or graph.structure.default_losses()
    stages: list[tuple[str | None, int]] = []
    for pivot in graph.structure.pivots(losses):
        inside = [i for i, s in enumerate(chain.segments) if _ends_in(s.layers, pivot, graph)]
        if inside and (not stages or max(inside) + 1 > stages[-1][1]):
            stages.append((pivot, max(inside) + 1))
    return [*stages, (None, len(chain.segments))]


def _ends_in(layers: Sequence[str], pivot: str, graph: ChannelGraph) -> bool:
    """Whether a segment lies before the end of the pivot module."""
    order = {name: i for i, name in enumerate(graph.sites)}
    within = [order[n] for n in order if n == pivot or n.startswith(pivot + ".")]
    return bool(layers) and bool(within) and all(order[n] <= max(within) for n in layers)


def nothing_to_prune(network: Network, graph: ChannelGraph, settings: Selection) -> InputError:
    """The error for a network in which the given options open nothing."""
    statuses: Mapping[str, int] = {
        status: sum(g.status == status for g in graph.groups)
        for status in ("outside", "coupled", "locked")
    }
    reason = next((g.reason for g in graph.groups if g.status == "locked"), "")
    if replace(settings, keep=()).groups(graph):
        why, try_ = "--keep leaves every group whole", "fewer or narrower patterns in --keep"
    elif statuses["outside"]:
        why, try_ = f"{statuses['outside']} groups are outside the paper's scope", "add --scope all"
    elif statuses["coupled"]:
        why = f"{statuses['coupled']} groups are tied by residual adds"
        try_ = "add --prune-residual"
    else:
        why = f"every group is locked, for example because {reason}"
        try_ = f"dcptool analyze {network.base}"
    return InputError(f"cannot prune {network.base}: no channel can be removed", why=why, try_=try_)
