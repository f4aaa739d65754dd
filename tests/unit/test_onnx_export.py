"""An exported graph computes what torch computes, or no file appears."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from small_network import MEAN, STD, Small, network

from dcptool import __version__
from dcptool.deploy import export as exporting
from dcptool.deploy import onnx_cost, onnx_export, onnx_graph, parity, targets
from dcptool.errors import GateFailed, InputError, UsageError
from dcptool.network import artifact, models


def run(path: Path, batch: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {session.get_inputs()[0].name: batch})[0]
    return result


def test_file_labels_metadata_and_names(tmp_path: Path) -> None:
    net = network()
    path = tmp_path / "m.onnx"
    result = exporting.export(net, path, facts={"rate": 0.5, "top1": 91.2, "artifact_sha256": "ab"})
    assert result.exporter == "torch.export"
    assert result.parity.samples == 9
    assert result.parity.max_rel < 1e-5
    assert result.bytes == path.stat().st_size
    assert (tmp_path / "m.labels.txt").read_text() == "ant\nbee\ncat\ndog\nline break\n"
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert (proto.producer_name, proto.producer_version) == ("dcptool", __version__)
    facts = onnx_graph.metadata(proto)
    assert facts["base_model"] == "zoo:small"
    assert json.loads(facts["mean"]) == list(MEAN)
    assert json.loads(facts["input_size"]) == [3, 32, 32]
    assert json.loads(facts["classes"])[1] == "bee"
    assert (facts["rate"], facts["top1"], facts["artifact_sha256"]) == ("0.5", "91.2", "ab")
    names = [node.name for node in proto.graph.node]
    assert len(set(names)) == len(names)
    assert {"stem", "block.0", "fc"} <= set(names)
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "m.labels.txt"}


def test_no_path_of_this_machine_is_in_the_file(tmp_path: Path) -> None:
    data = exporting.export(network(), tmp_path / "m.onnx").file.read_bytes()
    for mark in (
        b"site-packages",
        str(Path.home()).encode() + b"/",
        b"test_onnx_export.py",
        b".py",
    ):
        assert mark not in data


def test_norms_are_folded_and_those_that_cannot_be_stay(tmp_path: Path) -> None:
    ops = [
        n.op_type
        for n in onnx.load(exporting.export(network(), tmp_path / "a.onnx").file).graph.node
    ]
    assert "BatchNormalization" not in ops
    proto = onnx.load(exporting.export(network(Small(norm_first=True)), tmp_path / "b.onnx").file)
    assert sum(node.op_type == "BatchNormalization" for node in proto.graph.node) == 1
    assert onnx_graph.unfolded_norms(proto) == []


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_batch_is_free(tmp_path: Path, batch_size: int) -> None:
    net = network()
    path = exporting.export(net, tmp_path / "m.onnx").file
    images = torch.randn(batch_size, 3, 32, 32)
    with torch.no_grad():
        expected = net.module(images).numpy()
    np.testing.assert_allclose(run(path, images.numpy()), expected, atol=1e-5)


def test_size_can_be_free_and_everything_can_be_fixed(tmp_path: Path) -> None:
    net = network()
    free = exporting.export(net, tmp_path / "s.onnx", exporting.Options(dynamic="size"))
    assert free.parity.samples == 10
    assert run(free.file, np.zeros((2, 3, 48, 40), dtype=np.float32)).shape == (2, 5)
    fixed = exporting.export(net, tmp_path / "n.onnx", exporting.Options(dynamic="none"))
    dims = onnx.load(fixed.file).graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [1, 3, 32, 32]


def test_preprocessing_and_softmax_inside(tmp_path: Path) -> None:
    net = network()
    options = exporting.Options(with_preprocessing=True, softmax=True)
    path = exporting.export(net, tmp_path / "m.onnx", options).file
    pixels = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        expected = net.module(images).softmax(-1).numpy()
    got = run(path, pixels)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)


def test_half_precision(tmp_path: Path) -> None:
    plain = exporting.export(network(), tmp_path / "a.onnx")
    half = exporting.export(network(), tmp_path / "b.onnx", exporting.Options(fp16=True))
    assert half.bytes < 0.75 * plain.bytes
    assert 0 < half.parity.max_rel < 2e-2
    assert half.metadata["precision"] == "fp16"
    kinds = {tensor.data_type for tensor in onnx.load(half.file).graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds


def test_subnormal_weights_are_flushed_after_folding(tmp_path: Path) -> None:
    net = network()
    with torch.no_grad():
        net.module.fc.weight[:, :3] = 1e-40
        # Subnormal only once the norm is folded in.
        net.module.bn1.weight[0] = 1e-38
        net.module.stem.weight[0] = 1e-3
    result = exporting.export(net, tmp_path / "m.onnx")
    assert result.subnormal >= 15 + 27
    for tensor in onnx.load(result.file).graph.initializer:
        values = np.abs(numpy_helper.to_array(tensor)).astype(np.float64)
        assert not ((values > 0) & (values < np.finfo(np.float32).tiny)).any(), tensor.name


def test_a_file_says_how_its_network_was_pruned(tmp_path: Path) -> None:
    made = models.load("zoo:resnet20", pretrained=False)
    cost = {"params": 1, "macs": 2}
    pruned = {"rate": 0.5, "method": "dcp", "epsilon": None, "samples": 8}
    artifact.save(made, tmp_path, cost=cost, metrics={"top1": 9.5}, lineage={"prune": pruned})
    facts = targets.facts_of(tmp_path)
    assert len(str(facts.pop("artifact_sha256"))) == 64
    assert facts == {"rate": 0.5, "method": "dcp", "top1": 9.5, **cost}


def test_a_perturbed_weight_fails_parity_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = exporting.clean

    def perturb(proto: onnx.ModelProto) -> int:
        count = clean(proto)
        tensor = next(t for t in proto.graph.initializer if t.name == "block.0.weight")
        values = numpy_helper.to_array(tensor).copy()
        values[0, 0, 1, 1] += 0.01
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        return count

    monkeypatch.setattr(exporting, "clean", perturb)
    with pytest.raises(GateFailed) as caught:
        exporting.export(network(), tmp_path / "m.onnx")
    assert "--rtol" in caught.value.why
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    with pytest.raises(UsageError):
        exporting.export(network(), path)
    assert path.read_bytes() == b"old"
    exporting.export(network(), path, force=True)
    assert path.read_bytes() != b"old"


def test_nan_weights_are_named(tmp_path: Path) -> None:
    net = network()
    with torch.no_grad():
        net.module.fc.bias[0] = float("nan")
    with pytest.raises(InputError) as caught:
        exporting.export(net, tmp_path / "m.onnx")
    assert "fc.bias" in caught.value.why
    assert list(tmp_path.iterdir()) == []


def test_what_torch_export_cannot_do_is_done_by_the_older_one_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> onnx.ModelProto:
        raise RuntimeError("no")

    monkeypatch.setattr(onnx_export, "_by_export", refuse)
    result = exporting.export(network(), tmp_path / "m.onnx")
    assert result.exporter == "torchscript"
    assert "TorchScript" in capsys.readouterr().err
    assert result.parity.max_rel < 1e-5


def test_samples_are_used_for_parity(tmp_path: Path) -> None:
    images = [
        np.random.default_rng(k).standard_normal((5, 3, 32, 32), dtype=np.float32) for k in (0, 1)
    ]
    assert exporting.export(network(), tmp_path / "a.onnx", samples=images).parity.samples == 10
    options = exporting.Options(with_preprocessing=True)
    assert (
        exporting.export(network(), tmp_path / "b.onnx", options, samples=images).parity.samples
        == 10
    )


def test_macs_from_the_graph(tmp_path: Path) -> None:
    proto = onnx.load(exporting.export(network(), tmp_path / "m.onnx").file)
    by_layer = {cost.layer: cost.macs for cost in onnx_cost.layer_costs(proto)}
    assert by_layer == {
        "stem": 3 * 8 * 9 * 32 * 32,
        "block.0": 8 * 8 * 9 * 32 * 32,
        "fc": 40,
    }


def test_compare_measures_relative_to_the_largest_output() -> None:
    reference = np.array([[10.0, 0.0], [0.0, 1.0]])
    found = parity.compare(
        lambda x: reference, lambda x: reference + 0.5, [np.zeros((2, 1))], atol=0.0, rtol=0.05
    )
    assert found.ok
    assert (found.samples, found.max_abs, found.max_rel) == (2, 0.5, 0.05)
    flipped = parity.compare(
        lambda x: reference, lambda x: reference[:, ::-1], [np.zeros((2, 1))], atol=0.0, rtol=0.05
    )
    assert not flipped.ok
    assert flipped.top1_agreement == 0
    with pytest.raises(GateFailed):
        parity.compare(lambda x: x, lambda x: x * np.nan, [np.ones((1, 2))], atol=1, rtol=1)
