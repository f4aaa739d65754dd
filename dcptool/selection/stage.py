"""One stage of Algorithm 1: its layers in forward order, each group decided where it is read last.

Channels are masked here, not cut. A reader that decides nothing but sees a changed signal is
solved anew, near its present weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcptool import console
from dcptool.errors import GateFailed, InputError
from dcptool.network.base import Cut, Network
from dcptool.network.graph import Group, build_graph
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


Report = Callable[[Choice], None]


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
        choices: list[Choice],
        task: console.Task,
        report: Report | None,
        edge: Callable[[int], None],
    ) -> set[int]:
        """Walk the segments `first` to `last`; returns the units that go."""
        refits = METHODS[self.settings.method].refits
        decided_at = self._decisions()
        last = min(last, len(self.chain.segments))
        changed = bool(self.removed or self.probe.cuts)
        with torch.no_grad():
            self.probe.begin(images, first)
            for place in range(first, last):
                edge(place)
                for name in self.probe.segment.layers:
                    groups = decided_at.get(name, [])
                    for group in groups:
                        choice = self._decide(group, refits)
                        changed = True
                        choices.append(choice)
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
            self.settings.kept(group),
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
