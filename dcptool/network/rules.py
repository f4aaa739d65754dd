"""The open table of rules: what each layer and function does to channel labels.

    @rule(nn.Conv2d)        a layer; subclasses with a forward of their own need their own entry
    @rule(torch.cat)        a function
    @rule("flatten")        a tensor method

A rule gets the flow and the labels of its inputs and returns the labels of its output. What has
no rule freezes all that it touches. This file owns the table; the rules are in `rules_layers`
and `rules_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from dcptool.network.labels import Ties, compact, is_constant, spread

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)

LAYERS: dict[type[nn.Module], Rule] = {}
FUNCTIONS: dict[Callable[..., Any], Rule] = {}
METHODS: dict[str, Rule] = {}


def rule(*targets: Any) -> Callable[[R], R]:
    """Enter a rule for layer types, functions or method names."""

    def enter(function: R) -> R:
        for target in targets:
            if isinstance(target, str):
                METHODS[target] = function
            elif isinstance(target, type) and issubclass(target, nn.Module):
                LAYERS[target] = function
            else:
                FUNCTIONS[target] = function
        return function

    return enter


def layer_rule(module: nn.Module) -> Rule | None:
    """The rule of a layer: that of its class, or of the class whose forward it inherits."""
    if is_parametrized(module):
        return None  # its weights are computed from others, which nothing here knows how to cut
    for kind in type(module).__mro__:
        if kind in LAYERS:
            same = kind is type(module) or type(module).forward is kind.forward
            return LAYERS[kind] if same else None
    return None


@dataclass
class SiteDraft:
    """Label vectors of one module or parameter, collected over all its calls."""

    name: str
    kind: str
    inputs: Tensor
    outputs: Tensor
    positions: int = 0
    groups: int = 1


@dataclass
class Flow:
    """The state of one run on labels: ties, sites, and the node at hand."""

    ties: Ties
    sites: dict[str, SiteDraft] = field(default_factory=dict)
    node: fx.Node | None = None
    value: Any = None

    @property
    def place(self) -> str:
        """Name of the node at hand, as users know it."""
        assert self.node is not None
        return describe(self.node)

    def shape(self) -> tuple[int, ...]:
        """True shape of the result of the node at hand."""
        return tuple(self.value.shape)

    def freeze(self, values: Any, reason: str) -> Any:
        """Freeze every label in `values`; the result of the node can never be removed."""
        for labels in tensors_in(values):
            self.ties.freeze(labels, reason)
        return self.fixed(self.value, reason)

    def fixed(self, value: Any, reason: str) -> Any:
        """Labels for `value` that say: never removed, because of `reason`."""
        if isinstance(value, Tensor):
            return torch.tensor(self.ties.fixed(reason)).expand(value.shape)
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return type(value)([self.fixed(item, reason) for item in value])
        return value

    def per_channel(self, labels: Tensor, dim: int, reason: str) -> Tensor:
        """One label for each channel along `dim`.

        Where positions disagree, all are frozen and the channels can never be removed.
        """
        dim %= labels.dim()
        others = tuple(i for i in range(labels.dim()) if i != dim)
        if is_constant(self.ties, labels, others):
            for i in others:
                labels = labels.narrow(i, 0, 1)
            return labels.reshape(-1)
        self.ties.freeze(labels, reason)
        return torch.full((labels.shape[dim],), self.ties.fixed(reason))

    def site(
        self,
        kind: str,
        inputs: Tensor,
        outputs: int | Tensor,
        *,
        positions: int = 0,
        groups: int = 1,
    ) -> Tensor:
        """Record the module at hand; returns its output labels (fresh when a count is given).

        A module that is called twice ties both calls.
        """
        assert self.node is not None
        name = str(self.node.target)
        known = self.sites.get(name)
        if known is None:
            fresh = self.ties.fresh(outputs) if isinstance(outputs, int) else outputs
            known = self.sites[name] = SiteDraft(name, kind, inputs, fresh, groups=groups)
        else:
            self.ties.join(known.inputs, inputs)
            if isinstance(outputs, Tensor):
                self.ties.join(known.outputs, outputs)
        known.positions += positions
        return known.outputs

    def over_space(self, labels: Tensor) -> Tensor:
        """Labels of an operation that mixes positions but not channels (dim 1 is channels)."""
        shape = self.shape()
        vector = self.per_channel(labels, labels.dim() - len(shape) + 1, _MIXED)
        return spread(vector, shape, 1)


_MIXED = "channels are mixed with positions"


def describe(node: fx.Node) -> str:
    """A node in words: module path, function or method name."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "call_method":
        return f"{node.target}() in {_owner(node)}"
    if node.op == "call_function":
        return f"{getattr(node.target, '__name__', node.target)} in {_owner(node)}"
    return str(node.target)


def _owner(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    names = [path for path, *_ in stack.values() if path]
    return names[-1] if names else "the network's forward"


def tensors_in(values: Any) -> Iterable[Tensor]:
    """All label tensors inside nested arguments."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def varies(flow: Flow, labels: Tensor, dim: int) -> bool:
    """Whether different positions along `dim` name different units."""
    return compact(labels).shape[dim] > 1 and not is_constant(flow.ties, labels, (dim,))
