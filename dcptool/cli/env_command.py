"""`dcptool env`: what this program would work with here, for people and for reports."""

from __future__ import annotations

import platform
from typing import Any

import click

from dcptool import __version__, console
from dcptool.cli.app import emit
from dcptool.cli.options import reporting_options


@click.command("env")
@reporting_options
def command(as_json: bool) -> None:
    """Show versions, devices and onnxruntime providers.

    Exits with 5 when a dependency is missing or too old.
    """
    from dcptool.cli import requirements
    from dcptool.deploy.granularity import auto, instruction_set

    failure = requirements.fault()
    providers = _providers()
    document: dict[str, Any] = {
        "versions": {
            "dcptool": __version__,
            "python": platform.python_version(),
            **requirements.versions(),
        },
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "devices": _devices(),
        "providers": providers,
        "instructions": instruction_set(),
        "round_to": {name: auto(name) for name in providers},
    }
    emit("env", document, _text(document), as_json=as_json, failure=failure)


def _devices() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": "cpu", "model": platform.machine()}]
    # A library that cannot be imported is what this command is asked about.
    try:
        from dcptool.deploy.machine import cpu_model
        from dcptool.deploy.session import cores

        found[0] |= {"model": cpu_model(), "cores": cores()}
        import torch

        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            found.append(
                {
                    "name": f"cuda:{number}",
                    "model": facts.name,
                    "memory_bytes": facts.total_memory,
                    "capability": f"{facts.major}.{facts.minor}",
                }
            )
    except ImportError as err:
        console.warn(f"a library cannot be imported: {err}")
    return found


def _providers() -> list[str]:
    try:
        from dcptool.deploy.session import available
    except ImportError:
        return []
    return list(available())


def _text(document: dict[str, Any]) -> str:
    rows = [[name, version or "missing"] for name, version in document["versions"].items()]
    lines = [console.table(["package", "version"], rows), "", document["system"]]
    for device in document["devices"]:
        line = f"{device['name']}: {device['model']}"
        if "cores" in device:
            line += f", {device['cores']} cores"
        if "memory_bytes" in device:
            line += f", {device['memory_bytes'] / 2**30:.1f} GiB"
        lines.append(line)
    lines.append("onnxruntime providers: " + ", ".join(document["providers"]))
    rounding = ", ".join(f"{name} {size}" for name, size in document["round_to"].items())
    vectors = document["instructions"]
    return "\n".join([*lines, f"channels are rounded to multiples of: {rounding} ({vectors})"])
