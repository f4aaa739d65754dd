"""The channel graph: sites, and groups of channels that live and die together.

Runs a network's own graph on labels and gathers what the rules found. Says of every group
whether it can be pruned, is coupled by residual adds, lies outside the paper's scope, or is
locked and why. Changes nothing; `surgery` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from dcptool.network import rules_functions, rules_layers  # noqa: F401 - they fill the table
from dcptool.network.labels import IntArray, Ties
from dcptool.network.rules import (
    FUNCTIONS,
    METHODS,
    Flow,
    Rule,
    SiteDraft,
    describe,
    layer_rule,
    tensors_in,
)
from dcptool.network.structure import Structure, read_structure
from dcptool.network.trace import VALUE, meta_copy, trace

DENSE = ("conv", "linear")
# A per-channel parameter is a vector; a label for each element of a matrix would cost seconds.
LARGEST_PARAMETER = 1 << 15


@dataclass(frozen=True, eq=False)
class Site:
    """One module or parameter and the unit of each of its channels (negative: never removed)."""

    name: str
    kind: str
    inputs: IntArray
    outputs: IntArray
    positions: int
    groups: int
    dim: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether its weights mix all inputs into all outputs."""
        return self.kind in DENSE and self.groups == 1


@dataclass(frozen=True)
class Group:
    """Units that are decided together; `units` are those that can go."""

    name: str
    units: tuple[int, ...]
    channels: int
    producers: tuple[str, ...]
    carriers: tuple[str, ...]
    consumers: tuple[str, ...]
    status: str
    reason: str

    def is_open(self, scope: str, prune_residual: bool) -> bool:
        """Whether the given options allow to cut this group."""
        return (
            self.status == "prunable"
            or (self.status == "outside" and scope == "all")
            or (self.status == "coupled" and prune_residual)
        )


@dataclass(frozen=True)
class ChannelGraph:
    """Everything that is known about the channels of one network."""

    sites: Mapping[str, Site]
    groups: tuple[Group, ...]
    structure: Structure

    def group(self, name: str) -> Group:
        """The group of that name."""
        return next(group for group in self.groups if group.name == name)

    def open_groups(self, scope: str = "paper", prune_residual: bool = False) -> list[Group]:
        """Groups that the given options allow to cut."""
        return [group for group in self.groups if group.is_open(scope, prune_residual)]


def build_graph(module: nn.Module, input_size: tuple[int, ...]) -> ChannelGraph:
    """Trace a network and find its groups; raises InputError when it cannot be traced."""
    fx_graph, root = trace(module, input_size, lambda m: layer_rule(m) is not None)
    flow = Flow(Ties())
    _run(flow, fx_graph, root, module)
    _lock_shared_parameters(flow, module)
    sites = {name: _site(flow.ties, draft) for name, draft in flow.sites.items()}
    structure = read_structure(fx_graph, root, [s.name for s in sites.values() if s.is_dense])
    groups = _groups(flow.ties, sites, structure)
    graph = ChannelGraph(sites, tuple(groups), structure)
    return _confirm(graph, module, input_size)


def _run(flow: Flow, graph: fx.Graph, root: nn.Module, module: nn.Module) -> None:
    env: dict[fx.Node, Any] = {}
    last_use: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                last_use.setdefault(node, []).append(source)
    for node in graph.nodes:
        flow.node, flow.value = node, node.meta.get(VALUE)
        args = fx.map_arg(node.args, env.__getitem__)
        kwargs = fx.map_arg(node.kwargs, env.__getitem__)
        if node.op == "get_attr":
            env[node] = _parameter(flow, node, module)
        else:
            env[node] = _step(flow, node, root, args, kwargs)
        for source in last_use.get(node, ()):
            del env[source]


def _step(flow: Flow, node: fx.Node, root: nn.Module, args: Any, kwargs: Any) -> Any:
    if node.op == "placeholder":
        return flow.fixed(flow.value, "the image's own channels")
    if node.op == "output":
        for labels in tensors_in(args):
            flow.ties.freeze(labels, "the network's output")
        return None
    if not any(True for _ in tensors_in([args, kwargs])):
        # No activation takes part: sizes, constants, assertions.
        return flow.fixed(flow.value, "a tensor of fixed size")
    rule = None
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        rule = layer_rule(module)
        if rule is not None:
            return _apply(flow, rule, (module, *args), kwargs)
        _freeze_inside(flow, str(node.target), module)
        return flow.freeze([args, kwargs], f"{node.target} ({type(module).__name__}) has no rule")
    rule = METHODS.get(str(node.target)) if node.op == "call_method" else FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    if rule is None:
        return flow.freeze([args, kwargs], f"{describe(node)} has no rule")
    return _apply(flow, rule, args, kwargs)


def _apply(flow: Flow, rule: Rule, args: Any, kwargs: Any) -> Any:
    try:
        return rule(flow, *args, **kwargs)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError):
        # Called in a way that the rule does not know: the same as no rule.
        return flow.freeze([args, kwargs], f"{flow.place} is used in a way that has no rule")


def _freeze_inside(flow: Flow, name: str, module: nn.Module) -> None:
    """An opaque module's inner sites must not be cut through a partial trace."""
    for inner, _ in module.named_modules(prefix=name):
        if inner in flow.sites:
            reason = f"{name} ({type(module).__name__}) cannot be followed"
            flow.ties.freeze(flow.sites[inner].inputs, reason)
            flow.ties.freeze(flow.sites[inner].outputs, reason)


