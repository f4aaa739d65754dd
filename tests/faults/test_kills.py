"""Ten kills of the two hundred that the benchmark makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "kill_anything.py"


def test_ten_kills(tmp_path: Path) -> None:
    log = tmp_path / "kills.jsonl"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--kills", "10", "--log", str(log)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    total = json.loads(done.stdout)
    assert total["kills"] >= 10
    assert total["equal"]
    assert len(log.read_text().splitlines()) == total["lives"]
