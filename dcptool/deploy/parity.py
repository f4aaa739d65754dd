"""Whether an ONNX graph computes what the torch module computes.

Compares outputs, says by how much they differ and how often they name the same class. It
judges nothing that is not numbers, and publishes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcptool.errors import GateFailed

Array = npt.NDArray[np.generic]
Function = Callable[[Array], Array]


@dataclass(frozen=True)
class Parity:
    """How far two functions are apart over `samples` images."""

    samples: int
    max_abs: float
    max_rel: float
    top1_agreement: float
    allowed: float
    ok: bool

    def document(self) -> dict[str, object]:
        """The names of the JSON contract."""
        return {
            "samples": self.samples,
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "top1_agreement": self.top1_agreement,
        }


def compare(
    reference: Function, candidate: Function, batches: Iterable[Array], *, atol: float, rtol: float
) -> Parity:
    """Feed the same batches to both; relative means relative to the largest reference output."""
    samples = agreed = 0
    max_abs = largest = 0.0
    finite = True
    for batch in batches:
        expected = np.asarray(reference(batch), dtype=np.float64)
        got = np.asarray(candidate(batch), dtype=np.float64)
        if got.shape != expected.shape:
            raise GateFailed(
                "the exported graph does not compute what the network computes",
                why=f"outputs have shape {got.shape}, not {expected.shape}",
            )
        finite &= bool(np.isfinite(expected).all() and np.isfinite(got).all())
        samples += len(batch)
        agreed += int((expected.argmax(-1) == got.argmax(-1)).sum())
        if finite:
            max_abs = max(max_abs, float(np.abs(expected - got).max()))
            largest = max(largest, float(np.abs(expected).max()))
    if not finite:
        raise GateFailed(
            "parity cannot be judged", why="outputs hold NaN or infinity", try_="check the weights"
        )
    if not samples:
        raise GateFailed("parity cannot be judged", why="there were no samples")
    allowed = atol + rtol * largest
    return Parity(
        samples,
        max_abs,
        max_abs / largest if largest else float(max_abs > 0),
        100.0 * agreed / samples,
        allowed,
        max_abs <= allowed,
    )


def require(parity: Parity, *, atol: float, rtol: float) -> None:
    """Raise unless the difference is within the tolerance."""
    if not parity.ok:
        raise GateFailed(
            "the exported graph does not compute what the network computes; nothing was written",
            why=(
                f"largest difference {parity.max_abs:.3g} on {parity.samples} samples "
                f"(relative {parity.max_rel:.3g}); allowed {parity.allowed:.3g} "
                f"(--atol {atol:g} --rtol {rtol:g})"
            ),
            try_="check the weights, or widen --atol and --rtol if this is good enough for you",
        )


def noise(shape: tuple[int, int, int], *, seed: int, uint8_nhwc: bool = False) -> list[Array]:
    """Seeded noise in batches of one and of eight, as the graph expects its input."""
    generator = np.random.default_rng(seed)
    channels, height, width = shape
    if uint8_nhwc:
        return [
            generator.integers(0, 256, (size, height, width, channels), dtype=np.uint8)
            for size in (1, 8)
        ]
    return [generator.standard_normal((size, *shape), dtype=np.float32) for size in (1, 8)]
