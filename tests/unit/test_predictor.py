"""An .onnx file as a predictor: what its metadata say is believed only where it makes sense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from dcptool.deploy.predictor import open_onnx
from dcptool.errors import InputError, UsageError


def classifier(
    path: Path,
    *,
    shape: tuple[int | str, ...] = ("batch", 3, 8, 8),
    kind: int = TensorProto.FLOAT,
    **facts: str,
) -> Path:
    """Global pooling and one Gemm, 3 -> 2, with metadata."""
    weight = numpy_helper.from_array(np.eye(3, 2, dtype=np.float32), "fc.weight")
    order = [0, 3, 1, 2] if shape[3] == 3 else [0, 1, 2, 3]
    nodes = [
        helper.make_node("Cast", ["input"], ["float"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["float"], ["images"], "order", perm=order),
        helper.make_node("GlobalAveragePool", ["images"], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flat"),
        helper.make_node("Gemm", ["flat", "fc.weight"], ["logits"], "fc"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input", kind, shape)],
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


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.UINT8])
@pytest.mark.parametrize("shape", [("n", 3, 8, 6), ("n", 8, 6, 3), ("n", "h", "w", 3)])
def test_files_of_other_tools(tmp_path: Path, shape: tuple[int | str, ...], kind: int) -> None:
    """Channels first or last, in any type, and not square."""
    opened = open_onnx(classifier(tmp_path / "m.onnx", shape=shape, kind=kind))
    assert opened.network.input.size == ((3, 8, 6) if 6 in shape else (3, 224, 224))
    images = torch.rand(4, *opened.network.input.size)
    scale = 255 if kind == TensorProto.UINT8 else 1
    wanted = scale * images.mean((2, 3))[:, :2]
    torch.testing.assert_close(opened.predict(images), wanted, atol=scale * 1e-3, rtol=1e-2)


def test_what_a_file_does_not_take(tmp_path: Path) -> None:
    path = classifier(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="8 x 8 px only, not of 16"):
        open_onnx(path, img_size=16)
    with pytest.raises(InputError, match="on a batch of 2 x 3 x 8 x 9"):
        open_onnx(path).predict(torch.zeros(2, 3, 8, 9))
    with pytest.raises(InputError, match="takes no images"):
        open_onnx(classifier(path, kind=TensorProto.INT64))


def test_the_child_imports_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = classifier(tmp_path / "m.onnx")
    for name in ("resource.py", "secrets.py", "onnx.py", "dcptool.py"):
        (tmp_path / name).write_text("open('ran', 'w'); raise ImportError('ran')")
    monkeypatch.chdir(tmp_path)
    assert open_onnx(path).network.base.num_classes == 2
    assert not (tmp_path / "ran").exists()


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
