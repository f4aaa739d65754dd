"""`dcptool analyze` as a user runs it: the paper's numbers, plans, plots, refusals."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Run

# Params and MACs; the paper's tables have the same figures with fewer digits.
PAPER: dict[str, dict[str, tuple[str, str]]] = {
    "resnet18": {
        "0": ("11689512", "1.814e+09"),
        "0.3": ("8410928", "1.316e+09"),
        "0.5": ("6194856", "9.759e+08"),
        "0.7": ("4009328", "6.490e+08"),
    },
    "resnet50": {
        "0": ("25557032", "4.089e+09"),
        "0.3": ("17021126", "2.630e+09"),
        "0.5": ("12381864", "1.822e+09"),
        "0.7": ("8713982", "1.185e+09"),
    },
    "zoo:resnet56": {
        "0": ("855770", "1.257e+08"),
        "0.3": ("607946", "9.126e+07"),
        "0.5": ("430826", "6.323e+07"),
        "0.7": ("271472", "3.978e+07"),
    },
    "zoo:vggnet": {
        "0": ("2.004e+07", "3.981e+08"),
        "0.3": ("1.036e+07", "1.987e+08"),
        "0.4": ("7.827e+06", "1.472e+08"),
    },
}


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_complexity_to_the_digit(name: str, dcptool: Run) -> None:
    wanted = PAPER[name]
    rates = [part for rate in wanted for part in ("--rate", rate)]
    found = document(dcptool("analyze", name, *rates, "--json"))
    exact = [row for row in found["rates"] if row["round_to"] == 1]
    rows = {f"{row['rate']:g}": row for row in exact if not row["prune_residual"]}
    for rate, (params, macs) in wanted.items():
        row = rows[rate]
        assert params in (str(row["params"]), f"{row['params']:.3e}")
        assert macs == f"{row['macs']:.3e}"
    assert rows["0"]["params"] == found["dense"]["params"]
    assert rows["0"]["macs"] == found["dense"]["macs"]


def test_the_document_has_the_promised_names(dcptool: Run) -> None:
    found = document(dcptool("analyze", "zoo:resnet20", "--json"))
    assert set(found) >= {
        "dcptool", "command", "model", "input_size", "dense", "uncounted", "rates", "layers",
        "groups", "pivots",
    }  # fmt: skip
    assert found["command"] == "analyze"
    assert set(found["dense"]) == {"params", "macs", "macs_with_bias"}
    assert {row["rate"] for row in found["rates"]} == {0.3, 0.5, 0.7}
    assert len(found["rates"]) == 12
    assert {row["round_to"] for row in found["rates"]} > {1}
    assert set(found["layers"][0]) == {"name", "kind", "in", "out", "params", "macs", "group"}
    assert sum(layer["macs"] for layer in found["layers"]) == found["dense"]["macs"]
    names = {group["name"] for group in found["groups"]}
    assert {layer["group"] for layer in found["layers"]} <= names
    for group in found["groups"]:
        assert group["status"] in ("prunable", "coupled", "outside", "locked")
        assert bool(group["reason"]) == (group["status"] != "prunable")
    assert len(found["pivots"]) == 3


def test_the_table_has_every_layer_and_reason(dcptool: Run) -> None:
    done = dcptool("analyze", "zoo:resnet20")
    assert done.returncode == 0
    for words in ("conv", "linear", "prunable", "coupled", "the network's output", "rate 0.3",
                  "with --prune-residual", "losses would go after"):  # fmt: skip
        assert words in done.stdout
    assert "\x1b[" not in done.stdout


def test_nothing_to_prune_is_an_answer_with_reasons(dcptool: Run) -> None:
    found = document(dcptool("analyze", "timm:gmlp_ti16_224", "--json"))
    assert {group["status"] for group in found["groups"]} == {"locked"}
    assert all(group["reason"] for group in found["groups"])
    assert found["rates"][0]["macs"] == found["dense"]["macs"]
    told = dcptool("analyze", "timm:gmlp_ti16_224")
    assert told.returncode == 0
    assert "nothing can be pruned" in told.stdout


def test_what_would_open_something_is_said(dcptool: Run) -> None:
    done = dcptool("analyze", "timm:repvgg_a0", "--img-size", "64")
    assert done.returncode == 0
    assert re.search(r"--(scope all|prune-residual) opens", done.stdout)


def test_a_plan_can_be_written_once(dcptool: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = dcptool("analyze", "zoo:resnet20", "--rate", "0.7", "--emit-plan", str(plan), "-q")
    assert done.returncode == 0, done.stderr
    written = json.loads(plan.read_text())
    assert written["model"] == "zoo:resnet20"
    assert len(written["groups"]) == 9
    assert {(g["units"], g["keep"]) for g in written["groups"].values()} == {
        (16, 5), (32, 10), (64, 20),
    }  # fmt: skip
    again = dcptool("analyze", "zoo:resnet20", "--emit-plan", str(plan))
    assert again.returncode == 2
    assert "exists already" in again.stderr
    wider = dcptool(
        "analyze", "zoo:resnet20", "--prune-residual", "--emit-plan", str(plan), "--force", "-q"
    )
    assert wider.returncode == 0
    assert len(json.loads(plan.read_text())["groups"]) == 12


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_plot_is_drawn(suffix: str, magic: bytes, dcptool: Run, tmp_path: Path) -> None:
    path = tmp_path / f"cost{suffix}"
    done = dcptool("analyze", "zoo:resnet20", "--plot", str(path), "--json")
    document(done)
    data = path.read_bytes()
    assert data.startswith(magic)
    assert len(data) > 5000


def test_a_plot_of_another_kind_is_refused_before_any_work(dcptool: Run, tmp_path: Path) -> None:
    done = dcptool("analyze", "zoo:resnet20", "--plot", str(tmp_path / "x.pdf"))
    assert done.returncode == 2
    assert ".png or .svg" in done.stderr


def test_a_rate_out_of_range_is_refused(dcptool: Run) -> None:
    assert dcptool("analyze", "zoo:resnet20", "--rate", "1").returncode == 2


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "LFS"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"),
        (pickle.dumps(Evil()), ""),
    ],
)
def test_a_file_that_is_no_model(content: bytes, words: str, dcptool: Run, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    done = dcptool("analyze", "zoo:resnet20", "--checkpoint", str(path))
    assert done.returncode == 3
    assert words.lower() in done.stderr.lower()
    assert "why:" in done.stderr
    assert not (tmp_path / "executed").exists()


def test_memory_stays_below_two_gigabytes(tmp_path: Path) -> None:
    code = (
        "import resource, subprocess, sys;"
        "subprocess.run([sys.executable, '-m', 'dcptool', 'analyze', 'resnet50', '--json'],"
        " check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * 1024 * 1024
