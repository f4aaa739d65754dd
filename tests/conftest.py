"""Fixtures for all tests: no network, one thread, commands run as a user runs them."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import forked
import pytest

# Before any library reads them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["DCPTOOL_OFFLINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

# Whoever starts the tests in the background may have signals ignored, and children inherit that;
# what is tested is a command that somebody starts and stops by hand.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

CHECKOUT = Path(__file__).resolve().parents[1]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The folder with README.md, pyproject.toml and tests/."""
    return CHECKOUT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Images and papers beside the checkout, or where DCPTOOL_TEST_DATA says."""
    folder = Path(os.environ.get("DCPTOOL_TEST_DATA") or CHECKOUT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set DCPTOOL_TEST_DATA")
    return folder


@pytest.fixture
def dcptool(tmp_path: Path) -> Run:
    """Run `dcptool ARGUMENTS` in a process of its own, in an empty folder."""
    return functools.partial(forked.command, cwd=tmp_path)


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"


@pytest.fixture(scope="session")
def hostile() -> str:
    """A name that does harm wherever it is not escaped."""
    return HOSTILE


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with something for every part of a report, and hostile names in it."""
    import json

    import torch
    from safetensors.torch import save_file

    from dcptool.network import artifact, models
    from dcptool.network.base import Network
    from dcptool.network.graph import build_graph
    from dcptool.network.surgery import cut, plan_cuts, removed_units
    from dcptool.report import features, record
    from dcptool.selection.budget import first_units, parse_rate

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "a <b>run"
    folder.mkdir()
    dense = models.load("zoo:resnet20", pretrained=False, num_classes=10)
    save_file(dense.module.state_dict(), folder / "dense.safetensors")
    graph = build_graph(dense.module, dense.input.size)
    kept = first_units(graph.open_groups(), parse_rate("0.5"))
    cuts = plan_cuts(graph, removed_units(graph, kept))
    cut(dense.module, cuts)
    classes = (HOSTILE, *"bcdefghij")
    slim = Network(dense.module, dense.base, dense.input, classes, cuts)
    artifact.save(
        slim,
        folder,
        cost=artifact.cost_document(138506, 20759168, 272474, 40813184),
        metrics={"source": HOSTILE, "images": "test", "top1": 91.5, "dense_top1": 92.25},
        lineage={
            "prune": {"rate": 0.5, "method": "dcp", "solver": "sgd", "training": True},
            "dense": {"checkpoint": "dense.safetensors"},
        },
    )
    steps = [
        {
            "group": name,
            "units": 2 * len(units),
            "kept": list(range(len(units))),
            "order": list(range(2 * len(units))),
            "smallest": 0,
            "losses": [1 / (1 + i) for i in range(len(units) + 1)],
            "norms": [1 / (2 + i) for i in range(len(units))],
            "dead": 0,
            "stopped": "epsilon",
        }
        for name, units in kept.items()
    ]
    steps.append({**steps[0], "group": HOSTILE})
    text = "".join(json.dumps(step) + "\n" for step in steps) + '{"group": "torn'
    (folder / "steps.jsonl").write_text(text)
    rows = [
        {"step": i, "loss": 2 / (1 + i), "val_top1": 50.0 + i, "val_loss": 1.0, "lr": 0.1}
        for i in range(30)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prune.json").write_text("{}")
    gates = [{"name": HOSTILE, "limit": 90.0, "value": 91.5, "ok": True}]
    record.keep_result(folder, "prune", {"gates": gates}, f"dcptool prune {HOSTILE}")
    where = {"provider": "cpu", "batch_size": 1, "threads": 2}
    bench = {
        "rows": [
            {"model": "dense", **where, "p50_ms": 2.0},
            {"model": "slim", **where, "p50_ms": 1.0},
        ],
        "speedup": [
            {"model": "slim", "baseline": "dense", **where, "ratio": 2.0, "low": 1.9, "high": 2.1}
            | {"macs_ratio": 2.0, "efficiency": 1.0}
        ],
        "distribution": [
            {"model": name, **where, "quantiles_ms": [ms + i / 100 for i in range(101)]}
            for name, ms in (("dense", 2.0), ("slim", 1.0))
        ],
        "profile": [
            {"layer": name, "kind": "Conv", "ms": {"dense": ms, "slim": ms / 2}}
            for name, ms in ((HOSTILE, 0.3), ("conv2", 0.9), ("conv10", 0.1))
        ],
        "machine": {"cpu": HOSTILE, "cores": 2, "onnxruntime": "1.30", "load": 0.5},
        "gates": [{"name": "speedup", "limit": 3.0, "value": 2.0, "ok": False}],
    }
    record.keep_result(folder, "bench", bench, "dcptool bench")
    record.keep_classes(folder, classes, [90.0 + i for i in range(10)], [95.0] * 10)
    features.keep_features(record.collect(folder), "layer1.0.conv1", None, 2)
    return folder
