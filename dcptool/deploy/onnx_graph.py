"""Changes to an ONNX graph after the exporter: names, constants, pre- and post-processing.

Every function edits the graph it is given. No torch here, and nothing is run or written.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization", "LayerNormalization")
_SCOPES = "pkg.torch.onnx.name_scopes"


def name_nodes(proto: onnx.ModelProto) -> None:
    """Call each node after the torch module it came from, and drop the exporter's notes.

    The notes hold absolute source paths of the machine that exported. A convolution with a
    folded norm carries the norm's scope, so the name of its weight is asked first.
    """
    weights = {tensor.name for tensor in proto.graph.initializer}
    taken: set[str] = set()
    for node in proto.graph.node:
        name = _weight_owner(node, weights) or _scope(node) or node.name or node.op_type
        if name in taken or not _is_layer(node, weights):
            name = f"{name}/{node.op_type}"
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        taken.add(unique)
        node.name = unique
        _forget(node)
    for item in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        _forget(item)
    for tensor in proto.graph.initializer:
        _forget(tensor)
    for function in proto.functions:
        _forget(function)
    _forget(proto.graph)
    del proto.metadata_props[:]


def _is_layer(node: onnx.NodeProto, weights: set[str]) -> bool:
    return bool(_weight_owner(node, weights))


def _weight_owner(node: onnx.NodeProto, weights: set[str]) -> str:
    if node.op_type not in WEIGHTED or len(node.input) < 2:
        return ""
    weight = node.input[1]
    return weight.rsplit(".", 1)[0] if weight in weights and "." in weight else ""


def _scope(node: onnx.NodeProto) -> str:
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError):
                return ""
            return next((str(scope) for scope in reversed(scopes[:-1]) if scope), "")
    return ""


def _forget(item: object) -> None:
    for name in ("metadata_props", "doc_string"):
        if hasattr(item, name):
            item.ClearField(name)  # type: ignore[attr-defined]


def flush_subnormals(proto: onnx.ModelProto) -> int:
    """Set subnormal weights to zero and tell how many there were.

    They change no result that can be seen, and slow a processor down many times. Only what
    folding has left in the graph counts, so this comes after it.
    """
    count = 0
    for tensor in proto.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        tiny = (values != 0) & (np.abs(values) < np.finfo(np.float32).tiny)
        found = int(tiny.sum())
        if found:
            count += found
            tensor.CopyFrom(
                numpy_helper.from_array(np.where(tiny, np.float32(0), values), tensor.name)
            )
    return count


def unfolded_norms(proto: onnx.ModelProto) -> list[str]:
    """Names of batch norms that stand directly behind a convolution of their own.

    None are left by the exporter's rewrites; a norm behind a concatenation or before its
    convolution cannot be folded and is not listed.
    """
    makers = {out: node for node in proto.graph.node for out in node.output}
    readers: dict[str, int] = {}
    for node in proto.graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    return [
        node.name
        for node in proto.graph.node
        if node.op_type == "BatchNormalization"
        and (maker := makers.get(node.input[0])) is not None
        and maker.op_type in ("Conv", "ConvTranspose")
        and readers[node.input[0]] == 1
    ]


def embed_preprocessing(
    proto: onnx.ModelProto, mean: Sequence[float], std: Sequence[float]
) -> None:
    """Let the graph take uint8 images, batch x height x width x channel, as decoders give them.

    Division by 255, mean and deviation become one multiplication and one addition.
    """
    graph = proto.graph
    old = graph.input[0]
    inner = f"{old.name}_normalised"
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == old.name:
                node.input[index] = inner
    dims = old.type.tensor_type.shape.dim
    shape = [dims[axis].dim_param or dims[axis].dim_value for axis in (0, 2, 3, 1)]
    # In double precision, then rounded once.
    scale = 1.0 / (255.0 * np.asarray(std, dtype=np.float64))
    shift = -np.asarray(mean, dtype=np.float64) / np.asarray(std, dtype=np.float64)
    channels = (1, -1, 1, 1)
    graph.initializer.extend(
        [
            numpy_helper.from_array(
                scale.astype(np.float32).reshape(channels), "preprocessing.scale"
            ),
            numpy_helper.from_array(
                shift.astype(np.float32).reshape(channels), "preprocessing.shift"
            ),
        ]
    )
    steps = [
        helper.make_node(
            "Transpose",
            ["image"],
            ["preprocessing.nchw"],
            "preprocessing/Transpose",
            perm=[0, 3, 1, 2],
        ),
        helper.make_node(
            "Cast",
            ["preprocessing.nchw"],
            ["preprocessing.float"],
            "preprocessing/Cast",
            to=TensorProto.FLOAT,
        ),
        helper.make_node(
            "Mul",
            ["preprocessing.float", "preprocessing.scale"],
            ["preprocessing.scaled"],
            "preprocessing/Mul",
        ),
        helper.make_node(
            "Add", ["preprocessing.scaled", "preprocessing.shift"], [inner], "preprocessing/Add"
        ),
    ]
    nodes = [*steps, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.input[:]
    graph.input.append(helper.make_tensor_value_info("image", TensorProto.UINT8, shape))


def append_softmax(proto: onnx.ModelProto) -> None:
    """Let the graph return probabilities instead of logits."""
    old = proto.graph.output[0]
    node = helper.make_node("Softmax", [old.name], ["probabilities"], "softmax", axis=-1)
    proto.graph.node.append(node)
    new = onnx.ValueInfoProto()
    new.CopyFrom(old)
    new.name = "probabilities"
    del proto.graph.output[:]
    proto.graph.output.append(new)


def to_half(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph computed in 16-bit floats, with inputs and outputs as they were."""
    import warnings

    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings():
        # It warns for each weight below the smallest half; parity judges the sum of it.
        warnings.simplefilter("ignore")
        half: onnx.ModelProto = convert_float_to_float16(proto, keep_io_types=True)
    sort_nodes(half)
    return half


def sort_nodes(proto: onnx.ModelProto) -> None:
    """Put every node behind those it reads from, as the format demands; converters append."""
    graph = proto.graph
    waiting = list(graph.node)
    made = {out for node in waiting for out in node.output}
    known: set[str] = set()
    ordered: list[onnx.NodeProto] = []
    while waiting:
        later = []
        for node in waiting:
            if all(name in known or name not in made for name in node.input):
                ordered.append(node)
                known.update(node.output)
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise ValueError(f"the graph has a cycle through {waiting[0].name!r}")
        waiting = later
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
    del graph.node[:]
    graph.node.extend(copies)


def describe(proto: onnx.ModelProto, version: str, facts: Mapping[str, object]) -> None:
    """Write who made the file and what it expects into its metadata."""
    proto.producer_name, proto.producer_version = "dcptool", version
    del proto.metadata_props[:]
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in facts.items()
        if value is not None
    }
    helper.set_model_props(proto, texts)


def metadata(proto: onnx.ModelProto) -> dict[str, str]:
    """The key-value pairs of a file's metadata."""
    return {entry.key: entry.value for entry in proto.metadata_props}
