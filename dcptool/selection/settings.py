"""What the user asked of selection, as one value."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from dcptool.network.graph import ChannelGraph, Group
from dcptool.selection.budget import kept_count


@dataclass(frozen=True)
class Recorded:
    """The order that an earlier run found for a group, and the losses from `smallest` units on."""

    units: int
    order: tuple[int, ...]
    losses: tuple[float, ...]
    smallest: int = 0


@dataclass(frozen=True)
class Budget:
    """One limit for the whole network: MACs, parameters or milliseconds, or a share of them.

    `provider`, `batch_size` and `threads` say how milliseconds are meant. One that need not be
    `met` takes the nearest widths there are.
    """

    kind: str
    value: float
    is_share: bool
    provider: str = "cpu"
    batch_size: int = 1
    threads: int = 0
    met: bool = True


@dataclass(frozen=True)
class Selection:
    """Budget, rule and scope; `plan` (units kept by group) replaces rate, epsilon and budget.

    `loop_epochs` are walks of training on the joint loss, after each channel of the loop (one at
    least) or after each refit of the closed form.
    `reuse` holds orders of an earlier run; a discrimination of infinity leaves the
    reconstruction out; no number of samples means as many as are needed.
    """

    rate: Fraction | None = None
    epsilon: float | None = None
    budget: Budget | None = None
    plan: Mapping[str, int] | None = None
    round_to: int = 1
    rates: Mapping[str, Fraction] = field(default_factory=dict)
    widths: str = "uniform"
    method: str = "dcp"
    solver: str = "gram"
    loop_epochs: int = 0
    target: str = "block"
    score: str = "rise"
    discrimination: float = 1.0
    samples: int | None = 512
    positions: int = 128
    scope: str = "paper"
    prune_residual: bool = False
    keep: tuple[str, ...] = ()
    losses: int | None = None
    ridge: float = 1e-4
    cache_gb: float = 1.0
    seed: int = 0
    reuse: Mapping[str, Recorded] = field(default_factory=dict)

    @property
    def removes_nothing(self) -> bool:
        """Whether the result is a copy."""
        return self.plan is None and self.rate == 0 and not any(self.rates.values())

    def groups(self, graph: ChannelGraph) -> list[Group]:
        """The groups that are to be cut, in forward order."""
        found = graph.open_groups(self.scope, self.prune_residual)
        if self.plan is not None:
            found = [g for g in graph.groups if g.name in self.plan and g.units]
        return [g for g in found if not any(fnmatch.fnmatch(g.name, p) for p in self.keep)]

    def recorded(self, group: Group) -> tuple[int, ...] | None:
        """The order of an earlier run, where it holds for what is asked of this group."""
        old = self.reuse.get(group.name)
        if old is None or old.units != len(group.units):
            return None
        kept = self.kept(group)
        if kept is None:
            # Epsilon watches the loss from no unit on, to the end.
            whole = old.smallest == 0 and len(old.losses) == old.units + 1
            return old.order if whole else None
        nested = not old.losses or old.smallest <= kept
        return old.order if nested and kept <= len(old.order) else None

    @property
    def could_spread(self) -> bool:
        """Whether the MACs of the rate could go where they lose least instead."""
        is_plain = bool(self.rate) and not self.rates and self.widths == "uniform"
        return is_plain and self.round_to > 1 and (self.method, self.solver) == ("dcp", "gram")

    def kept(self, group: Group) -> int | None:
        """How many units of a group stay; None when epsilon or a budget decides."""
        if self.plan is not None:
            return self.plan[group.name]
        for pattern, rate in self.rates.items():
            if fnmatch.fnmatch(group.name, pattern):
                return kept_count(len(group.units), rate)
        return None if self.rate is None else kept_count(len(group.units), self.rate)


def stop_by_epsilon(losses: tuple[float, ...], epsilon: float) -> int:
    """Units kept when the relative drop first falls to epsilon; losses start with no unit."""
    for kept in range(1, len(losses)):
        if abs(losses[kept - 1] - losses[kept]) <= epsilon * losses[0]:
            return kept
    return len(losses) - 1
