"""From the layers that read a group to a later tensor: the part of a network that a choice moves.

Splits the nodes of some segments into those that depend on the readers and those that do not.
The latter are run once; what crosses the border, the frontier, is all that is needed to run the
rest again with other weights in the readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from dcptool.selection.chain import Chain, call_node, constant_value


@dataclass(frozen=True)
class Tail:
    """Nodes before and after the readers, and the tensors that cross from one to the other."""

    source: fx.Node
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]
    frontier: tuple[fx.Node, ...]
    readers: Mapping[fx.Node, str]
    constants: tuple[fx.Node, ...]

    @property
    def reader_inputs(self) -> tuple[fx.Node, ...]:
        """The node that each reader call reads, in order of the calls."""
        return tuple(node.all_input_nodes[0] for node in self.readers)

    def features(self, root: nn.Module, start: Tensor) -> tuple[Tensor, ...]:
        """Run what does not depend on the readers; returns the frontier's values."""
        env = self._begin(root)
        env[self.source] = start
        for node in self.before:
            env[node] = call_node(root, node, env)
        return tuple(env[node] for node in self.frontier)

    def finish(
        self,
        root: nn.Module,
        features: Sequence[Tensor],
        weights: Mapping[str, tuple[Tensor, Tensor | None]],
        want: Sequence[fx.Node],
    ) -> dict[fx.Node, Tensor]:
        """Run the rest with the given weights and biases in the readers."""
        env = self._begin(root)
        env.update(zip(self.frontier, features, strict=True))
        missing = set(want) - set(env)
        for node in self.after:
            if not missing:
                break
            name = self.readers.get(node)
            if name is not None and name in weights:
                weight, bias = weights[name]
                layer = root.get_submodule(name)
                given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
                source = fx.map_arg(node.args, env.__getitem__)
                env[node] = functional(layer, given, source)
            else:
                env[node] = call_node(root, node, env)
            missing.discard(node)
        return {node: env[node] for node in want}

    def _begin(self, root: nn.Module) -> dict[fx.Node, Any]:
        return {node: constant_value(root, node) for node in self.constants}


def functional(layer: nn.Module, given: Mapping[str, Tensor], args: Any) -> Tensor:
    """Call a layer with other parameters than its own."""
    from torch.func import functional_call

    result: Tensor = functional_call(layer, dict(given), args, strict=False)
    return result


def build_tail(chain: Chain, readers: Sequence[str], first: int, last: int) -> Tail:
    """The tail from `readers` in segment `first` or later to the end of segment `last`."""
    segments = chain.segments[first : last + 1]
    nodes = [node for segment in segments for node in segment.nodes]
    calls = {node: name for name in readers for node in chain.calls[name]}
    moved: set[fx.Node] = set()
    for node in nodes:
        if node in calls or any(source in moved for source in node.all_input_nodes):
            moved.add(node)
    after = tuple(node for node in nodes if node in moved)
    before = tuple(node for node in nodes if node not in moved)
    known = set(chain.constants)
    crossing = dict.fromkeys(
        source
        for node in after
        for source in node.all_input_nodes
        if source not in moved and source not in known
    )
    ordered = {node: calls[node] for node in after if node in calls}
    return Tail(segments[0].source, before, after, tuple(crossing), ordered, chain.constants)
