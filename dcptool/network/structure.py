"""The shape of a network as a whole: residual blocks, scope, and where losses can be put.

Works on the traced graph alone. A cut point is a tensor that carries the whole signal; a block
is what lies between a fork and the addition that joins its branches.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from dcptool.network.trace import RETURNED_BY, VALUE

_ADDITIONS = (operator.add, operator.iadd, torch.add)
DEEP = 20


@dataclass(frozen=True)
class Structure:
    """Where layers lie; `cut_points` are modules with the number of layers before their output."""

    interiors: tuple[frozenset[str], ...]
    block_of: Mapping[str, str]
    has_residuals: bool
    classifier: str
    layers: tuple[str, ...]
    cut_points: tuple[tuple[str, int], ...]
    block_ends: tuple[str, ...]

    def outside(self, sites: Sequence[str], consumers: Sequence[str]) -> str:
        """Why a group is outside the paper's scope; empty when it is inside."""
        if not self.has_residuals:
            return "it feeds the classifier" if self.classifier in consumers else ""
        if any(all(name in interior for name in sites) for interior in self.interiors):
            return ""
        blocks = {self.block_of.get(name, "") for name in sites}
        if len(blocks) == 1 and "" not in blocks:
            return ""
        return "it does not lie inside one residual block"

    def default_losses(self) -> int:
        """Number of extra losses: 2 for shallow networks, 3 for deep ones."""
        return 2 if len(self.layers) < DEEP else 3

    def pivots(self, losses: int) -> tuple[str, ...]:
        """Modules after whose output the losses go, evenly over the depth."""
        if self.block_ends:
            blocks = len(self.block_ends)
            step = blocks // (losses + 1) + 1
            places = [self.block_ends[min(k * step, blocks - 1) - 1] for k in range(1, losses + 1)]
            return tuple(dict.fromkeys(places))
        total = len(self.layers)
        chosen: list[str] = []
        for k in range(1, losses + 1):
            wanted = k * total / (losses + 1)
            inner = [
                (abs(depth - wanted), name) for name, depth in self.cut_points if 0 < depth < total
            ]
            if inner:
                chosen.append(min(inner)[1])
        return tuple(dict.fromkeys(chosen))


def read_structure(graph: fx.Graph, root: nn.Module, dense: Sequence[str]) -> Structure:
    """Find blocks, cut points and the classifier of a traced network."""
    nodes = _live_nodes(graph)
    dominator = _dominators(nodes)
    of_site = {str(n.target): n for n in nodes if n.op == "call_module"}
    layers = tuple(name for name in dense if name in of_site)
    adds = [n for n in nodes if is_residual(n)]
    interiors = [_interior(dominator[add], add) for add in adds if dominator.get(add)]
    block_of = _blocks(root, adds, layers)
    main = _main_path(nodes, dominator)
    depths = _depths(nodes, set(layers))
    ends = [add for add in adds if add in main]
    plain = {n for n in nodes if n.op == "call_module" and not _has_tensors(root, n)}
    return Structure(
        interiors=tuple(
            frozenset(str(n.target) for n in inner if n.op == "call_module") for inner in interiors
        ),
        block_of=block_of,
        has_residuals=bool(adds),
        classifier=layers[-1] if layers else "",
        layers=_without_shortcuts(layers),
        cut_points=tuple((_module_at(n), depths[n]) for n in main if _module_at(n)),
        block_ends=tuple(filter(None, (_module_at(_after_activation(n, plain)) for n in ends))),
    )


def main_path(graph: fx.Graph) -> list[fx.Node]:
    """Nodes through which the whole signal passes, from the image to the output."""
    nodes = _live_nodes(graph)
    return _main_path(nodes, _dominators(nodes))


