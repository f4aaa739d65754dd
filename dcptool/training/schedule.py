"""The learning rate as a function of the step, so that a resume needs one integer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dcptool.errors import UsageError

KINDS = ("cosine", "step", "constant", "exponential")


@dataclass(frozen=True)
class Schedule:
    """`steps` updates (of every loss), starting from a linear warm-up to `lr`.

    cosine falls to 0; step multiplies by `decay` at each of `milestones` (shares of
    the whole); exponential multiplies by `decay` after every step, as in the paper's stages.
    """

    steps: int
    lr: float
    kind: str = "cosine"
    warmup_steps: int = 0
    milestones: tuple[float, ...] = (0.4, 0.6)
    decay: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown schedule {self.kind!r}", why="there are " + ", ".join(KINDS))
        if self.steps < 0 or not self.lr >= 0 or not math.isfinite(self.lr):
            raise UsageError("steps and learning rate must be 0 or more, and finite")

    def at(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return self.lr
        if self.kind == "exponential":
            return float(self.lr * self.decay ** (step - self.warmup_steps))
        if self.kind == "step":
            passed = sum(step >= share * self.steps for share in self.milestones)
            return float(self.lr * self.decay**passed)
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        return self.lr * fall
