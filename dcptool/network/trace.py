"""From a module to a torch.fx graph with the shape of every value.

The trace runs beside real shapes on the meta device, so branches that ask for a shape are
decided as they would be at the given input size, while sizes stay symbolic in the graph.
A part whose code cannot be followed becomes one opaque node; nothing is guessed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from dcptool.errors import InputError

VALUE = "value"
RETURNED_BY = "returned_by"
_PLAIN = (bool, int, float, str, type(None))


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy that has shapes and no data, made without doubling the memory."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        # Whatever the numbers are kept in, shapes are those of the images that are sent through.
        kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=kind)
        memo[id(tensor)] = (
            nn.Parameter(empty, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else empty
        )
    try:
        copied = copy.deepcopy(module, memo)
    except RuntimeError as err:
        raise InputError(
            f"cannot copy {type(module).__name__}",
            why=_first_line(err),
            try_="plain weights: torch.nn.utils.remove_weight_norm(layer), or the like, before",
        ) from err
    for part in copied.modules():
        if isinstance(part, nn.RNNBase):
            # Without data torch would run it step by step in Python, for seconds.
            part.forward = partial(_shape_of_recurrence, part)
    return copied


def _shape_of_recurrence(layer: nn.RNNBase, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """What a recurrent layer returns, as shapes."""
    directions = 2 if layer.bidirectional else 1
    width = layer.proj_size or layer.hidden_size
    batch = [] if x.dim() == 2 else [x.shape[0 if layer.batch_first else 1]]
    last = x.new_empty([layer.num_layers * directions, *batch, width])
    cell = x.new_empty([layer.num_layers * directions, *batch, layer.hidden_size])
    output = x.new_empty([*x.shape[:-1], width * directions])
    return output, (last, cell) if layer.mode == "LSTM" else last


def trace(
    module: nn.Module, input_size: tuple[int, ...], is_leaf: Callable[[nn.Module], bool]
) -> tuple[fx.Graph, nn.Module]:
    """Trace `module` in eval mode for one image; the graph refers to the returned meta copy."""
    root = meta_copy(module).eval()
    rest = list(inspect.signature(root.forward).parameters.values())[1:]
    plain = {p.name: p.default for p in rest if isinstance(p.default, _PLAIN)}
    tracer = _Tracer(is_leaf, torch.empty((1, *input_size), device="meta"), plain)
    try:
        with torch.no_grad():
            graph = tracer.trace(root, concrete_args=plain or None)
    except Exception as err:
        place = tracer.deepest or type(root).__name__
        raise InputError(
            f"cannot follow the network's code in module {place}",
            why=f"{type(err).__name__}: {_first_line(err)}",
            try_="a network whose forward does not depend on the values of its input",
        ) from err
    for node, name in tracer.returned.items():
        node.meta[RETURNED_BY] = name
    return graph, root


def _first_line(err: Exception) -> str:
    text = str(err).strip()
    return text.splitlines()[0] if text else "no message"


class _ShapedProxy(fx.Proxy):
    """A proxy that answers questions about sizes with the sizes at hand."""

    def __len__(self) -> int:
        return len(self.node.meta[VALUE])

    def __int__(self) -> int:
        return int(self.node.meta[VALUE])

    def __index__(self) -> int:
        return int(self.node.meta[VALUE])

    def __float__(self) -> float:
        return float(self.node.meta[VALUE])


class _Tracer(fx.Tracer):
    def __init__(
        self, is_leaf: Callable[[nn.Module], bool], image: Tensor, defaults: dict[str, Any]
    ) -> None:
        from timm.layers._fx import get_notrace_functions

        wrapped = [f for f in get_notrace_functions() if callable(f)]  # type: ignore[no-untyped-call]
        super().__init__(autowrap_functions=tuple(wrapped), param_shapes_constant=False)
        self._leaf = is_leaf
        self._image = image
        self._defaults = defaults
        self._evaluating = False
        self.deepest = ""
        self.opaque: set[str] = set()
        self.returned: dict[fx.Node, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._evaluating:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name) or name in self.opaque:
            return self.create_proxy("call_module", name, args, kwargs)
        stack = self.module_stack.copy()
        try:
            result = super().call_module(m, forward, args, kwargs)
            if isinstance(result, fx.Proxy):
                self.returned[result.node] = self.returned.get(result.node, name)
            return result  # noqa: TRY300 - an else branch would hide that both ways return
        except Exception:
            self.deepest = self.deepest or name
            self.opaque.add(name)
            self.module_stack = stack  # fx leaves the module on it when its code fails
            # What was recorded of it stays as dead nodes: they can only tie and freeze more.
            return self.create_proxy("call_module", name, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._evaluating:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ShapedProxy(node, self)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *a: Any, **k: Any
    ) -> Any:
        result = super().create_proxy(kind, target, args, kwargs, *a, **k)
        node = result.node
        self._evaluating = True
        try:
            node.meta[VALUE] = self._evaluate(node)
        finally:
            self._evaluating = False
        return result

    def _evaluate(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            name = str(node.target).rpartition("_")[0]
            if name in self._defaults:
                return self._defaults[name]
            return node.args[0] if node.args else self._image
        if node.op == "output":
            return None
        if node.op == "get_attr":
            return _attribute(self.root, str(node.target))
        args = fx.map_arg(node.args, self._value)
        kwargs = fx.map_arg(node.kwargs, self._value)
        if node.op == "call_module":
            return self.root.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        return function(*args, **kwargs)

    def _value(self, node: fx.Node) -> Any:
        if VALUE not in node.meta:
            # A tensor that the forward code made itself becomes an attribute without a proxy.
            value = _attribute(self.root, str(node.target))
            node.meta[VALUE] = value.to("meta") if value.dim() else value
        return node.meta[VALUE]

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = obj.node.meta[VALUE]
        if isinstance(value, Tensor):
            raise fx.proxy.TraceError("a branch depends on the values of a tensor")
        return bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = obj.node.meta[VALUE]
        count = value.shape[0] if isinstance(value, Tensor) else len(value)
        return iter([obj[i] for i in range(count)])  # type: ignore[index]


def _attribute(root: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)
