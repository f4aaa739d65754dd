"""Images in folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from painted import paint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 20), ("test", 6)):
        for number in range(count):
            name = "cat" if number % 2 else "dog"
            paint(tmp_path / split / name / f"{number:02d}.png", number + 100 * (split == "test"))
    return tmp_path