def _parameter(flow: Flow, node: fx.Node, module: nn.Module) -> Any:
    name, value = str(node.target), flow.value
    if not isinstance(value, Tensor):
        return value
    owner, _, leaf = name.rpartition(".")
    if not hasattr(module.get_submodule(owner), leaf):
        # Tensors that the code makes anew each time are kept by the trace, not by the network.
        return flow.fixed(value, "a constant of the network's code")
    if value.numel() > LARGEST_PARAMETER:
        return flow.fixed(value, f"the parameter {name} has no channel dimension")
    if name not in flow.sites:
        labels = flow.ties.fresh(value.numel()).reshape(value.shape)
        flow.sites[name] = SiteDraft(name, "parameter", labels, labels)
    return flow.sites[name].outputs


def _lock_shared_parameters(flow: Flow, module: nn.Module) -> None:
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        for name in names if len(names) > 1 else ():
            site = flow.sites.get(name) or flow.sites.get(name.rpartition(".")[0])
            if site is not None:
                reason = f"the parameter {names[0]} is shared with {names[1]}"
                flow.ties.freeze(site.inputs, reason)
                flow.ties.freeze(site.outputs, reason)


def _site(ties: Ties, draft: SiteDraft) -> Site:
    dim = 0
    if draft.kind == "parameter":
        roots = ties.roots(draft.outputs)
        moving = [d for d in range(roots.dim()) if not bool((roots == roots.narrow(d, 0, 1)).all())]
        if len(moving) > 1:
            ties.freeze(draft.outputs, f"the parameter {draft.name} has no channel dimension")
            roots = torch.full((1,), ties.fixed("a parameter"))
        else:
            dim = moving[0] if moving else 0
            for other in range(roots.dim()):
                if other != dim:
                    roots = roots.narrow(other, 0, 1)
        vector = roots.reshape(-1).numpy()
        return Site(draft.name, draft.kind, vector, vector, 0, 1, dim)
    inputs, outputs = ties.roots(draft.inputs).numpy(), ties.roots(draft.outputs).numpy()
    return Site(draft.name, draft.kind, inputs, outputs, draft.positions, draft.groups)


def _groups(ties: Ties, sites: Mapping[str, Site], structure: Structure) -> list[Group]:
    """Producers that share a unit form a group, named after the first of them."""
    names = list(sites)
    owner: dict[int, str] = {}
    merged = {name: name for name in names}

    def find(name: str) -> str:
        while merged[name] != name:
            name = merged[name]
        return name

    for name in names:
        if sites[name].is_dense:
            for unit in np.unique(sites[name].outputs).tolist():
                first = find(owner.setdefault(unit, name))
                merged[find(name)] = first
    members: dict[str, list[str]] = {}
    for name in names:
        if sites[name].is_dense:
            members.setdefault(find(name), []).append(name)
    readers = _readers(sites)
    return [_group(ties, sites, structure, readers, producers) for producers in members.values()]


def _readers(sites: Mapping[str, Site]) -> dict[int, list[str]]:
    readers: dict[int, list[str]] = {}
    for site in sites.values():
        for unit in np.unique(np.concatenate([site.inputs, site.outputs])).tolist():
            if unit >= 0:
                readers.setdefault(unit, []).append(site.name)
    return readers


def _group(
    ties: Ties,
    sites: Mapping[str, Site],
    structure: Structure,
    readers: dict[int, list[str]],
    producers: list[str],
) -> Group:
    stacked = np.concatenate([sites[name].outputs for name in producers])
    _, first = np.unique(stacked, return_index=True)
    units = [unit for unit in stacked[np.sort(first)].tolist() if unit >= 0]
    touching = list(dict.fromkeys(name for unit in units for name in readers[unit]))
    order = {name: i for i, name in enumerate(sites)}
    touching.sort(key=order.__getitem__)
    consumers = [n for n in touching if sites[n].is_dense and np.isin(sites[n].inputs, units).any()]
    carriers = [n for n in touching if not sites[n].is_dense]
    free = [unit for unit in units if not ties.frozen(unit)]
    status, reason = "prunable", ""
    if not free:
        reasons = dict.fromkeys(text for unit in units for text in ties.frozen(unit))
        status, reason = "locked", "; ".join(reasons)
    elif not consumers:
        status, reason, free = "locked", "no layer with weights reads it", []
    elif len(free) < 2:
        status, reason, free = "locked", "its channels can only go all together", []
    elif any(ties.added(unit) for unit in units):
        place = next(ties.added(unit) for unit in units if ties.added(unit))
        others = ", ".join(producers[1:4]) + (" ..." if len(producers) > 4 else "")
        tied = f"tied with {others}" if others else "tied to itself"
        status, reason = "coupled", f"{tied} by {place}"
    else:
        reason = structure.outside([*producers, *consumers], consumers)
        status = "outside" if reason else "prunable"
    return Group(
        producers[0],
        tuple(free),
        len(sites[producers[0]].outputs),
        tuple(producers),
        tuple(carriers),
        tuple(consumers),
        status,
        reason,
    )


def _confirm(graph: ChannelGraph, module: nn.Module, input_size: tuple[int, ...]) -> ChannelGraph:
    """Cut half of everything on a copy without data; lock the groups whose code objects."""
    from dcptool.network.surgery import fits

    free = [g for g in graph.groups if g.status != "locked"]
    trial = meta_copy(module).eval()
    if not free or fits(graph, free, trial, input_size):
        return graph
    culprits: set[str] = set()

    def search(candidates: list[Group]) -> None:
        if fits(graph, candidates, trial, input_size):
            return
        if len(candidates) == 1:
            culprits.add(candidates[0].name)
            return
        half = len(candidates) // 2
        search(candidates[:half])
        search(candidates[half:])

    search(free)
    reason = "the network's code needs this width"
    groups = tuple(
        replace(g, units=(), status="locked", reason=reason) if g.name in culprits else g
        for g in graph.groups
    )
    return replace(graph, groups=groups)