def _live_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that depend on the image: what parameters alone give is no signal."""
    live: dict[fx.Node, None] = {}
    for node in graph.nodes:
        is_image = node.op == "placeholder" and _is_activation(node)
        sources = _activation_inputs(node)
        if is_image or (
            (_is_activation(node) or node.op == "output") and any(s in live for s in sources)
        ):
            live[node] = None
    return list(live)


def _is_activation(node: fx.Node) -> bool:
    return isinstance(node.meta.get(VALUE), Tensor) and node.op != "get_attr"


def is_residual(node: fx.Node) -> bool:
    """An addition of two activations of which neither is a parameter."""
    is_add = (node.op == "call_function" and node.target in _ADDITIONS) or (
        node.op == "call_method" and node.target in ("add", "add_")
    )
    parts = [a for a in node.args if isinstance(a, fx.Node) and _is_activation(a)]
    return (
        is_add and len(parts) == 2 and parts[0] is not parts[1] and parts[0].meta[VALUE].dim() > 2
    )


def _dominators(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node | None]:
    """Immediate dominators in a graph given in topological order."""
    index = {node: i for i, node in enumerate(nodes)}
    dominator: dict[fx.Node, fx.Node | None] = {}
    for node in nodes:
        sources = [s for s in _activation_inputs(node) if s in dominator]
        common: fx.Node | None = sources[0] if sources else None
        for source in sources[1:]:
            common = _meet(common, source, dominator, index)
        dominator[node] = common
    return dominator


def _meet(
    a: fx.Node | None,
    b: fx.Node | None,
    dominator: Mapping[fx.Node, fx.Node | None],
    index: Mapping[fx.Node, int],
) -> fx.Node | None:
    while a is not b:
        if a is None or b is None:
            return None
        if index[a] > index[b]:
            a = dominator[a]
        else:
            b = dominator[b]
    return a


def _activation_inputs(node: fx.Node) -> list[fx.Node]:
    """Tensors that a node reads, through tuples such as those of split."""
    found: list[fx.Node] = []
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if _is_activation(source):
            found.append(source)
        elif isinstance(source.meta.get(VALUE), (tuple, list)) and not isinstance(
            source.meta.get(VALUE), torch.Size
        ):
            waiting.extend(source.all_input_nodes)
    return found


def _interior(fork: fx.Node | None, add: fx.Node) -> set[fx.Node]:
    """Nodes on the way from the fork to the addition, both left out."""
    inner: set[fx.Node] = set()
    waiting = _activation_inputs(add)
    while waiting:
        node = waiting.pop()
        if node is fork or node in inner:
            continue
        inner.add(node)
        waiting.extend(_activation_inputs(node))
    return inner


def _blocks(root: nn.Module, adds: Sequence[fx.Node], layers: Iterable[str]) -> dict[str, str]:
    """The block of each layer: instances of classes that have an addition in some instance."""
    kinds: set[type[nn.Module]] = set()
    for add in adds:
        path = _module_of(add)
        if path:
            kinds.add(type(root.get_submodule(path)))
    kinds -= {nn.Sequential, type(root)}
    instances = [name for name, module in root.named_modules() if type(module) in kinds]
    found: dict[str, str] = {}
    for layer in layers:
        inside = [name for name in instances if layer.startswith(name + ".")]
        if inside:
            found[layer] = max(inside, key=len)
    return found


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    names = [path for path, *_ in stack.values() if path]
    return names[-1] if names else ""


def _main_path(
    nodes: Sequence[fx.Node], dominator: Mapping[fx.Node, fx.Node | None]
) -> list[fx.Node]:
    """Nodes through which everything passes, first to last."""
    path: list[fx.Node] = []
    node: fx.Node | None = nodes[-1]
    while node is not None:
        path.append(node)
        node = dominator[node]
    return path[::-1]


def _depths(nodes: Sequence[fx.Node], layers: set[str]) -> dict[fx.Node, int]:
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        below = max((depth[s] for s in _activation_inputs(node) if s in depth), default=0)
        is_layer = node.op == "call_module" and str(node.target) in layers
        depth[node] = below + is_layer
    return depth


def _without_shortcuts(layers: Sequence[str]) -> tuple[str, ...]:
    return tuple(n for n in layers if not any(w in n for w in ("downsample", "shortcut")))


def _after_activation(add: fx.Node, plain: set[fx.Node]) -> fx.Node:
    """The activation right after an addition belongs to the block."""
    users = [u for u in add.users if u.op in ("call_module", "call_function", "call_method")]
    if len(users) == 1 and users[0] in plain and _same_shape(users[0], add):
        return users[0]
    return add


def _module_at(node: fx.Node) -> str:
    """The innermost module that returns this tensor, so that a hook can find it; or nothing."""
    inner = node.meta.get(RETURNED_BY, "")
    if inner:
        return str(inner)
    alone = node.op == "call_module" and not any(
        other is not node and other.target == node.target for other in node.graph.nodes
    )
    return str(node.target) if alone else ""


def _has_tensors(root: nn.Module, node: fx.Node) -> bool:
    return bool(root.get_submodule(str(node.target)).state_dict())


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    return _is_activation(a) and bool(a.meta[VALUE].shape == b.meta[VALUE].shape)
