"""One server of forked commands for all fault tests of a process, and things to break."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest


@pytest.fixture(scope="session")
def server() -> forked.Server:
    """Starts `dcptool` in a moment."""
    return forked.shared()


@pytest.fixture(scope="session")
def slim(server: forked.Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact as `prune` leaves it; look, do not touch."""
    folder = tmp_path_factory.mktemp("slim")
    arguments = ("prune", "zoo:resnet20", "--no-pretrained", "--rate", "0.5", "--no-training")
    (folder / "photos").mkdir()
    from PIL import Image

    for number in range(8):
        Image.new("RGB", (32, 32), (30 * number, 90, 9)).save(folder / "photos" / f"{number}.png")
    small = ("--images", "photos", "--samples", "4", "--positions", "4")
    done = server.run(*arguments, *small, "-o", "slim", cwd=folder)
    assert done.code == 0, done.err
    return folder / "slim"
