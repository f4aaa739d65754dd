"""The multiples of channels that a processor likes, from a table or from the clock.

onnxruntime computes convolutions in blocks of channels as wide as a vector register; a part of a
block costs as much as a whole one. Tensor cores take multiples of eight. Imports no torch.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcptool import console, files
from dcptool.errors import DcptoolError

# By instruction set, the best first.
CPU_TABLE = (("avx512f", 16), ("avx2", 16), ("asimd", 8), ("neon", 8))
PROVIDER_TABLE = {"cuda": 8, "tensorrt": 8, "openvino": 16, "dml": 8, "coreml": 8, "xnnpack": 8}
UNKNOWN = 8
CANDIDATES = (1, 4, 8, 16, 32)
# A finer multiple is taken unless a coarser one is faster by more than this.
NOISE = 0.02
CACHE_FILE = "round-to.json"


def instruction_set() -> str:
    """The widest vector instructions of this processor that the table knows, or its name."""
    flags = _flags()
    for name, _ in CPU_TABLE:
        if name in flags:
            return name
    return "asimd" if platform.machine().lower() in ("arm64", "aarch64") else platform.machine()


def table() -> dict[str, int]:
    """The multiple for each provider here."""
    return {"cpu": dict(CPU_TABLE).get(instruction_set(), UNKNOWN), **PROVIDER_TABLE}


def auto(provider: str = "cpu") -> int:
    """The shipped multiple for a provider on this machine."""
    return table().get(provider, UNKNOWN)


def best(per_mac: Mapping[int, float]) -> int:
    """The finest multiple whose time per MAC is as good as the best one's."""
    least = min(per_mac.values())
    return min(multiple for multiple, time in per_mac.items() if time <= (1 + NOISE) * least)


def recall(key: str) -> int | None:
    """What was measured for this key before, if it was."""
    path = _cache()
    if not path.is_file():
        return None
    known: Any = files.read_json(path, what="measured multiples").get(key)
    return known if isinstance(known, int) and known in CANDIDATES else None


def remember(key: str, multiple: int) -> None:
    """Keep what was measured for the next run."""
    path = _cache()
    try:
        known = files.read_json(path, what="measured multiples") if path.is_file() else {}
        files.make_folder(path.parent)
        files.publish_json(path, {**known, key: multiple})
    except DcptoolError as err:
        console.detail(f"not kept: {err.message}")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dcptool" / CACHE_FILE


def _flags() -> set[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()
