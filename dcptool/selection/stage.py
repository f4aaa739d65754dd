"""One stage of Algorithm 1: its layers in forward order, each group decided where it is read last.

Channels are masked here, not cut. A reader that decides nothing but sees a changed signal is
solved anew, near its present weights. A group whose readers lie in several segments is decided
before the walk, from all of them; the walk then passes each reader again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dcptool import console
from dcptool.errors import GateFailed, InputError
from dcptool.network.base import Cut, Network
from dcptool.network.graph import Group, build_graph
from dcptool.network.surgery import silence
from dcptool.selection.chain import Chain, build_chain
from dcptool.selection.choice import Choice, Edge, Report, unsolvable, whole
from dcptool.selection.gathering import of_sample
from dcptool.selection.gram import (
    Moments,
    Ranking,
    best_ridge,
    refit,
    relative,
    solver,
)
from dcptool.selection.greedy import LossAt, Sgd, choose
from dcptool.selection.limits import MOST_COLUMNS, is_looped
from dcptool.selection.methods import METHODS
from dcptool.selection.methods.question import Question, filter_sums
from dcptool.selection.methods.slimming import norm_scales
from dcptool.selection.probe import Probe, Tick, nothing
from dcptool.selection.problems import Problems
from dcptool.selection.rectify import rectified
from dcptool.selection.samples import Samples
from dcptool.selection.settings import Selection, stop_by_epsilon
from dcptool.selection.slopes import slopes
from dcptool.selection.steps import Steps
from dcptool.selection.store import Room
from dcptool.selection.widths import nearest

# A layer that has lost no input is mended only where it is sure.
READER_RIDGE = 1e-2


class Stage:
    """The layers of one stage: each decides the groups it reads last, or is refitted."""

    def __init__(
        self,
        network: Network,
        dense: nn.Module,
        current: nn.Module,
        cuts: dict[str, Cut],
        settings: Selection,
        room: Room,
        samples: Samples,
        pivot: str | None,
        losses: Sequence[LossAt],
        tick: Tick = nothing,
    ) -> None:
        self.settings = settings
        self.tick = tick
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
            samples,
            settings.positions,
            settings.seed,
            settings.target,
            tick,
            sys.maxsize if self._walks() else MOST_COLUMNS,
        )
        self.current = current
        self.dist = samples.dist
        self.removed: set[int] = set()
        self.problems = Problems(self.probe, self.graph, settings)
        self.refits = METHODS[settings.method].refits
        self.steps: Steps | None = None
        if settings.loop_epochs and losses and settings.discrimination:
            strength, count = settings.discrimination, settings.loop_epochs
            self.steps = Steps(self.probe, pivot, losses, strength, count)

    def run(
        self,
        first: int,
        last: int,
        choices: list[Choice],
        tell: Report,
        report: Report | None,
        edge: Edge,
        skip: int = 0,
        passed: Callable[[str], None] = lambda _: None,
    ) -> set[int]:
        """Walk the segments `first` to `last`, without the first `skip` layers.

        Returns the units that go; what is decided is added to `choices`, and `passed` hears of
        each layer that is done with.
        """
        last = min(last, len(self.chain.segments))
        known = {choice.group for choice in choices}

        def decided(choice: Choice) -> None:
            choices.append(choice)
            tell(choice)
            if report is not None:
                report(choice)

        with torch.no_grad():
            edge(first, skip)
            new = [group for group in self._spanning(last) if group.name not in known]
            wide = [group for group in new if self._goes(group)]
            is_there = self.survey(min([first, *map(self._begins, wide)]), last)
            for group in new:
                if not self._goes(group):
                    decided(whole(group))
            if wide:
                self._decide_first(wide, decided, lambda: edge(first, skip))
                first, skip = min(first, *[self._begins(group) for group in wide]), 0
            decided_at = self._decisions(last)
            is_there = is_there and not wide
            for place in range(first, last):
                layers = self.chain.segments[place].layers
                loses = any(self._goes(g) for name in layers for g in decided_at.get(name, []))
                # Up to the first cut there is nothing to look at on the way.
                if not is_there and (loses or self.removed or self.probe.cuts):
                    self.probe.begin(place)
                    is_there = True
                for number, name in enumerate(layers):
                    if place == first and number < skip:
                        passed(name)
                        continue
                    groups = [g for g in decided_at.get(name, []) if g.name not in known]
                    if not groups:
                        edge(place, number)
                    # What stays whole comes first: after a stop between two groups, whether this
                    # layer decides anything is still to be seen from those that are left.
                    for group in sorted(groups, key=self._goes):
                        edge(place, number)
                        decided(self._decide(group) if self._goes(group) else whole(group))
                    changed = bool(self.removed or self.probe.cuts)
                    decides = any(self._goes(group) for group in groups)
                    if not decides and changed and self.refits and self._solves(name):
                        touched = bool((~self._kept_columns(name)).any())
                        weakest = self.settings.ridge if touched else READER_RIDGE
                        self._refit(name, None, weakest)
                    passed(name)
                if is_there and place + 1 < len(self.chain.segments):
                    self.probe.advance()
        return self.removed

    def survey(self, first: int, last: int) -> bool:
        """See what the head's loss says of errors of each reader, before anything is cut.

        One pass serves the whole stage. What earlier layers of the stage lose moves it little, and
        a run that goes on has it from the state. Returns whether the probe stands at `first` now.
        """
        aware = self.settings.method == "dcp" and self.settings.discrimination and self.losses
        if not aware or self._walks() or self.problems.slopes:
            return False
        groups = [group for group in self.settings.groups(self.graph) if self._goes(group)]
        readers = {name for group in groups for name in group.consumers}
        inside = [s.layers for s in self.chain.segments[first:last]]
        names = [name for layers in inside for name in layers if name in readers]
        if names:
            self.probe.begin(first)
            self.problems.slopes = slopes(self.probe, names, self.pivot, self.losses)
        return bool(names)

    def _goes(self, group: Group) -> bool:
        """Whether units of a group may go."""
        return self.settings.kept(group) != len(group.units)

    def _solves(self, name: str) -> bool:
        return self.settings.solver == "gram" and self.probe.readable(name)

    def _begins(self, group: Group) -> int:
        """The first segment that reads a group."""
        return min(self._places(group))

    def _places(self, group: Group) -> list[int]:
        return [self.chain.place_of(name) for name in group.consumers if name in self.chain.calls]

    def _is_spanning(self, group: Group) -> bool:
        return len(set(self._places(group))) > 1

    def _spanning(self, last: int) -> list[Group]:
        """Groups read in several segments, the last of them before the end of this stage."""
        return [
            group
            for group in self.settings.groups(self.graph)
            if self._is_spanning(group) and max(self._places(group)) < last
        ]

    def _decisions(self, last: int) -> dict[str, list[Group]]:
        """Groups by the layer that reads them last, but for those decided before the walk."""
        order = {name: i for i, name in enumerate(self.graph.sites)}
        spanning = {group.name for group in self._spanning(last)}
        found: dict[str, list[Group]] = {}
        for group in self.settings.groups(self.graph):
            if group.name not in spanning:
                found.setdefault(max(group.consumers, key=order.__getitem__), []).append(group)
        return found

    def _decide_first(
        self, groups: Sequence[Group], decided: Report, edge: Callable[[], None]
    ) -> None:
        """Choose channels of groups with readers in several segments, from all their readers."""
        if self._walks():
            for group in groups:
                edge()
                self.probe.begin(self._begins(group))
                names = [name for name in group.consumers if self._is_solvable(name)]
                decided(self._decide_by_walking(group, names))
            return
        seen: dict[str, tuple[Moments, Tensor]] = {}
        zeros: dict[str, Tensor | None] = {}
        if METHODS[self.settings.method].needs_data:
            first = min(self._begins(group) for group in groups)
            last = max(max(self._places(group)) for group in groups)
            readers = {name for group in groups for name in group.consumers}
            self.probe.begin(first)
            for place in range(first, last + 1):
                for name in self.probe.segment.layers:
                    if name in readers and self.probe.readable(name):
                        # Errors of readers count relative to what each of them has to explain.
                        found = self.probe.moments(name, None)
                        moments, weights = self.problems.before(name, found)
                        seen[name] = relative(moments), weights
                        for group in groups if self.settings.method == "apoz" else ():
                            if name in group.consumers and group.name not in zeros:
                                zeros[group.name] = self.probe.zeros(name, group)
                if place < last:
                    self.probe.advance()
        for group in groups:
            problems = {
                name: (self.about(seen[name][0], name, group), self._left(seen[name][1], name))
                for name in group.consumers
                if name in seen
            }
            ranking = self._rank(group, problems, zeros.get(group.name))
            choice = self._keep(group, ranking)
            for name in group.consumers:
                self._mask(name)
            decided(choice)

    def about(self, moments: Moments, name: str, group: Group) -> Moments:
        """Moments of what is left of a reader's columns, with the units of one group."""
        kept = torch.nonzero(self._kept_columns(name)).flatten()
        unit = torch.cat([self.probe.units(name, group), torch.tensor([-1])])[kept]
        s = moments.s[kept][:, kept]
        return Moments(s, moments.c[kept], moments.energy, unit, moments.rows)

    def _left(self, weights: Tensor, name: str) -> Tensor:
        return weights[self._kept_columns(name)]

    def _walks(self) -> bool:
        return is_looped(self.settings)

    def _is_solvable(self, name: str) -> bool:
        place = self.chain.place_of(name) if name in self.chain.calls else None
        return place is not None and self.probe.readable(name, place)

    def _decide(self, group: Group) -> Choice:
        local = [n for n in group.consumers if n in self.probe.segment.layers]
        local = [n for n in local if self.probe.readable(n)]
        if self._walks():
            return self._decide_by_walking(group, local)
        moments: dict[str, Moments] = {}
        if METHODS[self.settings.method].needs_data:
            moments = {name: self.probe.moments(name, group, sampled=self.refits) for name in local}
        problems = {name: self.problems.of(name, group, found) for name, found in moments.items()}
        zeros = None
        if self.settings.method == "apoz" and local:
            zeros = self.probe.zeros(local[0], group)
        choice = self._keep(group, self._rank(group, problems, zeros))
        solved: list[str] = []
        for name in group.consumers:
            if self.refits and name in moments:
                # What a gate lets through has changed with the layer that feeds the gate.
                stale = any(self.probe.depends(name, earlier) for earlier in solved)
                if stale:
                    with self.probe.undisturbed():
                        moments[name] = self.probe.moments(name, group, sampled=True)
                self._refit(name, moments[name], self.settings.ridge)
                solved.append(name)
            else:
                self._mask(name)
        return choice

    def _keep(self, group: Group, ranking: Ranking) -> Choice:
        """Decide how many units stay, and note which go."""
        kept, why = self._count(group, ranking)
        stay = ranking.order[:kept]
        self.removed |= {u for i, u in enumerate(group.units) if i not in set(stay)}
        return Choice(
            group.name,
            len(group.units),
            tuple(sorted(stay)),
            ranking.losses,
            why,
            order=ranking.order,
            smallest=ranking.smallest,
        )

    def _decide_by_walking(self, group: Group, local: Sequence[str]) -> Choice:
        """Algorithm 2 itself, on the readers in this segment or later."""
        if not local:
            raise unsolvable(group)
        joint = self.probe.joint(local, self.pivot, self.losses, self.settings.discrimination)
        order = self.settings.recorded(group)
        if order is None and self.settings.method == "random":
            empty = torch.zeros(len(group.units))
            question = Question(group, (), (), empty, None, self.settings.seed)
            order = METHODS["random"].order(question).order
        with console.progress(group.name, self.settings.kept(group) or len(group.units)) as task:

            def step(_unit: int, loss: float, _norm: float) -> None:
                self.tick()
                task.advance(1, f"loss {loss:.4g}")

            found = choose(
                joint,
                {name: self.probe.channel_units(name, group) for name in local},
                len(group.units),
                count=self.settings.kept(group),
                epsilon=self.settings.epsilon,
                order=order,
                sgd=Sgd(epochs=max(1, self.settings.loop_epochs)),
                step=step,
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

    def _rank(
        self,
        group: Group,
        problems: Mapping[str, tuple[Moments, Tensor]],
        zeros: Tensor | None,
    ) -> Ranking:
        """Ask the method, or take the order that an earlier run recorded."""
        method = METHODS[self.settings.method]
        if method.needs_data and not problems:
            raise unsolvable(group)
        recorded = self.settings.recorded(group)
        if recorded is not None:
            old = self.settings.reuse[group.name]
            return Ranking(recorded, old.losses, old.smallest)
        outputs = {name: self.graph.sites[name].outputs.tolist() for name in group.producers}
        question = Question(
            group,
            [moments for moments, _ in problems.values()],
            [weights for _, weights in problems.values()],
            filter_sums(self.current, group, outputs),
            zeros,
            self.settings.seed,
            self.settings.score,
            self.settings.kept(group),
            norm_scales(self.current, self.graph, group)
            if self.settings.method == "slimming"
            else None,
        )
        ranking = self.dist.broadcast(method.order(question))
        if any(not math.isfinite(loss) for loss in ranking.losses):
            raise GateFailed(
                f"the loss of {group.name} is not finite", why="its features or weights overflow"
            )
        return ranking

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
        exact = stop_by_epsilon(ranking.losses, self.settings.epsilon)
        kept = nearest(len(group.units), exact, self.settings.round_to)
        return kept, "epsilon" if kept == exact else f"epsilon at {exact}, rounded"

    def _refit(self, name: str, moments: Moments | None, weakest: float) -> None:
        """Solve a reader anew for the columns that are left, as near its weights as pays."""
        moments = moments or self.probe.moments(name, None, sampled=True)
        kept = self._kept_columns(name)
        kept[-1] = self.probe.has_bias(name)
        toward = self.probe.weights(name)
        ridge = best_ridge(moments, kept, toward, self.probe.output_weights(name), weakest)
        weights = refit(moments, kept, ridge=ridge, toward=toward)
        if moments.sample is not None:
            seen = of_sample(moments, moments.sample, self.probe.add_up)
            solve = solver(seen, kept, ridge=ridge)
            weights = rectified(moments.sample, weights, solve, self.probe.add_up)
        self.probe.write(name, weights)
        if self.steps is not None:
            self.steps.take(name, moments, kept, ridge, weights)

    def _kept_columns(self, name: str) -> Tensor:
        return self.columns_without(name, self.removed)

    def columns_without(self, name: str, units: Collection[int]) -> Tensor:
        """Which columns of a reader are left without some units; the constant, last, always is."""
        inputs = torch.from_numpy(self.graph.sites[name].inputs)
        gone = torch.isin(inputs, torch.tensor(sorted(units), dtype=torch.long))
        width = (len(self.probe.weights(name)) - 1) // len(inputs)
        return torch.cat([~gone.repeat_interleave(width), torch.ones(1, dtype=torch.bool)])

    def _mask(self, name: str) -> None:
        """Zero the columns of removed units, and leave the rest as it is."""
        inputs = torch.from_numpy(self.graph.sites[name].inputs)
        gone = torch.isin(inputs, torch.tensor(sorted(self.removed), dtype=torch.long))
        layer = self.current.get_submodule(name)
        silence(layer, gone.nonzero().flatten().to(next(layer.parameters()).device))
        self.probe.changed(name)
