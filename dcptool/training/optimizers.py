"""Optimizers by timm's names; SGD with Nesterov momentum unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dcptool.errors import UsageError


@dataclass(frozen=True)
class Optimizer:
    """Name and settings; made new for every fit."""

    name: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_norms: bool = True

    def make(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The optimizer over all parameters that learn."""
        from timm.optim._optim_factory import create_optimizer_v2

        self.check()
        made: torch.optim.Optimizer = create_optimizer_v2(
            model,
            opt=self.name,
            lr=lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            filter_bias_and_bn=not self.decay_norms,
        )
        return made

    def check(self) -> None:
        """Refuse names that timm does not know, with the nearest one that it does."""
        from timm.optim._optim_factory import list_optimizers

        known = [str(name) for name in list_optimizers()]
        if self.name.lower() not in known:
            import difflib

            near = difflib.get_close_matches(self.name, known, n=3)
            raise UsageError(
                f"unknown optimizer {self.name!r}",
                why="timm knows " + ", ".join(known[:12]) + " and more",
                try_=f"--opt {near[0]}" if near else "--opt sgd",
            )
