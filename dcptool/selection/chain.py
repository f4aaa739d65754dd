"""A network as a chain of segments, so that features are computed once and never from the start.

Cuts the traced graph at tensors that carry the whole signal. A segment runs on the output of
the one before, with the modules of whichever network is given: the dense one and the one being
pruned share the graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from dcptool.network.rules import layer_rule
from dcptool.network.structure import main_path
from dcptool.network.trace import RETURNED_BY, VALUE, trace

_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


@dataclass(frozen=True)
class Segment:
    """Nodes between two cut points, the last one included; `layers` are its dense layers."""

    source: fx.Node
    nodes: tuple[fx.Node, ...]
    layers: tuple[str, ...]

    @property
    def output(self) -> fx.Node:
        """The tensor that the next segment starts from."""
        return self.nodes[-1]


@dataclass(frozen=True)
class Chain:
    """All segments of a network, first to last; `outputs` finds what a module returns."""

    segments: tuple[Segment, ...]
    calls: Mapping[str, tuple[fx.Node, ...]]
    constants: tuple[fx.Node, ...]
    outputs: Mapping[str, fx.Node]

    def end_of(self, module: str | None) -> tuple[fx.Node, int]:
        """The tensor that a module returns (None: the network) and the segment that makes it."""
        node = self.segments[-1].output if module is None else self.outputs[module]
        return node, next(i for i, s in enumerate(self.segments) if node in s.nodes)

    def place_of(self, name: str) -> int:
        """The segment that a layer is called in."""
        return next(i for i, s in enumerate(self.segments) if name in s.layers)


def build_chain(module: nn.Module, input_size: tuple[int, ...], dense: Iterable[str]) -> Chain:
    """Cut a network into the shortest segments that hold at least one dense layer each."""
    graph, _ = trace(module, input_size, lambda m: layer_rule(m) is not None)
    wanted = set(dense)
    nodes = list(graph.nodes)
    calls: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "call_module" and str(node.target) in wanted:
            calls.setdefault(str(node.target), []).append(node)
    image = next(n for n in nodes if n.op == "placeholder" and isinstance(n.meta[VALUE], Tensor))
    last = next(n for n in nodes if n.op == "output").args[0]
    index = {node: i for i, node in enumerate(nodes)}
    cuts = [n for n in main_path(graph) if index[n] > index[image] and n.op != "output"]
    constants = tuple(n for n in nodes if n.op in ("placeholder", "get_attr") and n is not image)
    segments: list[Segment] = []
    start = image
    for cut in cuts:
        inner = [n for n in nodes[index[start] + 1 : index[cut] + 1] if n not in constants]
        layers = tuple(
            dict.fromkeys(
                str(n.target) for n in inner if str(n.target) in calls and n.op == "call_module"
            )
        )
        is_last = cut is cuts[-1]
        if layers or is_last:
            segments.append(Segment(start, tuple(inner), layers))
            start = cut
    assert segments[-1].output is last or not isinstance(last, fx.Node)
    returned = {n.meta[RETURNED_BY]: n for n in nodes if RETURNED_BY in n.meta}
    leaves = {str(n.target): n for n in nodes if n.op == "call_module"}
    return Chain(
        tuple(segments), {k: tuple(v) for k, v in calls.items()}, constants, {**leaves, **returned}
    )


def run_segment(
    chain: Chain,
    segment: Segment,
    root: nn.Module,
    features: Tensor,
    want: Iterable[fx.Node] = (),
    starts: Collection[fx.Node] = (),
    known: Mapping[fx.Node, Tensor] | None = None,
) -> dict[fx.Node, Tensor]:
    """Values of the wanted nodes (by default the segment's output) for a batch of features.

    Runs what they need and no more, from values that are `known` where there are some. Gradients
    reach back to the first of `starts`.
    """
    wanted = set(want) or {segment.output}
    env: dict[fx.Node, Any] = {segment.source: features, **(known or {})}
    found = {n: env[n] for n in wanted & set(env)}
    nodes = _needed(segment, wanted, env)
    for node in chain.constants:
        env[node] = constant_value(root, node)
    readers = Counter(source for node in nodes for source in node.all_input_nodes)
    for node in nodes:
        env[node] = call_node(root, node, env)
        if node in starts and not env[node].requires_grad:
            env[node].requires_grad_()
        if node in wanted:
            found[node] = env[node]
        for source in node.all_input_nodes:
            # Maps of a whole batch are hundreds of megabytes: none stays longer than it is read.
            readers[source] -= 1
            if not readers[source]:
                del env[source]
    return found


def _needed(
    segment: Segment, wanted: Collection[fx.Node], known: Collection[fx.Node]
) -> list[fx.Node]:
    """The nodes of a segment to run, in order, for wanted values from known ones."""
    inside = set(segment.nodes)
    needed: set[fx.Node] = set()
    todo = [node for node in wanted if node not in known]
    while todo:
        node = todo.pop()
        if node in inside and node not in needed:
            needed.add(node)
            todo += [source for source in node.all_input_nodes if source not in known]
    return [node for node in segment.nodes if node in needed]


def run_from(
    chain: Chain,
    place: int,
    root: nn.Module,
    features: Tensor,
    want: Iterable[fx.Node],
    starts: Collection[fx.Node] = (),
) -> dict[fx.Node, Tensor]:
    """Values of wanted nodes in segment `place` or later, from the features where it starts."""
    missing = set(want)
    found: dict[fx.Node, Tensor] = {}
    for segment in chain.segments[place:]:
        inside = missing & set(segment.nodes)
        missing -= inside
        ask = [*inside, segment.output] if missing else list(inside)
        values = run_segment(chain, segment, root, features, ask, starts)
        found |= {node: values[node] for node in inside}
        if not missing:
            break
        features = values[segment.output]
    return found


def call_node(root: nn.Module, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """Compute one node from the values of those before it, which stay as they are."""
    args: Any = fx.map_arg(node.args, env.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, env.__getitem__)
    if _works_in_place(root, node):
        first, *rest = args
        args = (first.clone() if isinstance(first, Tensor) else first, *rest)
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return function(*args, **kwargs)


def _works_in_place(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node may write into its first argument, which others still have to read."""
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    flagged = node.kwargs.get("inplace") is True or any(arg is True for arg in node.args[1:])
    return flagged or name.endswith("_") or node.target in _IN_PLACE


def constant_value(root: nn.Module, node: fx.Node) -> Any:
    """A parameter of the given network, or the default of an argument."""
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return getattr(root.get_submodule(owner), name)
    return node.meta[VALUE]


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """No gradients of parameters: what only those need is not kept."""
    wanted = [p for p in module.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
