"""`dcptool export` and `dcptool bench` as a user types them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import onnx
import pytest

from dcptool import files
from dcptool.deploy import bench_targets
from dcptool.deploy import export as exporting
from dcptool.errors import InputError
from dcptool.network import artifact, models
from dcptool.pipeline import rundir

MODEL = ("zoo:resnet20_a", "--no-pretrained")
QUICK = ("-b", "1", "--threads", "1", "--iterations", "20", "--duration", "0.5")


def dcptool(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return forked.command(*map(str, arguments), cwd=cwd)


def document(done: subprocess.CompletedProcess[str], code: int = 0) -> dict:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder whose newest run is an artifact."""
    work = tmp_path_factory.mktemp("work")
    network = models.load("zoo:resnet20_a", pretrained=False)
    network.classes = tuple(f"class {k}" for k in range(10))
    run = rundir.new_run(work / "runs", "resnet20_a")
    params = sum(p.numel() for p in network.module.parameters())
    artifact.save(
        network,
        run,
        cost={"params": params},
        metrics={"top1": 91.5},
        lineage={"prune": {"rate": 0.3, "method": "dcp"}},
    )
    rundir.set_latest(run)
    return work


def test_the_newest_run_is_exported_into_itself_and_timed(run_folder: Path) -> None:
    done = document(dcptool("export", "--json", cwd=run_folder))
    run = run_folder / "runs" / "resnet20_a-001"
    assert Path(done["file"]).name == "model.onnx"
    assert done["parity"]["samples"] == 9
    assert done["parity"]["max_rel"] < 1e-4
    assert {"file", "bytes", "opset", "exporter", "parity"} <= set(done)
    assert (run / "model.labels.txt").read_text().splitlines()[3] == "class 3"
    facts = {p.key: p.value for p in onnx.load(run / "model.onnx").metadata_props}
    assert (facts["rate"], facts["top1"]) == ("0.3", "91.5")
    assert len(facts["artifact_sha256"]) == 64
    again = document(dcptool("export", "--json", cwd=run_folder), 2)
    assert "--force" in again["error"]["try"]

    timed = dcptool("bench", *QUICK, "--torch", "--profile", "--json", cwd=run_folder)
    result = document(timed)
    assert "random weights: same graph, same speed" in timed.stderr
    assert [row["model"] for row in result["rows"]] == ["dense", "slim"]
    assert (run / "dense.onnx").is_file()
    row = result["rows"][0]
    wanted = "model file provider batch_size threads p50_ms p90_ms p99_ms mean_ms std_ms"
    assert set(f"{wanted} images_per_second peak_bytes bytes".split()) <= set(row)
    compared = result["speedup"][0]
    wanted = "model baseline provider batch_size threads ratio low high macs_ratio efficiency"
    assert set(wanted.split()) <= set(compared)
    assert compared["macs_ratio"] == 1.0
    assert {"cpu", "cores", "onnxruntime", "load"} <= set(result["machine"])
    assert {row["model"] for row in result["torch"]} == {"dense", "slim"}
    assert all(row["backward_ms"] > 0 for row in result["torch"])
    layers = {row["layer"]: row["ms"] for row in result["profile"]}
    assert layers["layer1.0.conv1"]["slim"] > 0

    failed = document(dcptool("bench", *QUICK, "--min-speedup", "50", "--json", cwd=run_folder), 4)
    assert failed["gates"][0]["ok"] is False
    assert failed["error"]["code"] == 4
    assert failed["rows"]


def test_a_file_of_an_earlier_state_is_never_timed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def prune(name: str) -> str:
        network = models.load(name, pretrained=False)
        cost = {"params": sum(p.numel() for p in network.module.parameters())}
        artifact.save(network, run, cost=cost, metrics={}, lineage={})
        return files.sha256((run / "manifest.json").read_bytes())

    def made_of(name: str) -> str:
        facts = {p.key: p.value for p in onnx.load(run / name).metadata_props}
        return facts["artifact_sha256"]

    def resolve() -> None:
        with bench_targets.resolved([str(run)], None, {}):
            pass

    first = prune("zoo:resnet20_a")
    resolve()
    assert made_of("model.onnx") == made_of("dense.onnx") == first
    second = prune("zoo:resnet32_a")
    timed = document(dcptool("bench", "run", *QUICK, "--json", cwd=tmp_path))
    assert made_of("model.onnx") == made_of("dense.onnx") == second
    assert timed["speedup"][0]["macs_ratio"] == 1.0
    # What was not made by the defaults is for its owner to make again.
    exporting.export(
        models.load("zoo:resnet32_a", pretrained=False),
        run / "model.onnx",
        exporting.Options(softmax=True, dynamic="none"),
        facts={"artifact_sha256": first},
        force=True,
    )
    with pytest.raises(InputError) as caught:
        resolve()
    assert caught.value.try_ == f"dcptool export {run} --onnx --softmax --dynamic=none --force"
    (run / "model.onnx").rename(run / "other.onnx")
    with pytest.raises(InputError) as caught:
        resolve()
    assert f"--onnx {run}/other.onnx --softmax" in caught.value.try_


