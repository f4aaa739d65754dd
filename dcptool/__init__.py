"""Give it a trained CNN and get back a smaller, faster, deployable one.

The Python side of the command line: `load` and `analyze`. Importing this package imports no
library; each function imports what it needs when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

__version__ = "0.1.0"
__all__ = ["analyze", "load"]


def load(
    target: str | Path,
    *,
    factory: Callable[[], nn.Module] | None = None,
    checkpoint: str | Path | None = None,
    pretrained: bool = True,
    offline: bool = False,
) -> nn.Module:
    """The network of an artifact folder or a model name, in eval mode.

    `factory` builds the dense network of an artifact that was made from a module of your own;
    the other options are for model names, as on the command line.
    """
    from pathlib import Path

    from dcptool.network import artifact

    if factory is not None:
        return artifact.load(Path(target), factory=factory).module
    network = artifact.open_target(
        str(target),
        checkpoint=Path(checkpoint) if checkpoint is not None else None,
        pretrained=pretrained,
        offline=offline,
    )
    return network.module.eval()


def analyze(
    target: str | Path | nn.Module,
    *,
    rates: Sequence[float | str] = (0.3, 0.5, 0.7),
    scope: str = "paper",
    losses: int | None = None,
    input_size: tuple[int, int, int] | None = None,
    num_classes: int | None = None,
) -> dict[str, Any]:
    """The document of `dcptool analyze --json` for a name, an artifact or a module of your own.

    `input_size` is channels, height and width; a module of your own needs it.
    """
    from pathlib import Path

    from dcptool.errors import UsageError
    from dcptool.network import artifact
    from dcptool.network.base import Input, Network
    from dcptool.pipeline import analysis

    if isinstance(target, str | Path):
        if input_size is not None and input_size[1] != input_size[2]:
            raise UsageError("input_size of a named network must be square")
        network = artifact.open_target(
            str(target),
            pretrained=False,
            num_classes=num_classes,
            img_size=input_size[1] if input_size else None,
        )
    else:
        if input_size is None:
            raise UsageError(
                "a module of your own needs input_size", try_="input_size=(3, 224, 224)"
            )
        channels = input_size[0]
        base = artifact.custom_base(target, num_classes or 0)
        network = Network(target, base, Input(input_size, (0.0,) * channels, (1.0,) * channels))
    texts = tuple(str(rate) for rate in rates)
    return analysis.analyze(network, rates=texts, scope=scope, losses=losses).document
