"""INT8: calibrated on images, judged by accuracy, layers that hurt left in float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from small_network import network

from dcptool.deploy import export as exporting
from dcptool.deploy import int8, onnx_cost, quantize
from dcptool.errors import GateFailed, UsageError

GENERATOR = np.random.default_rng(0)
BATCHES = [GENERATOR.standard_normal((8, 3, 32, 32), dtype=np.float32) for _ in range(4)]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    path = tmp_path_factory.mktemp("float") / "m.onnx"
    return onnx.load(exporting.export(network(), path).file)


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_each_calibration_gives_a_valid_int8_graph(graph: onnx.ModelProto, method: str) -> None:
    ranges = quantize.calibrate(graph, BATCHES, method)
    assert ranges.images == 32
    model = quantize.quantize(ranges)
    onnx.checker.check_model(model, full_check=True)
    stored = {t.name: t.data_type for t in model.graph.initializer}
    assert stored["block.0.weight_quantized"] == onnx.TensorProto.INT8
    scales = next(t for t in model.graph.initializer if t.name == "block.0.weight_scale")
    assert list(scales.dims) == [8]
    exact, rough = int8.predictor(graph), int8.predictor(model)
    error = np.abs(np.asarray(exact(BATCHES[0])) - np.asarray(rough(BATCHES[0]))).max()
    assert 0 < error < 0.1 * np.abs(np.asarray(exact(BATCHES[0]))).max()
    assert onnx_cost.macs(model) == onnx_cost.macs(graph)


def test_skipped_layers_stay_in_float(graph: onnx.ModelProto) -> None:
    ranges = quantize.calibrate(graph, BATCHES)
    model = quantize.quantize(ranges, skip=quantize.named_layers(graph, ["block"]))
    names = {tensor.name for tensor in model.graph.initializer}
    assert "block.0.weight" in names
    assert "stem.weight_quantized" in names
    with pytest.raises(UsageError) as caught:
        quantize.named_layers(graph, ["blok.0"])
    assert "block.0" in caught.value.try_


def test_auto_leaves_the_layer_that_hurts(graph: onnx.ModelProto) -> None:
    worn = onnx.ModelProto()
    worn.CopyFrom(graph)
    ranges = quantize.calibrate(worn, BATCHES)
    order = quantize.by_harm(ranges, BATCHES[0])
    assert sorted(order) == ["block.0", "fc", "stem"]
    asked: list[int] = []

    def drop(model: onnx.ModelProto) -> float:
        floats = sum(t.name == f"{order[0]}.weight" for t in model.graph.initializer)
        asked.append(floats)
        return 0.1 if floats else 3.0

    _, skipped = quantize.quantize_auto(ranges, BATCHES[0], drop, limit=0.5)
    assert skipped == order[:1]
    assert asked == [0, 1]


def test_accuracy_gate_leaves_no_file(tmp_path: Path) -> None:
    answers = iter([90.0, 88.0])
    images = int8.Images(BATCHES, top1=lambda predict: next(answers))
    options = exporting.Options(int8=int8.Settings(max_accuracy_drop=0.5))
    with pytest.raises(GateFailed, match=r"2\.00 points"):
        exporting.export(network(), tmp_path / "m.onnx", options, images=images)
    assert list(tmp_path.iterdir()) == []


def test_export_to_int8_with_preprocessing(tmp_path: Path) -> None:
    net = network()
    labels = [int(k) for batch in BATCHES for k in net.module(torch.from_numpy(batch)).argmax(1)]

    def top1(predict: exporting.parity.Function) -> float:
        found = np.concatenate([np.asarray(predict(batch)).argmax(1) for batch in BATCHES])
        return 100.0 * float((found == labels).mean())

    options = exporting.Options(int8=int8.Settings(), with_preprocessing=True, softmax=True)
    images = int8.Images(BATCHES, top1)
    result = exporting.export(net, tmp_path / "m.onnx", options, images=images)
    document = result.document()["int8"]
    assert isinstance(document, dict)
    assert document["top1_before"] == 100.0
    assert document["top1_after"] > 80
    assert result.parity.max_rel < 1e-5
    proto = onnx.load(result.file)
    assert proto.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8


def test_a_fixed_batch_is_calibrated_image_by_image(tmp_path: Path) -> None:
    options = exporting.Options(dynamic="none", int8=int8.Settings(skip=("auto",)))
    done = exporting.export(
        network(), tmp_path / "m.onnx", options, images=int8.Images(BATCHES), labels=False
    )
    assert done.int8 is not None
    assert done.int8.images == 32
    assert done.int8.agreement > 50


def test_combinations_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        exporting.export(network(), tmp_path / "m.onnx", exporting.Options(int8=int8.Settings()))
    with pytest.raises(UsageError):
        exporting.export(
            network(),
            tmp_path / "m.onnx",
            exporting.Options(int8=int8.Settings(), fp16=True),
            images=int8.Images(BATCHES),
        )
    with pytest.raises(UsageError, match="labelled"):
        exporting.export(
            network(),
            tmp_path / "m.onnx",
            exporting.Options(int8=int8.Settings(max_accuracy_drop=1.0)),
            images=int8.Images(BATCHES),
        )
