"""What can be known of a layer from samples: moments of what it reads against what it should give.

Walks the chain once: holds the features at the start of the present segment, for the dense
network and for the one being pruned, and runs no further than asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from dcptool.network.base import Cut
from dcptool.network.graph import ChannelGraph, Group
from dcptool.network.trace import VALUE
from dcptool.selection.chain import Chain, Segment, run_from, run_segment
from dcptool.selection.features import (
    Positions,
    choose_positions,
    grid,
    is_readable,
    rows_at,
    taps,
    values_at,
)
from dcptool.selection.gathering import Gathering
from dcptool.selection.gram import Moments
from dcptool.selection.greedy import Joint, LossAt
from dcptool.selection.limits import MOST_COLUMNS, columns_of
from dcptool.selection.midway import Midway
from dcptool.selection.rectify import FEWEST_ROWS, MOST_BYTES, MOST_ROWS
from dcptool.selection.samples import Samples
from dcptool.selection.store import Room, Store, give_back
from dcptool.selection.tail import build_tail
from dcptool.selection.targets import Target, find_target, invert, norm_scale

# Called for every batch that is read, while no weight has changed since the last edge; may raise
# to end the work.
Tick = Callable[[], None]

# Rows for a column of a layer. KL from the dense network on images not used, MobileNetV2 at rate
# 0.2 with 300 images: 0.256 with 96, 0.250 with 128, 0.243 with 192, 0.241 with 400.
ENOUGH_ROWS = 192


def nothing() -> None:
    """Go on."""


@dataclass
class Probe:
    """The present place in the chain and the features there."""

    chain: Chain
    graph: ChannelGraph
    dense: nn.Module
    current: nn.Module
    cuts: dict[str, Cut]
    room: Room
    samples: Samples
    positions: int
    seed: int
    target: str
    tick: Tick
    most_columns: int = MOST_COLUMNS
    place: int = 0
    dense_features: Store = field(init=False)
    current_features: Store = field(init=False)
    _aims: dict[fx.Node, Store] = field(init=False, default_factory=dict)
    _midway: Midway = field(init=False)
    _is_dense_ahead: bool = field(init=False, default=False)
    _dense_place: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.dense_features, self.current_features = Store(self.room), Store(self.room)
        self._midway = Midway(self.room)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """No ticks for as long as the block runs, because a weight has changed before it."""
        self.tick, before = nothing, self.tick
        try:
            yield
        finally:
            self.tick = before

    @property
    def segment(self) -> Segment:
        """The present segment."""
        return self.chain.segments[self.place]

    def begin(self, place: int) -> None:
        """Compute the features at the start of segment `place` from the samples."""
        self._forget()
        self.place = place
        stores = [(self.current, self.current_features)]
        if not self._is_dense_at(place):
            stores.append((self.dense, self.dense_features))
        for root, store in stores:
            store.clear()
            for batch in self.samples.batches:
                features = batch.to(self.samples.device)
                for segment in self.chain.segments[:place]:
                    features = run_segment(self.chain, segment, root, features)[segment.output]
                store.add(features)

    def inherit(self, other: Probe) -> None:
        """Take over the features of the dense network from the probe of the stage before."""
        if len(other.dense_features) and not other._is_dense_ahead:
            self.dense_features, self._dense_place = other.dense_features, other.place
            other.dense_features = Store(self.room)
        other.dense_features.clear()
        other.current_features.clear()

    def _is_dense_at(self, place: int) -> bool:
        """Whether the dense features are those that the stage before has left here."""
        there, self._dense_place = self._dense_place == place, None
        return there

    def advance(self) -> None:
        """Go on to the next segment."""
        segment, output = self.segment, self.segment.output
        if not self._is_dense_ahead:
            store = self.dense_features
            for number, (features,) in enumerate(store):
                store.replace(
                    number, run_segment(self.chain, segment, self.dense, features)[output]
                )
        for number, (features,) in enumerate(self.current_features):
            values = self._run(number, features, [output])
            self._midway.drop(number)
            self.current_features.replace(number, values[output])
        self._forget()
        give_back()
        self.place += 1

    def _run(self, batch: int, features: Tensor, want: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
        """Values of the network being pruned in the present segment, for a batch of features."""
        known = self._midway.known(batch)
        return run_segment(self.chain, self.segment, self.current, features, want, known=known)

    def changed(self, name: str) -> None:
        """Hear that a layer of the network being pruned has other weights."""
        node = self._midway.node
        if node is not None and self._is_behind([node], name):
            self._midway.forget()

    def _forget(self) -> None:
        self._midway.forget()
        for aims in self._aims.values():
            aims.clear()
        self._aims.clear()
        self._is_dense_ahead = False

    def _aim(self) -> None:
        """Walk the dense network through the segment once: what all its layers should give.

        Leaves its features at the end of the segment, where the next one starts.
        """
        wanted = {
            node: (target.node if target.is_block else node)
            for name in self.segment.layers
            if self.readable(name)
            for target in [self.target_of(name)]
            for node in self.chain.calls[name]
        }
        draws = {node: self.draw() for node in wanted}
        self._aims = {node: Store(self.room) for node in wanted}
        ask = {*wanted.values(), self.segment.output}
        for number, (features,) in enumerate(self.dense_features):
            self.tick()
            values = run_segment(self.chain, self.segment, self.dense, features, ask)
            for node, source in wanted.items():
                at = self.positions_of(node, number, draws[node])
                self._aims[node].add(values_at(values[source], at, tokens=self.has_tokens(node)))
            self.dense_features.replace(number, values[self.segment.output])
        give_back()
        self._is_dense_ahead = True

    def draw(self) -> torch.Generator:
        """Chance for the positions of one layer, the same in every walk."""
        return torch.Generator().manual_seed(self.seed)

    def positions_of(self, node: fx.Node, batch: int, draw: torch.Generator) -> Positions:
        """The positions of a layer's output that enter the solution."""
        shape, images = node.meta[VALUE].shape, self.samples.sizes[batch]
        share, tokens = self.samples.share, self.has_tokens(node)
        return choose_positions(shape, images, self._enough(node), draw, share, tokens=tokens)

    def _enough(self, node: fx.Node) -> int:
        """Positions of each image that give a layer the rows it needs, and no more than asked."""
        columns = columns_of(self.current.get_submodule(str(node.target))) + 1
        return min(self.positions, math.ceil(ENOUGH_ROWS * columns / self.samples.images))

    def has_tokens(self, node: fx.Node) -> bool:
        """Whether the channels of a layer's output come last, as a linear layer has them."""
        return isinstance(self.current.get_submodule(str(node.target)), nn.Linear)

    def target_of(self, name: str) -> Target:
        """Where the target of a layer of the present segment is read."""
        return find_target(self.segment, self.chain.calls[name][0], self.current, self.target)

    def moments(self, name: str, group: Group | None, *, sampled: bool = False) -> Moments:
        """Moments of one layer of the present segment; units are indices into the group.

        With `sampled` some rows are kept where the layer is seen through a ReLU.
        """
        layer: Any = self.current.get_submodule(name)
        units, outputs = self.units(name, group), len(self.graph.sites[name].outputs)
        keep = self._sampled(name) if sampled else 0
        here = sum(len(batch) for batch in self.samples.batches) * len(self.chain.calls[name])
        gathering = Gathering(units, outputs, keep, here)
        for number, rows, targets, zeros in self._rows(name, layer):
            images = self.samples.batches[number].shape[0]
            cut = len(rows) * self.first_half(number) // max(images, 1)
            gathering.add(rows, targets, zeros, images, cut)
        moments = gathering.finish(self.add_up)
        target = self.target_of(name)
        if keep and target.bounds is not None:
            scale, _ = norm_scale(self.current, target.norm, outputs)
            moments.sample = gathering.sample(scale, target.bounds, self.add_up)
        return moments

    def _sampled(self, name: str) -> int:
        """Positions of each image whose rows are kept; none where that does not pay."""
        if self.target_of(name).bounds is None:
            return 0
        layer = self.current.get_submodule(name)
        columns = columns_of(layer) + 1
        calls = self.chain.calls[name]
        shape = calls[0].meta[VALUE].shape
        there = min(
            self._enough(calls[0]), math.prod(grid(shape, tokens=self.has_tokens(calls[0])))
        )
        images = self.samples.images * len(calls)
        room = min(MOST_BYTES // (4 * columns), MOST_ROWS * columns)
        keep = min(there, max(1, room // images))
        return keep if keep * images >= FEWEST_ROWS * columns else 0

    def first_half(self, batch: int) -> int:
        """How many of this process's images of a batch are of its first half."""
        dist = self.samples.dist
        return len(range(dist.rank, self.samples.sizes[batch] // 2, dist.world))

    def add_up(self, *tensors: Tensor) -> None:
        """Add tensors up over all processes, in place."""
        for tensor in tensors:
            there = tensor.to(self.samples.device)
            tensor.copy_(self.samples.dist.sum(there))

    def _total(self, count: int) -> int:
        box = torch.tensor([count], dtype=torch.float64)
        self.add_up(box)
        return int(box.item())

    def units(self, name: str, group: Group | None) -> Tensor:
        """The unit of each column of a layer's rows; -1 for columns that stay."""
        columns = self.channel_units(name, group)
        return columns.repeat_interleave(taps(self.current.get_submodule(name)))

    def channel_units(self, name: str, group: Group | None) -> Tensor:
        """The unit of each input channel of a layer; -1 for channels that stay."""
        index = {unit: i for i, unit in enumerate(group.units)} if group is not None else {}
        inputs = self.graph.sites[name].inputs.tolist()
        return torch.tensor([index.get(unit, -1) for unit in inputs])

    def joint(
        self, names: Sequence[str], pivot: str | None, heads: Sequence[LossAt], strength: float
    ) -> Joint:
        """The joint loss of some layers of the present segment, with features computed once."""
        end, last = self.chain.end_of(pivot)
        reach = max(self.chain.place_of(name) for name in names)
        last = max(last, reach) if heads and strength else reach
        tail = build_tail(self.chain, names, self.place, last)
        if self._is_dense_ahead:
            self.begin(self.place)
        features, targets = Store(self.room), Store(self.room)
        calls = list(tail.readers)
        pairs = zip(self.current_features, self.dense_features, strict=True)
        for (now,), (then,) in pairs:
            features.add(*tail.features(self.current, now))
            wanted = run_from(self.chain, self.place, self.dense, then, calls)
            targets.add(*[self._as_kept(wanted[node], str(node.target)) for node in calls])
        end_or_none = end if heads else None
        return Joint(
            tail, self.current, features, targets, self.samples, strength, end_or_none, heads
        )

    def _as_kept(self, output: Tensor, name: str) -> Tensor:
        """The channels of a dense output that the current layer still has."""
        kept = self.cuts[name].outputs if name in self.cuts else None
        if kept is None:
            return output
        linear = isinstance(self.current.get_submodule(name), nn.Linear)
        dim = output.dim() - 1 if linear else 1
        return output.index_select(dim, torch.tensor(kept, device=output.device))

    def _rows(self, name: str, layer: nn.Module) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """What a layer reads now, what it should give, and what would count as zero."""
        if not self._is_dense_ahead:
            self._aim()
        target = self.target_of(name)
        for node in self.chain.calls[name]:
            draw = self.draw()
            source = node.all_input_nodes[0]
            want = [source, *([target.other] if target.other else [])]
            pairs = zip(self.current_features, self._aims[node], strict=True)
            for number, ((features,), (aim,)) in enumerate(pairs):
                self.tick()
                now = self._run(number, features, want)
                if source is not self.segment.source:
                    self._midway.keep(source, number, now[source])
                at = self.positions_of(node, number, draw)
                aim = self._as_kept(aim, name)
                known = norm_scale(self.current, target.norm, aim.shape[1])
                scale, shift = (each.to(aim.device) for each in known)
                zeros = torch.zeros_like(aim)
                if target.other is not None:
                    other = values_at(now[target.other], at, tokens=self.has_tokens(node))
                    aim = invert(aim - other, scale, shift)
                    zeros -= other
                yield number, rows_at(layer, now[source], at), aim, invert(zeros, scale, shift)

    def carried(self, name: str) -> float | None:
        """Energy about its mean of the residual sum that a layer goes into; None without one."""
        if not self.target_of(name).is_block:
            return None
        count, total, squares = torch.zeros(3, len(self.graph.sites[name].outputs)).double()
        for (aim,) in self._aims[self.chain.calls[name][0]]:
            values = self._as_kept(aim, name).double().cpu()
            count += len(values)
            total += values.sum(0)
            squares += values.square().sum(0)
        self.add_up(count, total, squares)
        return float((squares / count - (total / count).square()).sum()) or None

    def zeros(self, name: str, group: Group) -> Tensor | None:
        """Share of zeros of each unit where `name` reads it; None if the activation has none."""
        node = self.chain.calls[name][0].all_input_nodes[0]
        counts = torch.zeros(len(group.units), dtype=torch.float64)
        total = 0
        inputs = self.graph.sites[name].inputs.tolist()
        index = {unit: i for i, unit in enumerate(group.units)}
        for number, (features,) in enumerate(self.current_features):
            seen = self._run(number, features, [node])[node]
            linear = isinstance(self.current.get_submodule(name), nn.Linear)
            flat = seen.flatten(0, -2).T if linear else seen.transpose(0, 1).flatten(1)
            share = (flat == 0).double().sum(1).cpu()
            for channel, unit in enumerate(inputs):
                if unit in index:
                    counts[index[unit]] += share[channel]
            total += flat.shape[1]
        self.add_up(counts)
        total = self._total(total)
        return counts / total if bool(counts.any()) else None

    def readable(self, name: str, place: int | None = None) -> bool:
        """Whether a layer can be solved for: a dense conv or linear, called in one segment.

        That is the present segment unless `place` names another.
        """
        segment = self.segment if place is None else self.chain.segments[place]
        inside = all(node in segment.nodes for node in self.chain.calls[name])
        layer = self.current.get_submodule(name)
        return inside and is_readable(layer) and columns_of(layer) <= self.most_columns

    def depends(self, later: str, earlier: str) -> bool:
        """Whether what a layer of the present segment reads depends on another one's output."""
        read = [node for call in self.chain.calls[later] for node in call.all_input_nodes]
        return self._is_behind(read, earlier)

    def _is_behind(self, nodes: Sequence[fx.Node], earlier: str) -> bool:
        """Whether some values of the present segment depend on a layer's output."""
        goal, todo = set(self.chain.calls.get(earlier, ())), list(nodes)
        inside = set(self.segment.nodes)
        seen: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node in goal:
                return True
            if node in inside and node not in seen:
                seen.add(node)
                todo += node.all_input_nodes
        return False

    def output_weights(self, name: str) -> Tensor:
        """How much an error of each output weighs in what the target stands for."""
        target = self.target_of(name)
        outputs = len(self.graph.sites[name].outputs)
        if not target.is_block:
            return torch.ones(outputs, dtype=torch.float64)
        return norm_scale(self.current, target.norm, outputs)[0].abs().double().cpu()

    def weights(self, name: str) -> Tensor:
        """Present weights of a layer as columns x outputs, the bias last."""
        layer: Any = self.current.get_submodule(name)
        weight = layer.weight.detach().flatten(1).T.double().cpu()
        bias = layer.bias
        row = (
            bias.detach().double().cpu()
            if isinstance(bias, Tensor)
            else weight.new_zeros(weight.shape[1])
        )
        return torch.cat([weight, row[None]])

    def has_bias(self, name: str) -> bool:
        """Whether a constant can be put somewhere: the layer's bias or the norm after it."""
        layer: Any = self.current.get_submodule(name)
        return isinstance(layer.bias, Tensor) or self.target_of(name).norm is not None

    def norm_of(self, name: str) -> str | None:
        """The norm that takes a constant where a layer has no bias."""
        return self.target_of(name).norm

    def write(self, name: str, weights: Tensor) -> None:
        """Put solved weights into the current network."""
        layer: Any = self.current.get_submodule(name)
        with torch.no_grad():
            layer.weight.copy_(weights[:-1].T.reshape(layer.weight.shape))
            if isinstance(layer.bias, Tensor):
                layer.bias.copy_(weights[-1])
            else:
                norm = self.target_of(name).norm
                if norm is not None:
                    # A norm without its mean shifted by b gives what a bias of b would have.
                    after: Any = self.current.get_submodule(norm)
                    after.running_mean.sub_(weights[-1].to(after.running_mean))
                    self.samples.dist.broadcast_tensors([after.running_mean])
            given = [layer.weight, *([layer.bias] if isinstance(layer.bias, Tensor) else [])]
            self.samples.dist.broadcast_tensors(given)
        self.changed(name)
