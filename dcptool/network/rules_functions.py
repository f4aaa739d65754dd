"""Rules for functions and tensor methods.

Pure index functions are run on the labels themselves: the result is the index map. Additions
and multiplications tie their operands. A size written as a literal cannot change with a cut, so
labels along such a dimension are tied to each other, which keeps that dimension whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dcptool.network.labels import compact, is_constant, respread, shrink
from dcptool.network.rules import Flow, rule, tensors_in, varies

# fmt: off
ELEMENTWISE = (
    "relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_", "gelu", "silu", "hardswish",
    "hardsigmoid", "softplus", "abs", "exp", "log", "sqrt", "rsqrt", "clamp", "clamp_", "clip",
    "neg", "square", "contiguous", "clone", "detach", "float", "half", "to", "type", "type_as",
    "pow", "erf", "softsign", "mish", "elu", "leaky_relu", "relu6", "hardtanh", "logsigmoid",
    "dropout", "round", "floor", "requires_grad_", "double", "bfloat16", "sin", "cos",
    "reciprocal", "nan_to_num", "sign", "cuda", "cpu", "selu", "celu",
)
# fmt: on
_NAMES = {
    getattr(owner, name)
    for owner in (torch, F)
    for name in [*ELEMENTWISE, "dropout2d", "dropout3d", "alpha_dropout"]
    if callable(getattr(owner, name, None)) and name not in ("to", "type", "float", "half")
}


@rule(*ELEMENTWISE)
@rule(*_NAMES)
@rule(operator.neg, operator.abs, operator.pow)
def elementwise(flow: Flow, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Changes values, not channels."""
    others = [t for t in tensors_in([args, kwargs]) if t.dim()]
    for other in others:
        labels = _tie(flow, labels, other, added=False)
    return labels


