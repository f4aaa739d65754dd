"""A file of results, one line of JSON for each run: what is there is not run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]


class Results:
    """Lines of a file, found by their conditions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, **conditions: Any) -> list[Line]:
        """All lines that are whole and were made under these conditions."""
        if not self.path.exists():
            return []
        whole = [line for line in self.path.read_text().splitlines() if line.endswith("}")]
        found = [json.loads(line) for line in whole]
        return [line for line in found if conditions.items() <= line.items()]

    def once(self, key: Line, run: Callable[[], Line]) -> Line:
        """The line of a key: from the file, or from a run now."""
        known = self.lines(**key)
        return known[0] if known else self.add({**key, **run()})

    def add(self, line: Line) -> Line:
        """Append a line, and show it."""
        with self.path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        print(json.dumps({k: v for k, v in line.items() if k != "right"}), flush=True)
        return line


def packed(right: np.ndarray) -> str:
    """Which images were right, for a line."""
    return np.packbits(right).tobytes().hex()


def unpacked(line: Line) -> np.ndarray:
    """Which of the 10,000 test images were right."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(line["right"]), np.uint8))[:10_000] > 0


def mcnemar(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Chance of a split at least as uneven if neither were better (exact, both tails)."""
    from scipy.stats import binomtest

    won, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    return 1.0 if won + lost == 0 else float(binomtest(won, won + lost, 0.5).pvalue)
