"""An .onnx file as a predictor: what its metadata say is believed only where it makes sense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from dcptool.deploy.predictor import open_onnx
from dcptool.errors import InputError


def classifier(path: Path, **facts: str) -> Path:
    """Global pooling and one Gemm, 3 -> 2, with metadata."""
    weight = numpy_helper.from_array(np.eye(3, 2, dtype=np.float32), "fc.weight")
    nodes = [
        helper.make_node("GlobalAveragePool", ["input"], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flat"),
        helper.make_node("Gemm", ["flat", "fc.weight"], ["logits"], "fc"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, facts)
    path.write_bytes(model.SerializeToString())
    return path


def test_metadata_say_how_it_is_fed(tmp_path: Path) -> None:
    said = {"classes": '["a", "b"]', "mean": "[0.1, 0.2, 0.3]", "std": "[1, 1, 1]"}
    said |= {"input_size": "[3, 8, 8]", "crop_pct": "0.9", "interpolation": "bicubic"}
    opened = open_onnx(classifier(tmp_path / "m.onnx", **said))
    assert opened.network.classes == ("a", "b")
    assert opened.network.input.mean == (0.1, 0.2, 0.3)
    assert opened.network.input.crop_pct == 0.9
    assert opened.predict(torch.ones(4, 3, 8, 8)).shape == (4, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classes", "{"),
        ("classes", "[1, 2]"),
        ("classes", '{"a": 1}'),
        ("classes", "[" * 100_000),
        ("mean", "[NaN, 0, 0]"),
        ("mean", '["x", 0, 0]'),
        ("std", "1e999"),
        ("input_size", "[3, -8, 8]"),
        ("input_size", "[3, 99999999999, 8]"),
        ("input_size", "7"),
        ("crop_pct", "nan"),
        ("crop_pct", "many"),
        ("interpolation", "../../x"),
    ],
)
def test_metadata_without_sense_are_refused(tmp_path: Path, key: str, value: str) -> None:
    path = classifier(tmp_path / "m.onnx", **{key: value})
    with pytest.raises(InputError, match="refused") as caught:
        open_onnx(path)
    assert f"for {key}" in caught.value.why
    assert onnx.load(path)
