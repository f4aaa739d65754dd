"""From a name to a network: module, input, classes.

Knows the registries of timm, torchvision and the zoo. Weights come from a checkpoint file,
from the registry's own download, or from a seed; never from code inside a file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcptool import console, weights
from dcptool.errors import InputError, UsageError
from dcptool.network import names, offers, torchvision_keys, zoo
from dcptool.network.base import Base, Cut, Input, Network, Scalar
from dcptool.network.fetch import Fetch, WeightsUnreachable, fetch
from dcptool.network.fill import compare, fill, misfit_error, pour
from dcptool.network.names import resolve
from dcptool.network.offers import Offer

__all__ = [
    "Base",
    "Cut",
    "Input",
    "Network",
    "NoPublishedWeights",
    "WeightsUnreachable",
    "build",
    "fill",
    "load",
    "resolve",
]

# Arguments of constructors that read files, use the network or change what is returned.
_FORBIDDEN = {"cache_dir", "checkpoint_path", "features_only", "progress", "scriptable"}
_LARGEST = 1 << 20
_TINY = 64


class NoPublishedWeights(UsageError):
    """A network that nobody publishes weights for was asked for with weights."""


def build(base: Base) -> nn.Module:
    """The dense network with fresh weights, on the CPU, in eval mode.

    Safe on a `Base` out of a file: the name must be registered, arguments are harmless.
    """
    if base.source not in names.SOURCES:
        raise InputError(f"unknown model source {base.source!r}")
    if not names.is_registered(base.source, base.name):
        raise InputError(
            f"{base} is in no registry",
            why="it may come from another version of timm or torchvision",
            try_="pip list | grep -E 'timm|torchvision'",
        )
    for key, value in base.arguments.items():
        large = isinstance(value, int | float) and not abs(value) <= _LARGEST
        forbidden = key in _FORBIDDEN or key.startswith(("pretrained", "weights"))
        if forbidden or large or not isinstance(value, Scalar):
            raise InputError(f"cannot build {base}", why=f"the argument {key}={value!r} is refused")
    if not 0 <= base.num_classes <= _LARGEST:
        raise InputError(f"cannot build {base}", why=f"{base.num_classes} classes are refused")
    try:
        return _construct(base).eval()
    except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError) as err:
        raise InputError(
            f"cannot build {base}",
            why=f"with {dict(base.arguments)} its constructor fails: {_first_line(err)}",
        ) from err


def _construct(base: Base, **extra: Any) -> nn.Module:
    if base.source == "zoo":
        return zoo.create(base.name, base.num_classes)
    arguments: dict[str, Any] = {**base.arguments, **extra}
    if base.source == "timm":
        import timm

        module = timm.create_model(base.name, num_classes=base.num_classes, **arguments)
    else:
        import torchvision

        if base.name in ("googlenet", "inception_v3"):
            arguments |= {"init_weights": False, "aux_logits": False}
        if base.name.startswith("maxvit") and "input_size" in arguments:
            arguments["input_size"] = (arguments["input_size"],) * 2
        module = torchvision.models.get_model(
            base.name, weights=None, num_classes=base.num_classes, **arguments
        )
    result: nn.Module = module
    return result


def load(
    name: str,
    *,
    pretrained: bool = True,
    checkpoint: Path | None = None,
    num_classes: int | None = None,
    img_size: int | None = None,
    seed: int = 0,
    offline: bool = False,
    fetch: Fetch = fetch,
) -> Network:
    """Find, build and fill a network by name.

    A checkpoint comes before pretrained weights; without either the weights are random,
    drawn from `seed`. Weights that cannot be had raise `WeightsUnreachable`.
    """
    source, registry_name = resolve(name)
    offer = offers.find(source, registry_name, fetch, offline=offline)
    use_weights = checkpoint is not None or pretrained
    if use_weights and checkpoint is None and offer.place is None:
        raise NoPublishedWeights(
            f"there are no published weights of {name}",
            try_="--checkpoint FILE for weights that you have, or --no-pretrained for random ones",
        )
    offer = _adapt(offer, num_classes, img_size, real=use_weights)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = _make(offer, name, img_size)
        if checkpoint is not None:
            state = weights.read(checkpoint)
            _settle(module, offer, state, str(checkpoint), keep_head=num_classes is None)
            origin = f"checkpoint {checkpoint.name}"
        elif pretrained and offer.place is not None:
            path, data = fetch(offer.place, offline)
            state = weights.parse(data, path)
            known = offer.config.get("num_classes", offer.base.num_classes)
            same = offer.base.num_classes == known
            _settle(module, offer, state, str(offer.place), keep_head=same, ours=False)
            origin = f"pretrained {offer.place}"
        else:
            origin = f"random, seed {seed}"
    return Network(module, offer.base, offer.input, weights=origin)


def _adapt(offer: Offer, num_classes: int | None, img_size: int | None, *, real: bool) -> Offer:
    """The offer with the user's classes and input size in it."""
    arguments = dict(offer.base.arguments)
    size = offer.input.size
    if img_size is not None:
        size = (size[0], img_size, img_size)
        if offer.size_argument:
            arguments[offer.size_argument] = img_size
    if (
        real
        and offer.base.source == "torchvision"
        and offer.base.name in torchvision_keys.TRANSFORMING
    ):
        # Their published weights expect the scaling of the original implementation.
        arguments["transform_input"] = True
    # A margin of a pixel or two around a tiny image would only blur it.
    crop = 1.0 if img_size is not None and img_size <= _TINY else offer.input.crop_pct
    classes = offer.base.num_classes if num_classes is None else num_classes
    base = replace(offer.base, num_classes=classes, arguments=arguments)
    return replace(offer, base=base, input=replace(offer.input, size=size, crop_pct=crop))


