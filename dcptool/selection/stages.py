"""Algorithm 1: stage by stage, fine-tune with a head, then choose the channels of its layers.

Owns the order of the work and nothing else: ranking is a method's, counting the budget's, moments
the probe's, training `fit`'s. Inside a stage channels are masked; at its end they are cut.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dcptool import console
from dcptool.errors import GateFailed, InputError
from dcptool.network.base import Cut, Network
from dcptool.network.graph import ChannelGraph, Group, build_graph
from dcptool.network.surgery import Proof, compose, cut, plan_cuts, prove
from dcptool.selection.chain import Chain, build_chain
from dcptool.selection.gram import Moments, Ranking, refit
from dcptool.selection.greedy import LossAt, choose
from dcptool.selection.joint import join, weigh
from dcptool.selection.methods import METHODS
from dcptool.selection.methods.question import Question, filter_sums
from dcptool.selection.probe import Probe
from dcptool.selection.settings import Selection, stop_by_epsilon
from dcptool.selection.store import Room

READER_RIDGE = 1e-2
# Methods that the paper trains channel by channel; the others have a closed form of their own.
LOOPED = ("dcp", "random")


@dataclass(frozen=True)
class Choice:
    """What was decided for one group."""

    group: str
    units: int
    kept: tuple[int, ...]
    losses: tuple[float, ...]
    why_stopped: str
    dead: int = 0
    order: tuple[int, ...] = ()
    norms: tuple[float, ...] = ()


@dataclass
class Outcome:
    """A pruned network and how it came about."""

    network: Network
    choices: list[Choice] = field(default_factory=list)
    proof: Proof | None = None


Report = Callable[[Choice], None]
# Fine-tunes before a stage; returns the loss of the stage's head, one for each batch of images.
FitStage = Callable[[nn.Module, str | None, int], Sequence[LossAt]]


def select(
    network: Network,
    images: Sequence[Tensor],
    settings: Selection,
    *,
    fit_stage: FitStage | None = None,
    report: Report | None = None,
) -> Outcome:
    """Prune a network on batches of calibration images; the given module is left alone.

    `fit_stage(module, pivot, stage)` fine-tunes before a stage and gives the head's losses;
    without it nothing is trained and channels are ordered by reconstruction alone.
    """
    graph = build_graph(network.module, network.input.size)
    if not settings.groups(graph):
        raise nothing_to_prune(network, graph)
    dense = network.module.eval()
    current = copy.deepcopy(dense)
    method = METHODS[settings.method]
    outcome = Outcome(network)
    cuts: dict[str, Cut] = {}
    stages = plan_stages(network, graph, settings) if fit_stage is not None else [(None, 10**9)]
    room = Room(int(settings.cache_gb * 2**30))
    losses: Sequence[LossAt] = ()
    first = 0
    try:
        with console.progress("prune", len(settings.groups(graph))) as task:
            for number, (pivot, last) in enumerate(stages):
                if fit_stage is not None:
                    losses = fit_stage(current, pivot, number)
                current.eval()
                stage = _Stage(network, dense, current, cuts, settings, room, pivot, losses)
                removed = stage.run(first, last, images, outcome, task, report, method.refits)
                first = min(last, len(stage.chain.segments))
                fresh = plan_cuts(stage.graph, removed)
                outcome.proof = prove(current, stage.graph, removed, network.input.size)
                cut(current, fresh)
                cuts = compose(cuts, fresh)
    finally:
        room.close()
    outcome.network = Network(
        current,
        network.base,
        network.input,
        network.classes,
        compose(network.cuts, cuts),
        network.weights,
    )
    return outcome


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


class _Stage:
    """The layers of one stage: each decides the groups it reads last, or is refitted."""

    def __init__(
        self,
        network: Network,
        dense: nn.Module,
        current: nn.Module,
        cuts: dict[str, Cut],
        settings: Selection,
        room: Room,
        pivot: str | None,
        losses: Sequence[LossAt],
    ) -> None:
        self.settings = settings
        self.pivot, self.losses = pivot, losses
        self.graph = build_graph(current, network.input.size)
        names = [site.name for site in self.graph.sites.values() if site.is_dense]
        self.chain: Chain = build_chain(current, network.input.size, names)
        self.probe = Probe(
            self.chain,
            self.graph,
            dense,
            current,
            cuts,
            room,
            settings.positions,
            settings.seed,
            settings.target,
        )
        self.current = current
        self.removed: set[int] = set()

    def run(
        self,
        first: int,
        last: int,
        images: Sequence[Tensor],
        outcome: Outcome,
        task: console.Task,
        report: Report | None,
        refits: bool,
    ) -> set[int]:
        """Walk the segments `first` to `last`; returns the units that go."""
        decided_at = self._decisions()
        last = min(last, len(self.chain.segments))
        changed = any(cut_.inputs is not None for cut_ in self.probe.cuts.values())
        with torch.no_grad():
            self.probe.begin(images, first)
            for place in range(first, last):
                for name in self.probe.segment.layers:
                    groups = decided_at.get(name, [])
                    for group in groups:
                        choice = self._decide(group, refits)
                        changed = True
                        outcome.choices.append(choice)
                        task.advance(
                            1, f"{group.name}: {len(choice.kept)} of {choice.units} channels"
                        )
                        if report is not None:
                            report(choice)
                    if not groups and changed and refits and self._solves(name):
                        self._refit(name, None, ridge=READER_RIDGE)
                if place + 1 < len(self.chain.segments):
                    self.probe.advance()
        return self.removed

    def _solves(self, name: str) -> bool:
        return self.settings.solver == "gram" and self.probe.readable(name)

    def _decisions(self) -> dict[str, list[Group]]:
        """Groups by the layer that reads them last."""
        order = {name: i for i, name in enumerate(self.graph.sites)}
        found: dict[str, list[Group]] = {}
        for group in self.settings.groups(self.graph):
            found.setdefault(max(group.consumers, key=order.__getitem__), []).append(group)
        return found

    def _decide(self, group: Group, refits: bool) -> Choice:
        local = [n for n in group.consumers if self.probe.chain.calls.get(n) and self._is_here(n)]
        if self.settings.solver == "sgd" and self.settings.method in LOOPED:
            return self._decide_by_walking(group, local)
        ranking, moments = self._rank(group, local)
        kept, why = self._count(group, ranking)
        stay = ranking.order[:kept]
        self.removed |= {u for i, u in enumerate(group.units) if i not in set(stay)}
        for name in group.consumers:
            if refits and name in moments:
                self._refit(name, moments[name], ridge=self.settings.ridge)
            else:
                self._mask(name)
        return Choice(
            group.name,
            len(group.units),
            tuple(sorted(stay)),
            ranking.losses,
            why,
            order=ranking.order,
        )

    def _decide_by_walking(self, group: Group, local: Sequence[str]) -> Choice:
        """Algorithm 2 itself, on the readers in this segment."""
        if not local:
            raise _unsolvable(group)
        joint = self.probe.joint(local, self.pivot, self.losses, self.settings.discrimination)
        order = None
        if self.settings.method == "random":
            empty = torch.zeros(len(group.units))
            order = (
                METHODS["random"]
                .order(Question(group, (), (), empty, None, self.settings.seed))
                .order
            )
        found = choose(
            joint,
            {name: self.probe.channel_units(name, group) for name in local},
            len(group.units),
            count=self.settings.kept(group),
            epsilon=self.settings.epsilon,
            order=order,
        )
        joint.features.clear()
        joint.targets.clear()
        for name, (weight, bias) in found.weights.items():
            layer: Any = self.current.get_submodule(name)
            layer.weight.data.copy_(weight)
            if bias is not None:
                layer.bias.data.copy_(bias)
        stay = set(found.order)
        self.removed |= {u for i, u in enumerate(group.units) if i not in stay}
        for name in group.consumers:
            self._mask(name)
        return Choice(
            group.name,
            len(group.units),
            tuple(sorted(stay)),
            tuple(found.losses),
            found.stopped,
            found.dead,
            tuple(found.order),
            tuple(found.norms),
        )

    def _is_here(self, name: str) -> bool:
        return name in self.probe.segment.layers and self.probe.readable(name)

    def _rank(self, group: Group, local: Sequence[str]) -> tuple[Ranking, dict[str, Moments]]:
        method = METHODS[self.settings.method]
        moments: dict[str, Moments] = {}
        if method.needs_data:
            if not local:
                raise _unsolvable(group)
            moments = {name: self.probe.moments(name, group) for name in local}
        weighed = [_weighed(m, self.probe.output_weights(n)) for n, m in moments.items()]
        if self.settings.method == "dcp" and self.settings.discrimination and self.losses:
            weighed = [self._discriminate(n, m) for n, m in moments.items()]
        weights = [self.probe.weights(n) * self.probe.output_weights(n) for n in moments]
        outputs = {name: self.graph.sites[name].outputs.tolist() for name in group.producers}
        question = Question(
            group,
            weighed,
            weights,
            filter_sums(self.current, group, outputs),
            self._zeros(group, local) if self.settings.method == "apoz" else None,
            self.settings.seed,
            self.settings.score,
        )
        ranking = method.order(question)
        if any(not math.isfinite(loss) for loss in ranking.losses):
            raise GateFailed(
                f"the loss of {group.name} is not finite", why="its features or weights overflow"
            )
        return ranking, moments

    def _discriminate(self, name: str, moments: Moments) -> Moments:
        """Moments of the joint loss, for the order.

        The refit stays with the reconstruction: one Newton step of the head's loss with its
        empirical curvature overshoots, and was measured to wreck the network.
        """
        slopes = self.probe.slopes(name, self.pivot, self.losses)
        present = self.probe.weights(name)
        joint, metric = join(moments, slopes, present, self.settings.discrimination)
        return weigh(joint, metric)

    def _zeros(self, group: Group, local: Sequence[str]) -> Tensor | None:
        return self.probe.zeros(local[0], group) if local else None

    def _count(self, group: Group, ranking: Ranking) -> tuple[int, str]:
        kept = self.settings.kept(group)
        if kept is not None:
            return min(kept, len(group.units)), "count"
        assert self.settings.epsilon is not None
        if not ranking.losses:
            raise InputError(
                f"--method {self.settings.method} has no loss to stop by",
                try_="--rate instead of --epsilon, or --method dcp",
            )
        return stop_by_epsilon(ranking.losses, self.settings.epsilon), "epsilon"

    def _refit(self, name: str, moments: Moments | None, *, ridge: float) -> None:
        """Solve a reader anew for the columns that are left, near its present weights."""
        moments = moments or self.probe.moments(name, None)
        kept = self._kept_columns(name)
        kept[-1] = self.probe.has_bias(name)
        toward = self.probe.weights(name)
        self.probe.write(name, refit(moments, kept, ridge=ridge, toward=toward))

    def _kept_columns(self, name: str) -> Tensor:
        inputs = torch.from_numpy(self.graph.sites[name].inputs)
        gone = torch.isin(inputs, torch.tensor(sorted(self.removed), dtype=torch.long))
        width = (len(self.probe.weights(name)) - 1) // len(inputs)
        return torch.cat([~gone.repeat_interleave(width), torch.ones(1, dtype=torch.bool)])

    def _mask(self, name: str) -> None:
        """Zero the columns of removed units, and leave the rest as it is."""
        layer: Any = self.current.get_submodule(name)
        inputs = torch.from_numpy(self.graph.sites[name].inputs)
        gone = torch.isin(inputs, torch.tensor(sorted(self.removed), dtype=torch.long))
        layer.weight.data[:, gone] = 0.0


def _unsolvable(group: Group) -> InputError:
    return InputError(
        f"cannot choose channels of {group.name}",
        why="no layer that reads it can be solved for",
        try_=f"--keep {group.name}",
    )


def _weighed(moments: Moments, weights: Tensor) -> Moments:
    return Moments(
        moments.s, moments.c * weights, moments.energy * weights**2, moments.unit, moments.rows
    )


def nothing_to_prune(network: Network, graph: ChannelGraph) -> InputError:
    """The error for a network in which the given options open nothing."""
    statuses: Mapping[str, int] = {
        status: sum(g.status == status for g in graph.groups)
        for status in ("outside", "coupled", "locked")
    }
    reason = next((g.reason for g in graph.groups if g.status == "locked"), "")
    if statuses["outside"]:
        why, try_ = f"{statuses['outside']} groups are outside the paper's scope", "add --scope all"
    elif statuses["coupled"]:
        why = f"{statuses['coupled']} groups are tied by residual adds"
        try_ = "add --prune-residual"
    else:
        why = f"every group is locked, for example because {reason}"
        try_ = f"dcptool analyze {network.base}"
    return InputError(f"cannot prune {network.base}: no channel can be removed", why=why, try_=try_)
