"""What the numbers were measured on, and whether it was quiet enough. Imports no torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import onnxruntime as ort

from dcptool.deploy.session import cores

BUSY_SHARE = 0.25


def facts() -> dict[str, object]:
    """Processor, cores, load and versions, as the JSON contract names them."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "onnxruntime": ort.__version__,
        "load": round(load(), 2),
        "governor": _first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_model() -> str:
    """The processor's own name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def load() -> float:
    """Mean number of runnable processes over the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def disturbance() -> str:
    """Why times will be noisy, or nothing."""
    now, have = load(), cores()
    if now > BUSY_SHARE * have:
        return (
            f"the machine is busy (load {now:.1f} on {have} cores): "
            "times are longer and less certain than they could be"
        )
    return ""


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().strip().splitlines()[0]
    except (OSError, IndexError):
        return None
