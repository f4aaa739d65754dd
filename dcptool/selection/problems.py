"""The problems that channels are ordered by: what the readers have to explain, and what counts.

For the order alone. A refit takes the moments as they are: a metric on errors cancels out of least
squares, and it finds a ridge of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from dcptool.network.graph import ChannelGraph, Group
from dcptool.selection.features import taps
from dcptool.selection.gram import Moments, steadied
from dcptool.selection.joint import metric, weigh
from dcptool.selection.probe import Probe
from dcptool.selection.settings import Selection

# Moments of a reader, and its weights as they count.
Problem = tuple[Moments, Tensor]
# What is taken to stay where that is not known yet.
HALF = Fraction(1, 2)


@dataclass
class Problems:
    """Makes problems of moments; `slopes` are what the head's loss says of errors, by reader."""

    probe: Probe
    graph: ChannelGraph
    settings: Selection
    slopes: Mapping[str, Tensor] = field(default_factory=dict)

    def of(self, name: str, group: Group, moments: Moments) -> Problem:
        """The problem of a reader when the units of one group are ordered."""
        kept = self.settings.kept(group)
        left = HALF if kept is None else Fraction(kept, len(group.units))
        return self._problem(name, moments, self.probe.units(name, group), left)

    def before(self, name: str, moments: Moments) -> Problem:
        """The same before it is known what the reader will lose."""
        inputs = torch.from_numpy(self.graph.sites[name].inputs)
        groups = self.settings.groups(self.graph)
        open_units = torch.tensor(sorted(unit for group in groups for unit in group.units))
        units = torch.where(torch.isin(inputs, open_units), inputs, -1)
        columns = units.repeat_interleave(taps(self.probe.current.get_submodule(name)))
        return self._problem(name, moments, columns, HALF)

    def _problem(self, name: str, moments: Moments, unit: Tensor, left: Fraction) -> Problem:
        weights, scale = self.probe.weights(name), self.probe.output_weights(name)
        steady = steadied(
            moments,
            torch.cat([unit, unit.new_tensor([-1])]),
            weights,
            scale,
            left,
            has_bias=self.probe.has_bias(name),
            weakest=self.settings.ridge,
        )
        return self._weighed(name, steady), weights * scale

    def _weighed(self, name: str, moments: Moments) -> Moments:
        """Moments with errors weighed as they count, in the joint loss where there is one."""
        weights = self.probe.output_weights(name)
        if name in self.slopes:
            slopes = self.slopes[name].double()
            return weigh(moments, metric(weights, slopes, self.settings.discrimination))
        return Moments(
            moments.s, moments.c * weights, moments.energy * weights**2, moments.unit, moments.rows
        )
