"""Timing that says how sure it is, and never calls one thing by the name of another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dcptool.deploy import bench, bench_table, machine, profile, session, timing
from dcptool.errors import EnvironmentFault, InputError, UsageError

GENERATOR = np.random.default_rng(0)


def convolutions(count: int, channels: int = 16, size: int = 32) -> onnx.ModelProto:
    """A chain of convolutions with activations, free batch."""
    nodes, weights, last = [], [], "input"
    for k in range(count):
        inputs = 3 if k == 0 else channels
        weight = GENERATOR.standard_normal((channels, inputs, 3, 3)).astype(np.float32) / 10
        weights.append(numpy_helper.from_array(weight, f"layer{k}.conv.weight"))
        nodes.append(
            helper.make_node(
                "Conv", [last, f"layer{k}.conv.weight"], [f"y{k}"], f"layer{k}.conv", pads=[1] * 4
            )
        )
        nodes.append(helper.make_node("Relu", [f"y{k}"], [f"z{k}"], f"layer{k}.act/Relu"))
        last = f"z{k}"
    nodes[-1].output[0] = "logits"
    shape = ["batch", channels, size, size]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, size, size])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def save(folder: Path, name: str, count: int, **kind: int) -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(convolutions(count, **kind), path)
    return path


def simulated(
    ratio: float, *, rounds: int = 20, calls: int = 4, sessions: int = 5, seed: int = 0
) -> timing.Ratio:
    """Times with noise that blocks, rounds and sessions share, as on a real machine."""
    generator = np.random.default_rng(seed)
    base, other = [], []
    for _ in range(sessions):
        drift = 1 + 0.1 * generator.random((rounds, 1))
        for times, factor in ((base, 1.0), (other, 1 / ratio)):
            place = 1 + 0.005 * generator.standard_normal()
            noise = 1 + 0.03 * generator.exponential(size=(rounds, calls))
            times.append(factor * place * drift * noise)
    return timing.compare(base, other, generator)


def test_the_interval_holds_the_truth() -> None:
    held = sum(not simulated(1.0, seed=seed).is_measurable for seed in range(20))
    assert held >= 17
    truth = [simulated(1.1, seed=seed) for seed in range(20)]
    assert sum(found.low <= 1.1 <= found.high for found in truth) >= 17
    assert all(found.is_measurable for found in truth)


def test_a_slow_down_of_ten_percent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    now = [0]
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: now[0])

    def work(nanoseconds: float) -> None:
        now[0] += int(nanoseconds * (1 + 0.05 * generator.exponential()))

    runners = {"plain": lambda: work(4e6), "slow": lambda: work(4.4e6)}
    schedule = timing.plan(runners, warmup=1, duration_s=0.4, iterations=None)
    found = timing.interleave(runners, schedule, generator)
    ratio = timing.compare([found["plain"]], [found["slow"]], generator)
    assert ratio.is_measurable
    assert ratio.low <= 1 / 1.1 <= ratio.high < 1


def test_blocks_come_in_random_order_and_the_first_call_does_not_count() -> None:
    called: list[str] = []
    runners = {name: (lambda name=name: called.append(name)) for name in "ab"}
    schedule = timing.Schedule(30, {"a": 2, "b": 2})
    found = timing.interleave(runners, schedule, np.random.default_rng(0))
    assert found["a"].shape == (30, 2)
    blocks = [called[i : i + 3] for i in range(0, len(called), 3)]
    assert all(len(set(block)) == 1 for block in blocks)
    firsts = [blocks[i][0] for i in range(0, len(blocks), 2)]
    assert 5 < firsts.count("a") < 25


def test_iterations_are_kept() -> None:
    schedule = timing.plan({"a": lambda: None}, warmup=1, duration_s=9, iterations=10)
    assert 10 <= schedule.rounds * schedule.calls["a"] <= 12


def test_summary_is_by_hand() -> None:
    found = timing.summarise(np.arange(1, 101) / 1000.0)
    assert found.p50_ms == pytest.approx(50.5)
    assert found.p99_ms == pytest.approx(99.01)
    assert found.mean_ms == pytest.approx(50.5)
    assert found.iterations == 100


def test_two_files_beside_each_other(tmp_path: Path) -> None:
    large, small = save(tmp_path, "large", 8, channels=32), save(tmp_path, "small", 2, channels=8)
    settings = bench.Settings(batch_sizes=(1, 2), threads=(1,), duration_s=0.2)
    entries = [bench.Entry("large", large), bench.Entry("small", small)]
    document = bench.bench(entries, settings).document()
    rows, speedup = document["rows"], document["speedup"]
    assert isinstance(rows, list)
    assert isinstance(speedup, list)
    assert [(row["model"], row["batch_size"]) for row in rows] == [
        ("large", 1),
        ("small", 1),
        ("large", 2),
        ("small", 2),
    ]
    for row in rows:
        assert row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["images_per_second"] == pytest.approx(row["batch_size"] * 1e3 / row["p50_ms"])
        assert row["peak_bytes"] >= 0
        assert row["bytes"] == Path(row["file"]).stat().st_size
    macs = {
        "large": 1024 * 9 * (3 * 32 + 7 * 32 * 32),
        "small": 1024 * 9 * (3 * 8 + 8 * 8),
    }
    assert {row["model"]: row["macs"] for row in rows} == macs
    for entry in speedup:
        assert entry["baseline"] == "large"
        assert entry["low"] <= entry["ratio"] <= entry["high"]
        assert entry["ratio"] > 2
        assert entry["macs_ratio"] == pytest.approx(macs["large"] / macs["small"])
        assert entry["efficiency"] == pytest.approx(entry["ratio"] / entry["macs_ratio"])


def test_the_same_file_twice_gets_two_names(tmp_path: Path) -> None:
    path = save(tmp_path, "m", 1)
    entries = bench.distinct([bench.Entry("m", path), bench.Entry("m", path)])
    assert [entry.model for entry in entries] == ["m", "m #2"]


def test_a_provider_that_is_not_there_or_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.choose(("cpu", "all", "cpu"))[0] == "cpu"
    with pytest.raises(EnvironmentFault, match="tensorrt"):
        session.choose(("tensorrt",))
    # A build that claims a provider and then runs on the CPU.
    monkeypatch.setitem(session.PROVIDERS, "cuda", "CUDAExecutionProvider")
    model = convolutions(1).SerializeToString()
    real = session.ort.InferenceSession

    def fallen(data: bytes, options: object, providers: list[str]) -> object:
        return real(data, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(session.ort, "InferenceSession", fallen)
    with pytest.raises(EnvironmentFault, match="fell back"):
        session.open_session(model, provider="cuda")


def test_a_fixed_batch_and_odd_inputs_are_said() -> None:
    feed = session.Feed("x", "tensor(float)", (1, 3, None, None))
    assert feed.random(1, size=40)["x"].shape == (1, 3, 40, 40)
    with pytest.raises(UsageError, match="batches of 1"):
        feed.random(8)
    with pytest.raises(InputError):
        session.Feed("x", "tensor(string)", (None,)).random(1)


def test_profile_is_joined_to_layers(tmp_path: Path) -> None:
    path = save(tmp_path, "m", 3, channels=16)
    settings = bench.Settings(batch_sizes=(1,), threads=(1,))
    found = bench.profiles([bench.Entry("m", path)], settings)["m"]
    times = {layer.layer: layer.ms for layer in found.layers}
    assert {"layer0.conv", "layer1.conv", "layer2.conv"} <= set(times)
    convs = sum(ms for name, ms in times.items() if name.startswith("layer"))
    assert convs > 0.5 * found.total_ms
    # The first has 3 input channels instead of 16.
    assert times["layer0.conv"] < times["layer2.conv"]


def test_profile_names_of_fused_and_renamed_nodes() -> None:
    proto = convolutions(2)

    def event(name: str, operator: str, duration: int) -> dict[str, object]:
        return {
            "cat": "Node",
            "name": f"{name}_kernel_time",
            "dur": duration,
            "args": {"op_name": operator},
        }

    runs = profile.RUNS + profile.WARMUP_RUNS
    events = [
        event("z0_nchwc", "Conv", 1000),
        event("layer1.conv_token_12", "Conv", 2000),
        event("ReorderOutput", "ReorderOutput", 500),
    ] * runs
    events[15] = event("z0_nchwc", "Conv", 900_000)  # a neighbour took the processor
    found = profile.join(proto, events)
    assert {(layer.layer, layer.ms) for layer in found.layers} == {
        ("layer0.conv", 1.0),
        ("layer1.conv", 2.0),
        ("(ReorderOutput)", 0.5),
    }
    assert found.total_ms == 3.5


def test_tables(tmp_path: Path) -> None:
    path = save(tmp_path, "m", 1)
    settings = bench.Settings(batch_sizes=(1,), threads=(1,), iterations=20)
    entries = [bench.Entry("m", path), bench.Entry("m", path)]
    document = {
        **bench.bench(entries, settings).document(),
        "machine": {"cpu": "x", "cores": 1, "onnxruntime": "1", "load": 0.0},
    }
    document["speedup"][0]["measurable"] = True
    assert "note" not in bench_table.text(document)
    document["speedup"][0]["measurable"] = False
    assert "no measurable difference" in bench_table.text(document)
    row = {"layer": "conv1", "kind": "Conv", "ms": {"dense": 0.5, "slim": 0.125}}
    other = {"layer": "(Add)", "kind": "", "ms": {"dense": None, "slim": 0.25}}
    table = bench_table.text({**document, "profile": [row, other]})
    assert "time by layer: cpu, batch 1, threads 1" in table
    lines = [line.split() for line in table.splitlines()]
    assert ["conv1", "Conv", "0.500", "0.125", "+0.375"] in lines
    assert ["(Add)", "-", "0.250", "-0.250"] in lines
    assert ["total", "0.500", "0.375", "+0.125"] in lines
    assert "| m |" in bench_table.text(document, style="markdown")
    lines = bench_table.text(document, style="csv").splitlines()
    assert lines[0].startswith("model,file,provider,batch_size,threads,p50_ms")
    assert len(lines) == 3


def test_bench_of_a_file_imports_no_torch(tmp_path: Path) -> None:
    path = save(tmp_path, "m", 1)
    code = (
        "import sys, json\n"
        "from dcptool.cli.app import run\n"
        f"code = run(['bench', {str(path)!r}, '--iterations', '5', '-b', '1', '--threads', '1',"
        " '--profile', '--json', '-q'])\n"
        "sys.stderr.write(json.dumps([code, 'torch' in sys.modules, 'timm' in sys.modules]))\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    document = json.loads(child.stdout)
    assert document["command"] == "bench"
    assert document["speedup"] == []
    assert json.loads(child.stderr.splitlines()[-1]) == [0, False, False]


def test_batches_that_a_file_cannot_take_are_refused_first(tmp_path: Path) -> None:
    path = save(tmp_path, "one", 1)
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, path)
    with pytest.raises(UsageError, match="one takes batches of 1 only, not 8"):
        bench.bench([bench.Entry("one", path)], bench.Settings())


def test_coarser_numbers_are_no_fewer_macs(tmp_path: Path) -> None:
    """A speed-up that INT8 has a share in is not held against the MACs."""
    path, coarse = save(tmp_path, "plain", 2), save(tmp_path, "coarse", 2)
    model = onnx.load(coarse)
    model.metadata_props.add(key="precision", value="int8")
    onnx.save(model, coarse)
    entries = [bench.Entry("dense", path), bench.Entry("slim int8", coarse)]
    settings = bench.Settings(batch_sizes=(1,), threads=(1,), iterations=8)
    report = bench.bench(entries, settings)
    assert report.speedup[0].efficiency is None
    assert report.speedup[0].macs_ratio == 1.0
    assert "slim int8" in bench_table.text(report.document() | {"machine": machine.facts()})


def test_long_calls_are_made_seldom() -> None:
    runners = {"slow": lambda: None}
    clock = iter(np.arange(0, 10**13, 10**9).tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.time, "perf_counter_ns", lambda: int(next(clock)))
        made = timing.plan(runners, warmup=1, duration_s=1.0, iterations=None, fewest=3)
    assert (made.rounds, made.calls["slow"]) == (3, 1)
