"""The scan refuses what could reach other files, run code or fill the memory."""

from __future__ import annotations

import os
import resource
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dcptool.deploy import guard, onnx_scan
from dcptool.errors import InputError


def tiny() -> onnx.ModelProto:
    """One Gemm, 4 -> 2."""
    weight = numpy_helper.from_array(np.ones((4, 2), dtype=np.float32), "fc.weight")
    node = helper.make_node("Gemm", ["input", "fc.weight"], ["logits"], "fc")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def external(location: str) -> onnx.ModelProto:
    model = tiny()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "32")):
        tensor.external_data.add(key=key, value=value)
    return model


def write(folder: Path, model: onnx.ModelProto | bytes) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        onnx_scan.scan(path)
    assert str(path) in caught.value.message
    return caught.value.why


def test_accepts_a_plain_model_also_through_a_link(tmp_path: Path) -> None:
    path = write(tmp_path, tiny())
    scanned = onnx_scan.scan(path)
    assert scanned.folder is None
    assert scanned.bytes == path.stat().st_size
    (tmp_path / "hard.onnx").hardlink_to(path)
    (tmp_path / "soft.onnx").symlink_to(path)
    assert onnx_scan.scan(tmp_path / "hard.onnx").data == scanned.data
    assert onnx_scan.scan(tmp_path / "soft.onnx").data == scanned.data


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
        (b"\x80\x04\x95\x00\x00", "run code"),
        (b"PK\x03\x04" + b"\0" * 60, "run code"),
        (b'{"format": 1}', "JSON"),
        (b"hello, I am a text file and not a model at all", "not ONNX"),
        (bytes(range(256)) * 8, "not ONNX"),
    ],
)
def test_names_what_is_not_onnx(tmp_path: Path, content: bytes, says: str) -> None:
    assert says in refusal(write(tmp_path, content))


@pytest.mark.parametrize("size", [onnx_scan.SIZE_LIMIT, onnx_scan.SIZE_LIMIT + 1, 1 << 40])
def test_holes_cost_no_memory(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.onnx"
    with path.open("wb") as stream:
        stream.truncate(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


def test_a_small_file_asks_for_little_memory(tmp_path: Path) -> None:
    path = write(tmp_path, tiny())
    tracemalloc.start()
    onnx_scan.scan(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_holes_in_external_data_raise_no_limit(tmp_path: Path) -> None:
    with (tmp_path / "w.bin").open("wb") as stream:
        stream.truncate(1 << 40)
    scanned = onnx_scan.scan(write(tmp_path, external("w.bin")))
    assert scanned.bytes > 1 << 40
    assert scanned.weight_bytes == 32


def test_truncation_is_refused_or_is_no_graph(tmp_path: Path) -> None:
    data = tiny().SerializeToString()
    for cut in range(1, 16):
        path = write(tmp_path, data[: len(data) * cut // 16])
        with pytest.raises(InputError):
            guard.check_whole(onnx_scan.scan(path))


def test_folders_pipes_and_missing_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    for path in (tmp_path, tmp_path / "pipe.onnx", Path("/dev/zero"), tmp_path / "none.onnx"):
        with pytest.raises(InputError):
            onnx_scan.scan(path)


@pytest.mark.parametrize(
    "location", ["../weights.bin", "/etc/passwd", "a/../../w.bin", "", "C:\\w.bin", "..\\w.bin"]
)
def test_external_data_outside_the_folder(tmp_path: Path, location: str) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(32))
    inner = tmp_path / "inner"
    inner.mkdir()
    assert "outside" in refusal(write(inner, external(location)))


def test_external_data_behind_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "w.bin").write_bytes(bytes(32))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").symlink_to(secret / "w.bin")
    assert "link" in refusal(write(folder, external("w.bin")))
    (folder / "parent").symlink_to(secret)
    assert "link" in refusal(write(folder, external("parent/w.bin")))
    (folder / "w.bin").unlink()
    (folder / "w.bin").hardlink_to(secret / "w.bin")
    assert "hard link" in refusal(write(folder, external("w.bin")))
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=r"m\.onnx"):
        onnx_scan.scan(Path("m.onnx"))


def test_external_data_that_is_a_file_of_its_own_is_loaded(tmp_path: Path) -> None:
    weights = np.arange(8, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(weights.tobytes())
    path = write(tmp_path, external("w.bin"))
    scanned = onnx_scan.scan(path)
    assert scanned.folder == tmp_path
    assert scanned.bytes == path.stat().st_size + 32
    from dcptool.deploy.session import open_session

    session = open_session(scanned.data, folder=scanned.folder)
    got = session.run(None, {"input": np.ones((1, 4), dtype=np.float32)})[0]
    np.testing.assert_allclose(got, weights.reshape(4, 2).sum(0, keepdims=True))


def test_sparse_initialiser(tmp_path: Path) -> None:
    model = tiny()
    sparse = model.graph.sparse_initializer.add()
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, dtype=np.float32), "s"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, dtype=np.int64), "i"))
    sparse.dims.extend([2**29])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "sparse" in refusal(write(tmp_path, model))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def test_custom_domain_opset_and_ir(tmp_path: Path) -> None:
    model = tiny()
    model.graph.node[0].domain = "evil.ops"
    assert "evil.ops" in refusal(write(tmp_path, model))
    # onnxruntime lists many that no node uses in every file that it saves.
    model = tiny()
    model.opset_import.add(domain="ai.onnx.training", version=1)
    assert onnx_scan.scan(write(tmp_path, model))
    model = tiny()
    model.opset_import[0].version = 999
    assert "opset 999" in refusal(write(tmp_path, model))
    model = tiny()
    model.ir_version = 99
    assert "IR version 99" in refusal(write(tmp_path, model))


