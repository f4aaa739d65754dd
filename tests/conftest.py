"""Fixtures for all tests: no network, one thread, commands run as a user runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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

    def run(
        *arguments: str, env: dict[str, str] | None = None, timeout: float = 120, **options: object
    ) -> subprocess.CompletedProcess[str]:
        options.setdefault("cwd", tmp_path)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run(
            [sys.executable, "-m", "dcptool", *arguments],
            env={**os.environ, **(env or {})},
            text=True,
            timeout=timeout,
            check=False,
            **options,
        )

    return run