@rule(operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub)
@rule("add", "add_", "sub", "sub_", "__add__", "__radd__", "__sub__", "__rsub__")
def addition(flow: Flow, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
    """A sum of two tensors: channel by channel, both stay or both go."""
    return _binary(flow, first, second, added=True)


@rule(operator.mul, operator.imul, operator.truediv, operator.itruediv, torch.mul, torch.div)
@rule(torch.maximum, torch.minimum, "mul", "mul_", "div", "div_", "__mul__", "__rmul__")
def multiplication(flow: Flow, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
    """A gate or a scale: the gate's channels follow."""
    return _binary(flow, first, second, added=False)


def _binary(flow: Flow, first: Any, second: Any, *, added: bool) -> Any:
    if not isinstance(first, Tensor):
        first, second = second, first
    if not isinstance(second, Tensor):
        return first
    return _tie(flow, first, second, added=added)


def _tie(flow: Flow, first: Tensor, second: Tensor, *, added: bool) -> Tensor:
    """Tie two operands after broadcasting; returns the labels of the result."""
    shape = _common_shape(first, second)
    wide = [t.reshape((1,) * (len(shape) - t.dim()) + tuple(t.shape)) for t in (first, second)]
    for this, other in (wide, wide[::-1]):
        for dim, size in enumerate(shape):
            if this.shape[dim] == 1 and size > 1 and varies(flow, other, dim):
                # One value for many channels: a spatial gate or a scalar. It ties nothing.
                if this.numel() > 1 or int(this.max()) >= 0:
                    flow.ties.freeze(this, f"{flow.place} broadcasts one channel over many")
                return other.expand(shape)
    small = [shrink(flow.ties, t) for t in wide]
    common = _common_shape(*small)
    one, two = (t.expand(common) for t in small)
    place = flow.place if added and not _is_parameter(flow) else ""
    flow.ties.join(one, two, added_at=place)
    result = torch.where(one >= 0, one, two)
    return result.expand(shape)


def _common_shape(first: Tensor, second: Tensor) -> tuple[int, ...]:
    shape: torch.Size = torch.broadcast_shapes(first.shape, second.shape)  # type: ignore[no-untyped-call]
    return tuple(shape)


def _is_parameter(flow: Flow) -> bool:
    assert flow.node is not None
    return any(isinstance(a, fx.Node) and _sees_no_image(a) for a in flow.node.args)


def _sees_no_image(node: fx.Node) -> bool:
    """Whether a value is made of parameters alone, reshaped or not."""
    if node.op == "get_attr":
        return True
    made_of = node.all_input_nodes
    return node.op != "placeholder" and bool(made_of) and all(map(_sees_no_image, made_of))


@rule(F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.avg_pool2d, F.max_pool2d, F.lp_pool2d)
@rule(F.interpolate, F.adaptive_avg_pool1d, F.avg_pool1d, F.max_pool1d, F.upsample)
@rule(torch.max_pool2d)
def over_positions(flow: Flow, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Mixes positions inside each channel."""
    return flow.over_space(labels)


@rule(F.pad)
def pad(flow: Flow, labels: Tensor, pads: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
    """Positions may be padded; channels padded by a literal number keep their width."""
    for index in range(len(pads) // 2):
        dim = labels.dim() - 1 - index
        if (pads[2 * index] or pads[2 * index + 1]) and varies(flow, labels, dim):
            return flow.freeze(labels, f"{flow.place} pads channels by a fixed number")  # type: ignore[no-any-return]
    shape = flow.shape()
    for dim in range(labels.dim()):
        if labels.shape[dim] != shape[dim]:
            labels = labels.narrow(dim, 0, 1)
    return labels.expand(shape)


@rule(torch.cat, torch.concat)
def concat(flow: Flow, parts: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Tensor:
    """The labels go where the values go."""
    return respread(flow.ties, torch.cat(list(parts), kwargs.get("axis", dim)))


@rule(torch.stack)
def stack(flow: Flow, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """A new dimension; the same channel in each part must stay or go together."""
    for part in parts[1:]:
        flow.ties.join(*_compact_pair(flow, parts[0], part))
    return torch.stack(list(parts), dim)


def _compact_pair(flow: Flow, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    small = shrink(flow.ties, first), shrink(flow.ties, second)
    common = _common_shape(*small)
    return small[0].expand(common), small[1].expand(common)


@rule(torch.flatten, "flatten", torch.squeeze, "squeeze", torch.unsqueeze, "unsqueeze")
@rule(torch.permute, "permute", torch.transpose, "transpose", torch.swapaxes, "swapaxes")
@rule("expand_as", "t", torch.movedim, "movedim", torch.flip, "flip", torch.broadcast_to)
def moved(flow: Flow, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Pure index functions: run on the labels themselves."""
    assert flow.node is not None
    if flow.node.op == "call_method":
        return getattr(labels, str(flow.node.target))(*args, **kwargs)
    return flow.node.target(labels, *args, **kwargs)  # type: ignore[operator]


@rule("expand")
def expand(flow: Flow, labels: Tensor, *sizes: Any) -> Tensor:
    """Repeats one position."""
    return labels.expand(*sizes)


@rule("repeat", torch.tile)
def repeat(flow: Flow, labels: Tensor, *sizes: Any) -> Tensor:
    """Repeats positions; repeated channels stay or go together, which the labels say already."""
    return labels.repeat(*sizes)


@rule(torch.roll, "roll")
def roll(flow: Flow, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Shifts positions; a shift of channels by a literal keeps their width."""
    moved_labels = torch.roll(labels, *args, **kwargs)
    if not torch.equal(moved_labels, labels):
        flow.ties.freeze(labels, f"{flow.place} shifts channels")
    return moved_labels


@rule("reshape_as", "view_as")
def reshape_as(flow: Flow, labels: Tensor, other: Tensor) -> Tensor:
    """Takes its sizes from a tensor, so that they follow a cut."""
    return respread(flow.ties, labels.reshape(flow.shape()))


@rule("view", "reshape", torch.reshape, "unflatten", torch.unflatten)
def reshape(flow: Flow, labels: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    """Splits and merges dimensions; a dimension of literal size is kept whole by ties."""
    assert flow.node is not None
    result = labels.reshape(flow.shape())
    name = flow.node.target if flow.node.op == "call_method" else flow.node.target.__name__  # type: ignore[union-attr]
    written: Any = flow.node.args[1:] or tuple(flow.node.kwargs.values())
    if name == "unflatten":
        dim = int(sizes[0] if sizes else kwargs["dim"]) % labels.dim()
        inner = list(written[1] if isinstance(written[1], (tuple, list)) else ())
        written = (None,) * dim + tuple(inner)
    elif written and isinstance(written[0], (tuple, list)):
        written = tuple(written[0])
    for dim, size in enumerate(written):
        if isinstance(size, int) and size > 1 and varies(flow, result, dim):
            small = compact(result)
            flow.ties.join(small, small.narrow(dim, 0, 1).expand_as(small))
    return respread(flow.ties, result)


@rule(torch.chunk, "chunk")
def chunk(flow: Flow, labels: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Equal parts stay equal when the same channel of each goes."""
    parts = labels.chunk(chunks, dim)
    if varies(flow, labels, dim):
        if len({part.shape[dim] for part in parts}) > 1:
            flow.ties.freeze(labels, f"{flow.place} splits channels into unequal parts")
        else:
            for part in parts[1:]:
                flow.ties.join(*_compact_pair(flow, parts[0], part))
    return parts


@rule(torch.split, "split", torch.split_with_sizes, "split_with_sizes")
def split(flow: Flow, labels: Tensor, sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """A split at literal sizes keeps the widths; equal computed sizes behave like chunk."""
    assert flow.node is not None
    written = flow.node.args[1] if len(flow.node.args) > 1 else flow.node.kwargs.get("split_size")
    if varies(flow, labels, dim):
        total = labels.shape[dim]
        if isinstance(written, fx.Node) and isinstance(sizes, int) and total % sizes == 0:
            return chunk(flow, labels, total // sizes, dim)
        if not (isinstance(sizes, int) and sizes >= total):
            flow.ties.freeze(labels, f"{flow.place} splits channels at fixed widths")
    parts: tuple[Tensor, ...] = torch.split(labels, sizes, dim)
    return parts


@rule(torch.unbind, "unbind")
def unbind(flow: Flow, labels: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Takes a dimension apart, which therefore has to stay whole."""
    if varies(flow, labels, dim):
        flow.ties.freeze(labels, f"{flow.place} takes channels apart")
    return labels.unbind(dim)


@rule(operator.getitem)
def getitem(flow: Flow, value: Any, index: Any) -> Any:
    """Indexing: of tuples as it is; of channels only where the whole width is taken."""
    if not isinstance(value, Tensor):
        return value[index]
    if any(True for _ in tensors_in(index)):
        return flow.freeze([value, index], f"{flow.place} picks channels by an index tensor")
    dim = 0
    for item in index if isinstance(index, tuple) else (index,):
        if item is Ellipsis:
            dim = value.dim() - sum(i is not None and i is not Ellipsis for i in index) + dim
            continue
        if item is None:
            continue
        if (
            dim < value.dim()
            and varies(flow, value, dim)
            and not _takes_all(item, value.shape[dim])
        ):
            flow.ties.freeze(value, f"{flow.place} takes a fixed part of the channels")
            break
        dim += 1
    return value[index]


def _takes_all(item: Any, size: int) -> bool:
    if not isinstance(item, slice):
        return False
    full = item.stop is None or item.stop >= size
    return item.start in (None, 0) and full and item.step in (None, 1)


@rule("mean", torch.mean, "sum", torch.sum, "amax", torch.amax, "amin", torch.amin)
@rule("std", torch.std, "var", torch.var)
def reduction(flow: Flow, labels: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """May run over positions; over channels it reads all of them."""
    dim = kwargs.get("axis", dim)
    dims = tuple(range(labels.dim())) if dim is None else dim
    dims = tuple(d % labels.dim() for d in ((dims,) if isinstance(dims, int) else dims))
    if not is_constant(flow.ties, labels, dims):
        return flow.freeze(labels, f"{flow.place} runs over the channels")
    for d in dims:
        labels = labels.narrow(d, 0, 1)
    return labels.reshape(flow.shape()) if labels.dim() != len(flow.shape()) else labels


@rule(F.softmax, torch.softmax, "softmax", F.log_softmax, "log_softmax", torch.log_softmax)
@rule(F.normalize)
def along(flow: Flow, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Normalises along one dimension, which must not be the channels'."""
    names = {"dim": 2 if flow.node.target is F.normalize else 1}  # type: ignore[union-attr]
    position = names["dim"] - 1
    dim = kwargs.get("dim", args[position] if len(args) > position else 1)
    if varies(flow, labels, dim % labels.dim()):
        flow.ties.freeze(labels, f"{flow.place} normalises over the channels")
    return labels


@rule(F.layer_norm, F.group_norm, F.local_response_norm)
def norm_over_channels(flow: Flow, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Every channel changes every other one."""
    flow.freeze([labels, args, kwargs], f"{flow.place} normalises over the channels")
    return labels


@rule("size", "dim", "numel", getattr, "ndimension", "is_contiguous")
def question(flow: Flow, labels: Any, *args: Any) -> Any:
    """Sizes are known; they are plain numbers from here on."""
    return getattr(labels, args[0]) if isinstance(flow.value, Tensor) else flow.value
