"""Give it a trained CNN and get back a smaller, faster, deployable one.

The Python side of the command line. Every function but `load` returns the document that its
command prints with --json; options are those of the command, with underscores (`training=False`
is --no-training). Nothing is printed on stdout; errors are the classes of `dcptool.errors`.
Importing this package imports no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    Plain = bool | int | float | str | Path
    Option = Plain | Sequence[Plain] | None

__version__ = "0.1.0"
__all__ = ["analyze", "bench", "evaluate", "export", "finetune", "load", "prune", "run"]


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


def prune(
    model: str | Path, *, rate: float | str | None = None, **options: Option
) -> dict[str, Any]:
    """Remove channels of a model (a name or an artifact); the result is in `document["artifact"]`.

    One of `rate`, `epsilon` and `plan` says how many.
    """
    return _call("prune", [model], {"rate": rate, **options})


def finetune(target: str | Path | None = None, **options: Option) -> dict[str, Any]:
    """Train an artifact or a model, the newest run without one; the result is a new artifact."""
    return _call("finetune", [target], options)


def evaluate(target: str | Path | None = None, **options: Option) -> dict[str, Any]:
    """Top-1 and top-5 of an artifact, a model or an ONNX file, of the newest run without one."""
    return _call("evaluate", [target], options)


def export(target: str | Path | None = None, **options: Option) -> dict[str, Any]:
    """Write a checked ONNX file; `onnx` and `safetensors` name files of your own."""
    return _call("export", [target], options)


def bench(*targets: str | Path, **options: Option) -> dict[str, Any]:
    """Time networks beside each other; without one, the newest run against its dense network."""
    return _call("bench", list(targets), options)


def run(
    recipe: str | Path, *, settings: Mapping[str, Option] | None = None, **options: Option
) -> dict[str, Any]:
    """Do what a recipe says, by name or file, with `settings` such as {"prune.rate": 0.5} changed.

    Raises GateFailed when a gate of the recipe does not hold.
    """
    import json

    changes = [f"{key}={json.dumps(value, default=str)}" for key, value in (settings or {}).items()]
    return _call("run", [recipe], {"set": changes, **options})


def _call(
    command: str, targets: Sequence[str | Path | None], options: Mapping[str, Option]
) -> dict[str, Any]:
    """Run a command as the command line does, quietly unless told otherwise."""
    from dcptool.cli import app, sections

    # A name that begins with a dash must not become an option.
    names = [str(target) for target in targets if target is not None]
    words = sections.words(command, {"quiet": not options.get("verbose"), **options})
    return app.invoke(command, [*words, *(["--", *names] if names else [])])