def test_without_a_run_the_next_command_is_named(tmp_path: Path) -> None:
    for command in ("export", "bench"):
        done = dcptool(command, cwd=tmp_path)
        assert done.returncode == 3
        assert done.stdout == ""
        assert "try: dcptool prune" in done.stderr


def test_stdout_carries_the_result_alone(tmp_path: Path) -> None:
    done = dcptool("export", *MODEL, "--onnx", "m.onnx", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("m.onnx: ")
    assert lines[1].startswith("parity: 9 samples")
    assert len(lines) == 2
    table = dcptool("bench", "m.onnx", "m.onnx", *QUICK, "--markdown", cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    assert table.stdout.startswith("| model | provider |")
    rows = dcptool("bench", "m.onnx", *QUICK, "--csv", cwd=tmp_path).stdout.splitlines()
    assert rows[0].startswith("model,file,provider,batch_size")
    assert len(rows) == 2


def test_int8_on_the_built_in_images(tmp_path: Path) -> None:
    done = dcptool(
        "export", *MODEL, "--onnx", "m.onnx", "--int8", "--samples", "32", "--json", cwd=tmp_path
    )
    result = document(done)["int8"]
    assert {"top1_before", "top1_after"} <= set(result)
    assert result["images"] == 32
    assert result["agreement"] > 50
    kinds = {t.data_type for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in kinds


def test_plain_weights(tmp_path: Path) -> None:
    from safetensors import safe_open

    done = document(
        dcptool("export", *MODEL, "--safetensors", "w.safetensors", "--json", cwd=tmp_path)
    )
    assert "file" not in done
    with safe_open(tmp_path / "w.safetensors", "pt") as stored:
        assert "layer1.0.conv1.weight" in set(stored.keys())
    assert not list(tmp_path.glob("*.onnx"))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("bench", "bad.onnx"), 3),
        (("bench", "nothing.onnx"), 3),
        (("bench", "zoo:resnet20_a", "--no-pretrained", "--provider", "tensorrt"), 5),
        (("bench", "bad.onnx", "--json", "--csv"), 2),
        (("bench", "bad.onnx", "--provider", "cdua"), 2),
        (("bench", "bad.onnx", "--provider", "cuda"), 5),
        (("bench", "bad.onnx", "--torch"), 2),
        (("bench", "bad.onnx", "--min-speedup", "2"), 2),
        (("export", *MODEL, "--onnx", "m.txt"), 2),
        (("export", *MODEL, "--int8-skip", "auto"), 2),
        (("export", *MODEL, "--int8", "--fp16"), 2),
        (("export", *MODEL, "--atol", "0", "--rtol", "0"), 4),
        (("export", "bad.onnx"), 2),
    ],
)
def test_exit_codes_leave_nothing_behind(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    (tmp_path / "bad.onnx").write_text("<html>not found</html>")
    done = dcptool(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "dcptool: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.onnx"]


@pytest.mark.slow
def test_a_kill_at_any_instant_leaves_the_whole_file_or_none(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dcptool", "export", *MODEL, "--onnx", "m.onnx", "--force"]
    started = time.monotonic()
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    whole_s = time.monotonic() - started
    target = tmp_path / "m.onnx"
    expected = target.read_bytes()
    draw = random.Random(0)
    for number in range(12):
        target.unlink(missing_ok=True)
        child = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # Half of them late, where the file is written.
        low = 0.0 if number % 2 else 0.7
        time.sleep(whole_s * draw.uniform(low, 1.05))
        child.send_signal(signal.SIGKILL if number % 3 else signal.SIGTERM)
        child.wait()
        assert not target.exists() or target.read_bytes() == expected
