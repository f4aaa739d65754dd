"""Processes of one run that were told different things."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = ("finetune", "zoo:resnet20", "--no-pretrained", "--channels-last", "off")


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
