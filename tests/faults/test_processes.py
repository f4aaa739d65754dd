"""Runs that lack memory, and processes of one run that were told different things."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = ("finetune", "zoo:resnet20", "--no-pretrained", "--channels-last", "off")
LITTLE_MEMORY = """
import resource, sys
import torch
from dcptool.cli.app import run
used = next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]
limit = int(used) * 1024 + (600 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_out_of_memory_says_so_and_names_the_batch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY, *MODEL, "-b", "1024", "--steps", "2", "-o", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 5, done.stderr
    assert "out of memory" in done.stderr
    assert "--batch-size" in done.stderr
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.slow
def test_ranks_told_different_things_say_which(tmp_path: Path) -> None:
    options = "--steps 2 -b 8 -o run --lr 0.0$((RANK + 1))"
    each = f"exec {sys.executable} -m dcptool {' '.join(MODEL)} {options}"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    environment = {**os.environ, "DCPTOOL_DIST_TIMEOUT": "60"}
    done = subprocess.run(
        [*torchrun, "--no-python", "bash", "-c", each],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 1
    for rank in (0, 1):
        status = json.loads((tmp_path / "run" / f"status.{rank}.json").read_text())
        assert status["code"] == 3
        assert "training.lr: rank 0 has 0.01, rank 1 0.02" in status["why"]
    assert not (tmp_path / "run" / "manifest.json").exists()
