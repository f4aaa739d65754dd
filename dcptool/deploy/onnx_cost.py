"""Multiply-adds and parameters of an ONNX graph, from its shapes alone.

Counts convolutions and matrix products, as the rest of the program does; norms, additions
and pooling are free. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import onnx

_CONV = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3, "FusedConv": 1}
_PRODUCT = {"MatMul": (0, 1), "Gemm": (0, 1), "MatMulInteger": (0, 1), "QLinearMatMul": (0, 3)}


@dataclass(frozen=True)
class LayerCost:
    """MACs of one node for one image, and its weight's shape."""

    node: str
    layer: str
    kind: str
    macs: int
    weight: tuple[int, ...]


def layer_costs(proto: onnx.ModelProto, *, size: int | None = None) -> list[LayerCost]:
    """Cost of each convolution and matrix product for a batch of one."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    dims = fixed.graph.input[0].type.tensor_type.shape.dim
    for axis, dim in enumerate(dims):
        if not dim.HasField("dim_value"):
            dim.dim_value = 1 if axis == 0 else (size or 224)
    batch = dims[0].dim_value if dims else 1
    # Stale shapes of the free-batch graph would win over the inferred ones.
    del fixed.graph.value_info[:]
    for output in fixed.graph.output:
        output.type.tensor_type.ClearField("shape")
    shapes = _shapes(onnx.shape_inference.infer_shapes(fixed, data_prop=True))
    owner = layer_names(proto)
    found = []
    for node in fixed.graph.node:
        out = shapes.get(node.output[0]) if node.output else None
        if node.op_type in _CONV:
            weight = shapes.get(node.input[_CONV[node.op_type]])
            macs = prod(out) * prod(weight[1:]) if out and weight else 0
        elif node.op_type == "ConvTranspose":
            source, weight = shapes.get(node.input[0]), shapes.get(node.input[1])
            macs = prod(source) * prod(weight[1:]) if source and weight else 0
        elif node.op_type in _PRODUCT:
            left, right = (shapes.get(node.input[i]) for i in _PRODUCT[node.op_type])
            weight = right
            inner = _inner(node, left)
            macs = prod(out) * inner if out and inner else 0
        else:
            continue
        found.append(
            LayerCost(
                node.name,
                owner.get(node.name, node.name),
                node.op_type,
                macs // max(batch, 1),
                weight or (),
            )
        )
    return found


def macs(proto: onnx.ModelProto, *, size: int | None = None) -> int:
    """MACs of the graph for one image."""
    return sum(layer.macs for layer in layer_costs(proto, size=size))


def params(proto: onnx.ModelProto) -> int:
    """Number of stored values, norms folded in."""
    return sum(prod(tensor.dims) for tensor in proto.graph.initializer)


def _inner(node: onnx.NodeProto, left: tuple[int, ...] | None) -> int:
    if not left:
        return 0
    transposed = any(a.name == "transA" and a.i for a in node.attribute)
    return left[0] if node.op_type == "Gemm" and transposed else left[-1]


def _shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    shapes = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        dims = value.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = tuple(dim.dim_value for dim in dims)
    return shapes


def layer_names(proto: onnx.ModelProto) -> dict[str, str]:
    """For each node name, the torch module it stands for: its weight's name says so."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    makers = {out: node for node in proto.graph.node for out in node.output}
    names: dict[str, str] = {}
    for node in proto.graph.node:
        weight = _weight_name(node.input, weights, makers)
        names[node.name] = weight or node.name.split("/")[0]
    return names


def _weight_name(
    inputs: Sequence[str], weights: set[str], makers: dict[str, onnx.NodeProto]
) -> str:
    for name in inputs[1:2] or ():
        # Quantised weights stand behind a DequantizeLinear, 16-bit ones may behind a Cast.
        for _ in range(3):
            if name in weights:
                break
            maker = makers.get(name)
            if maker is None or maker.op_type not in ("DequantizeLinear", "Cast", "Transpose"):
                break
            name = maker.input[0]
        stem = name.removesuffix("_quantized")
        if name in weights and stem.endswith(".weight"):
            return stem.removesuffix(".weight")
    return ""