def _make(offer: Offer, name: str, img_size: int | None) -> nn.Module:
    """Build, and see that an input size of the user's choice goes through."""
    try:
        module = build(offer.base)
        if img_size is not None:
            _try_size(module, offer.input.size)
    except (InputError, RuntimeError, ValueError, AssertionError, IndexError) as err:
        if img_size is None:
            raise
        why = err.why if isinstance(err, InputError) else _first_line(err)
        raise UsageError(
            f"{name} cannot take images of {img_size} px",
            why=why,
            try_="another --img-size, or none for the size it was made for",
        ) from err
    return module


def _try_size(module: nn.Module, size: tuple[int, int, int]) -> None:
    try:
        # Costs no arithmetic and no memory.
        copy.deepcopy(module).to("meta")(torch.empty(1, *size, device="meta"))
    except (RuntimeError, ValueError, AssertionError, IndexError, NotImplementedError):
        with torch.no_grad():
            module(torch.zeros(1, *size))


def _settle(
    module: nn.Module,
    offer: Offer,
    state: dict[str, Tensor],
    where: str,
    *,
    keep_head: bool,
    ours: bool = True,
) -> None:
    """Fill `module` with `state`, converting keys as the registry of the model would."""
    base = offer.base
    state = _translate(module, base, state)
    misfit = compare(module, state, base.num_classes)
    if not misfit or (misfit.only_head and not keep_head):
        pour(module, state)
        if misfit and ours:
            console.warn(
                f"the classifier starts afresh: {where} has {misfit.head_size} classes, "
                f"--num-classes says {base.num_classes}"
            )
        return
    if base.source == "timm":
        known = base.num_classes if ours else offer.config.get("num_classes", base.num_classes)
        config = {**offer.config, "num_classes": known, **({"label_offset": 0} if ours else {})}
        converted = _through_timm(replace(base, num_classes=known), config, state)
        if converted is not None:
            again = compare(module, converted, base.num_classes)
            if not again or (again.only_head and not keep_head):
                pour(module, converted)
                return
    raise misfit_error(misfit, where=where, network=str(base), classes=base.num_classes)


def _translate(module: nn.Module, base: Base, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of public files to names of the network."""
    if base.source == "zoo":
        return zoo.translate(base.name, state)
    if base.source == "torchvision":
        return torchvision_keys.translate(module, base.name, state)
    return state


def _through_timm(
    base: Base, config: Mapping[str, Any], state: dict[str, Tensor]
) -> dict[str, Tensor] | None:
    """Let timm's own filters convert `state`; nothing when they cannot."""
    overlay = {**config, "state_dict": dict(state), "source": "", "custom_load": False}
    try:
        module = _construct(base, pretrained=True, pretrained_cfg_overlay=overlay)
    except Exception:  # the filters take any file for one of their own, and fail in any way
        return None
    converted: dict[str, Tensor] = module.state_dict()
    return converted


def _first_line(err: BaseException) -> str:
    return str(err).strip().partition("\n")[0][:200] or type(err).__name__
