"""What the registries tell about a name: constructor, input, and where its weights lie."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcptool.errors import InputError, UsageError
from dcptool.network import names
from dcptool.network.base import Base, Input, Scalar
from dcptool.network.fetch import Fetch, NotPublished, Place, WeightsUnreachable

_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
# What a configuration may say about weights; the rest says where to get them.
_CONFIG = (
    "classifier", "crop_pct", "first_conv", "fixed_input_size", "input_size", "interpolation",
    "label_offset", "mean", "num_classes", "std",
)  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """What a registry tells about a name."""

    base: Base
    input: Input
    place: Place | None
    size_argument: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


def find(source: str, name: str, fetch: Fetch, *, offline: bool) -> Offer:
    """Ask the registry; only names on the hub may need `fetch` for that."""
    if name.startswith(names.HUB):
        return _hub(name, fetch, offline)
    return {"timm": _timm, "torchvision": _torchvision, "zoo": _zoo}[source](name)


def _timm(name: str) -> Offer:
    import timm

    known = timm.get_pretrained_cfg(name)
    config: dict[str, Any] = dataclasses.asdict(known) if known is not None else {}
    place = None
    if config.get("hf_hub_id"):
        file = config.get("hf_hub_filename")
        place = Place(repo=config["hf_hub_id"], names=_alternatives(file) if file else _HUB_FILES)
    elif config.get("url"):
        place = Place(url=config["url"])
    return _configured(name, config, {}, place)


def _alternatives(file: str) -> tuple[str, ...]:
    """A file on the hub, after the safetensors files that may lie beside it."""
    stem = Path(file).stem
    safe = (f"{stem.replace('pytorch_model', 'model')}.safetensors", f"{stem}.safetensors")
    return tuple(dict.fromkeys((*safe, file)))


def _configured(
    name: str, config: Mapping[str, Any], arguments: dict[str, Scalar], place: Place | None
) -> Offer:
    size = tuple(config.get("input_size") or (3, 224, 224))
    fixed = bool(config.get("fixed_input_size"))
    if fixed and size[1] == size[2]:
        arguments.setdefault("img_size", size[1])
    spec = Input(
        size,
        tuple(config.get("mean") or (0.5,) * 3),
        tuple(config.get("std") or (0.5,) * 3),
        config.get("interpolation") or "bicubic",
        config.get("crop_pct") or 0.875,
    )
    kept = {key: config[key] for key in _CONFIG if config.get(key) is not None}
    base = Base("timm", name, config.get("num_classes") or 0, arguments)
    return Offer(base, spec, place, "img_size" if fixed else "", kept)


def _hub(name: str, fetch: Fetch, offline: bool) -> Offer:
    """Read the configuration of a repository; it may name an architecture, never code."""
    repo = name.removeprefix(names.HUB)
    try:
        path, data = fetch(Place(repo=repo, names=("config.json",)), offline)
    except WeightsUnreachable as err:
        if not offline and not isinstance(err, NotPublished):
            raise WeightsUnreachable(
                f"cannot get the configuration of {name}",
                why=err.why,
                try_="a name that needs no network, such as timm:resnet18",
            ) from err
        raise UsageError(
            f"there is no model {name!r}" + (" in the cache" if offline else ""),
            why=err.why,
            try_="a name out of " + ", ".join(names.nearest(repo.partition("/")[2])),
        ) from err
    try:
        document = json.loads(data)
        config = document.get("pretrained_cfg", document)
        config = {**config, **{key: document[key] for key in ("num_classes",) if key in document}}
        architecture, arguments = document["architecture"], document.get("model_args") or {}
        offer = _configured(architecture, config, dict(arguments), None)
        _check(offer)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as err:
        raise InputError(
            f"cannot use {name}", why=f"{path.name} is no configuration of a timm model: {err}"
        ) from err
    if not names.is_registered("timm", architecture):
        raise InputError(f"cannot use {name}", why=f"timm has no architecture {architecture!r}")
    return Offer(
        offer.base,
        offer.input,
        Place(repo=repo, names=_HUB_FILES),
        offer.size_argument,
        offer.config,
    )


def _check(offer: Offer) -> None:
    """Refuse a configuration whose numbers are no numbers."""
    spec = offer.input
    if len(spec.size) != 3 or not all(type(n) is int and 0 < n <= 4096 for n in spec.size):
        raise ValueError(f"input_size is {spec.size}")
    if not all(len(v) == spec.size[0] for v in (spec.mean, spec.std)):
        raise ValueError(f"mean and std are {spec.mean}, {spec.std}")
    if not all(isinstance(v, int | float) for v in (*spec.mean, *spec.std, spec.crop_pct)):
        raise TypeError("mean, std or crop_pct is no number")
    if not all(isinstance(v, Scalar) for v in offer.base.arguments.values()):
        raise TypeError(f"model_args {dict(offer.base.arguments)} are more than plain values")
    if type(offer.base.num_classes) is not int or not isinstance(spec.interpolation, str):
        raise TypeError("num_classes or interpolation has the wrong type")


def _torchvision(name: str) -> Offer:
    import torchvision

    chosen = torchvision.models.get_model_weights(name).DEFAULT
    view = chosen.transforms()
    crop, resize = view.crop_size[0], view.resize_size[0]
    spec = Input(
        (3, crop, crop),
        tuple(view.mean),
        tuple(view.std),
        view.interpolation.value,
        crop / resize,
    )
    argument = "image_size" if name.startswith("vit_") else ""
    argument = "input_size" if name.startswith("maxvit") else argument
    arguments: dict[str, Scalar] = {argument: crop} if argument else {}
    base = Base("torchvision", name, len(chosen.meta["categories"]), arguments)
    return Offer(base, spec, Place(url=chosen.url), argument)


def _zoo(name: str) -> Offer:
    from dcptool.network import zoo

    entry = zoo.ENTRIES[name]
    spec = Input(entry.size, entry.mean, entry.std, crop_pct=entry.crop_pct)
    return Offer(Base("zoo", name, entry.num_classes), spec, None)
