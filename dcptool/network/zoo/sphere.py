"""SphereNet: plain and residual convolutions with PReLU for faces of 112 x 96 px.

Gives scores of identities when it has classes, as it is trained, and with none the embedding of a
face, as it is used. Module names are those of public weights: `conv1_1`, `relu1_1`, `fc5`, `fc6`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512)
EMBEDDING = 512
# Residual pairs after the convolution that begins each stage.
PAIRS = {4: (0, 0, 0, 0), 20: (1, 2, 4, 1)}
# What is left of 112 x 96 px after four halvings.
MAP = 7 * 6


class SphereNet(nn.Module):
    """Four stages that begin with a stride of two, a linear embedding, a linear classifier."""

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        self.pairs = PAIRS[depth]
        inputs = 3
        for stage, (width, pairs) in enumerate(zip(WIDTHS, self.pairs, strict=True), 1):
            for number in range(1, 2 + 2 * pairs):
                stride = 2 if number == 1 else 1
                conv = nn.Conv2d(inputs, width, 3, stride, 1)
                nn.init.xavier_normal_(conv.weight)
                nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
                self.add_module(f"conv{stage}_{number}", conv)
                self.add_module(f"relu{stage}_{number}", nn.PReLU(width))
                inputs = width
        self.fc5 = nn.Linear(inputs * MAP, EMBEDDING)
        # Angles between embeddings and classes are all that counts, so there is no bias.
        self.fc6: nn.Module = nn.Identity()
        if num_classes:
            self.fc6 = nn.Linear(EMBEDDING, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of faces, or their embeddings when there are no classes."""
        for stage, pairs in enumerate(self.pairs, 1):
            x = self._step(x, stage, 1)
            for pair in range(pairs):
                first = 2 * pair + 2
                x = x + self._step(self._step(x, stage, first), stage, first + 1)
        scores: Tensor = self.fc6(self.fc5(torch.flatten(x, 1)))
        return scores

    def _step(self, x: Tensor, stage: int, number: int) -> Tensor:
        conv, relu = getattr(self, f"conv{stage}_{number}"), getattr(self, f"relu{stage}_{number}")
        y: Tensor = relu(conv(x))
        return y
