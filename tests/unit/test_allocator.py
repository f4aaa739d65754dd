"""Large blocks of memory are kept for the next layer."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import resource, sys
from dcptool.cli import allocator
if len(sys.argv) > 1:
    assert allocator.keep_large_blocks()
import numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    numpy.ones(8_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(*words: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *words], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_pages_are_asked_for_once() -> None:
    assert _faults("kept") < 0.2 * _faults()


def test_the_user_comes_first(monkeypatch) -> None:
    from dcptool.cli import allocator

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    assert not allocator.keep_large_blocks()
