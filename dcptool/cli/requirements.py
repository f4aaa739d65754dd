"""What the package metadata asks of its dependencies, held against what is installed.

Libraries below their floor have holes that this program relies on being closed, so no command
works with them. Looks at metadata only: nothing is imported.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from dcptool.errors import EnvironmentFault

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def declared() -> list[Requirement]:
    """The dependencies of this program on this Python, without extras."""
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires("dcptool") or []
    except metadata.PackageNotFoundError:
        return []  # run from a folder of sources; there is nothing to compare with
    found = [Requirement(text) for text in texts]
    return [need for need in found if need.marker is None or need.marker.evaluate({"extra": ""})]


def versions() -> dict[str, str | None]:
    """The installed version of every dependency; None where there is none."""
    return {need.name: _version(need.name) for need in declared()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def fault() -> EnvironmentFault | None:
    """All dependencies that are missing or too old, as one error."""
    whys, wanted = [], []
    for need in declared():
        have = _version(need.name)
        if have is None or not need.specifier.contains(have, prereleases=True):
            whys.append(f"{need.name} is {have or 'not installed'}")
            wanted.append(f"{need.name}{need.specifier}")
    if not wanted:
        return None
    return EnvironmentFault(
        f"dcptool needs {', '.join(wanted)}",
        why=", ".join(whys),
        try_="pip install " + " ".join(f"'{text}'" for text in wanted),
    )


def check() -> None:
    """Refuse to work with a dependency that is missing or too old."""
    found = fault()
    if found is not None:
        raise found