def test_custom_domain_inside_a_branch(tmp_path: Path) -> None:
    model = tiny()
    inner = helper.make_graph(
        [helper.make_node("Boom", [], ["x"], "boom", domain="evil.ops")], "inner", [], []
    )
    attribute = helper.make_attribute("then_branch", inner)
    model.graph.node.append(helper.make_node("If", ["c"], ["y"], "if"))
    model.graph.node[-1].attribute.append(attribute)
    assert "evil.ops" in refusal(write(tmp_path, model))


def test_deep_nesting(tmp_path: Path) -> None:
    graph = helper.make_graph([helper.make_node("Relu", ["a"], ["b"])], "g0", [], [])
    for depth in range(25):
        node = helper.make_node("If", ["c"], ["b"], f"if{depth}")
        node.attribute.append(helper.make_attribute("then_branch", graph))
        graph = helper.make_graph([node], f"g{depth + 1}", [], [])
    model = tiny()
    model.graph.node.extend(graph.node)
    assert "nested" in refusal(write(tmp_path, model))


@pytest.mark.parametrize("dims", [[2**40], [-1], [2**20, 2**20], [-(2**62)]])
def test_absurd_dimensions(tmp_path: Path, dims: list[int]) -> None:
    model = tiny()
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend(dims)
    assert "fc.weight" in refusal(write(tmp_path, model))
    model = tiny()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = dims[0]
    if dims[0] < 0 or dims[0] > 2**31:
        assert "input" in refusal(write(tmp_path, model))


def test_functions_of_its_own(tmp_path: Path) -> None:
    model = tiny()
    model.functions.add(name="again", domain="local")
    assert "again" in refusal(write(tmp_path, model))


# The child process


def constant_of_shape(elements: list[int]) -> onnx.ModelProto:
    shape = numpy_helper.from_array(np.asarray(elements, dtype=np.int64), "shape")
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["big"], "big"),
        helper.make_node("ReduceSum", ["big"], ["sum"], "sum", keepdims=0),
        helper.make_node("Add", ["input", "sum"], ["logits"], "add"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4])],
        [shape],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_a_small_file_that_fills_the_memory_takes_only_the_child(tmp_path: Path) -> None:
    path = write(tmp_path, constant_of_shape([2**15, 2**16]))
    with pytest.raises(InputError) as caught:
        guard.visit(path, memory_bytes=2 << 30)
    assert "memory limit" in caught.value.why
    assert "--onnx-memory" in caught.value.try_


def test_an_invalid_graph_is_named(tmp_path: Path) -> None:
    model = tiny()
    model.graph.node[0].input[0] = "nowhere"
    with pytest.raises(InputError) as caught:
        guard.visit(write(tmp_path, model))
    assert "nowhere" in caught.value.why


def test_a_child_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    monkeypatch.setattr(guard.child, "command", lambda *_: crash)
    with pytest.raises(InputError, match="refused") as caught:
        guard.visit(write(tmp_path, tiny()))
    assert "signal 11" in caught.value.why


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(guard.child, "command", lambda *_: sleeper)
    with pytest.raises(InputError) as caught:
        guard.visit(write(tmp_path, tiny()), time_limit_s=0.5)
    assert "longer than" in caught.value.why


def test_the_child_counts(tmp_path: Path) -> None:
    seen = guard.visit(write(tmp_path, tiny()), batch_size=3)
    assert (seen.macs, seen.params) == (8, 8)
    assert 0 < seen.peak_bytes < 200 << 20
