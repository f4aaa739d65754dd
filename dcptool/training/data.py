"""From options to images with labels: train, val, test.

Val is what choices are made on: a folder of its own, or a share held out from train, never
test. Without a name the built-in digits are used, and that is said. Classes are checked
against the network before any work. Reading and batching live in `loader.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from dcptool import console, files
from dcptool.errors import InputError, UsageError
from dcptool.network.models import Input, Network
from dcptool.training import images, sources
from dcptool.training.augmentation import check_augment
from dcptool.training.loader import Augment, ImageSet, Store
from dcptool.training.unreadable import Unreadable

SMALL = 64
VAL_NAMES = ("val", "validation", "valid")
HELD_OUT_LIMIT = 5000
DATA_DIR = "--data-dir names a folder with train/ and val/ or test/, or class folders"
IMAGES = "--images names a folder of images"


@dataclass(frozen=True)
class DataSpec:
    """What the data options of a command line or recipe say."""

    data_dir: Path | None = None
    dataset: str | None = None
    images: Path | None = None
    train_split: str = "train"
    val_split: str | None = None
    val_fraction: float = 0.1
    dataset_download: bool = False
    img_size: int | None = None
    own_size: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    crop_pct: float | None = None
    skip_bad: int = 0
    augment: Augment = field(default_factory=Augment)
    seed: int = 0
    offline: bool = False

    @property
    def is_named(self) -> bool:
        """Whether the user named any data."""
        return bool(self.data_dir or self.dataset or self.images)


def spec_of(
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    img_size: int | None = None,
    offline: bool = False,
    augment: Mapping[str, Any] | None = None,
) -> DataSpec:
    """The data options of a command line as one value."""
    given = {key: value for key, value in options.items() if value is not None}
    # Before anything is fetched or read: a folder that is not there is a slip of the fingers.
    for key, why in (("data_dir", DATA_DIR), ("images", IMAGES)):
        if key in given and "dataset" not in given and not Path(given[key]).is_dir():
            raise _no_folder(Path(given[key]), why)
    varied = Augment(**{key: value for key, value in (augment or {}).items() if value is not None})
    check_augment(varied)
    return DataSpec(**given, augment=varied, seed=seed, img_size=img_size, offline=offline)


def _no_folder(folder: Path, why: str) -> InputError:
    return InputError(
        f"no folder {folder}",
        why=why,
        try_=f"ls {folder.parent}; without images: the same command without this option",
    )


def at_own_size(spec: DataSpec) -> DataSpec:
    """The same data, the built-in images too, at the size that the network has."""
    return dataclasses.replace(spec, own_size=True)


@dataclass(frozen=True)
class Data:
    """Images to learn from, to choose by, and to report on."""

    train: ImageSet
    val: ImageSet
    test: ImageSet | None
    classes: tuple[str, ...]
    source: str  # a name, since manifests carry it and no path may be in them
    input: Input
    builtin: bool = False
    labelled: bool = True
    val_is_held_out: bool = False
    digest: str = ""

    @property
    def report(self) -> ImageSet:
        """The images that a final accuracy is measured on."""
        return self.test if self.test is not None else self.val


def open_data(spec: DataSpec, network: Network, *, need_train: bool = True) -> Data:
    """Find the images, split them, and fix how the network sees them."""
    if sum(bool(x) for x in (spec.dataset, spec.images)) > 1 or (spec.images and spec.data_dir):
        raise UsageError(
            "--data-dir, --dataset and --images name different data",
            why="one set of images is used",
            try_="keep one of them",
        )
    if not spec.is_named:
        return _open_digits(spec, network)
    seen = effective_input(spec, network)
    if spec.images:
        return _open_unlabelled(spec, spec.images, seen)
    if spec.dataset:
        from dcptool.training import named

        parts = named.open_parts(spec)
    else:
        assert spec.data_dir is not None  # is_named, and neither of the other two
        parts = folder_parts(spec, spec.data_dir)
    return _assemble(spec, parts, seen, need_train=need_train)


@dataclass(frozen=True)
class Part:
    """One split as it was found: a source, its labels, its class names."""

    source: sources.Source
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class Parts:
    """The splits that exist."""

    title: str
    train: Part | None = None
    val: Part | None = None
    test: Part | None = None


def effective_input(spec: DataSpec, network: Network) -> Input:
    """The network's input with the user's changes; small images are not cropped."""
    base = network.input
    size = (base.size[0], spec.img_size, spec.img_size) if spec.img_size else base.size
    crop = spec.crop_pct or (1.0 if max(size[1:]) <= SMALL else base.crop_pct)
    channels = base.size[0]
    mean, std = (_per_channel(v, channels) for v in (spec.mean or base.mean, spec.std or base.std))
    if min(std) <= 0:
        raise UsageError("--std must be above 0 in every channel")
    if channels not in (1, 3):
        raise InputError(
            f"{network.base} wants {channels} channels", why="images have 1 or 3 channels"
        )
    interpolation = spec.interpolation or base.interpolation
    return dataclasses.replace(
        base, size=size, mean=mean, std=std, crop_pct=crop, interpolation=interpolation
    )


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) == channels:
        return tuple(values)
    if len(set(values)) == 1 or channels == 1:
        return (sum(values) / len(values),) * channels
    raise UsageError(f"--mean and --std need {channels} numbers each")


def named_only(title: str) -> str:
    """The name of a folder for its path, and a data set's name as it is."""
    kind, _, rest = title.partition("/")
    if kind in ("hfds", "wds") and Path(rest.strip()).is_dir():
        return f"{kind}/{images.readable_name(Path(rest.strip()).resolve().name)}"
    if Path(title).is_dir():
        return images.readable_name(Path(title).resolve().name) or title
    return title


def folder_parts(spec: DataSpec, root: Path) -> Parts:
    """The splits of a folder: train/ and val/ or test/, or class folders alone."""
    if not root.is_dir():
        raise _no_folder(root, DATA_DIR)
    named = {folder.name: folder for folder in images.subfolders(root)}
    train_dir = named.get(spec.train_split)
    val_names = (spec.val_split,) if spec.val_split else VAL_NAMES
    val_dir = next((named[name] for name in val_names if name in named), None)
    asked = {"--val-split": spec.val_split}
    if spec.train_split != DataSpec.train_split:
        asked["--train-split"] = spec.train_split
    for option, name in asked.items():
        if name and name not in named:
            raise InputError(
                f"no folder {name} in {root}",
                why="there are " + (", ".join(map(images.readable_name, named)) or "none"),
                try_=f"{option} with one of these",
            )
    test_dir = named.get("test")
    if test_dir is val_dir:
        test_dir = None
    if not (train_dir or val_dir or test_dir):
        return Parts(str(root), train=_folder_part(root, None))
    first = train_dir or val_dir or test_dir
    assert first is not None
    lead = _folder_part(first, None)
    order = lead.classes
    train = lead if train_dir else None
    val = (lead if first is val_dir else _folder_part(val_dir, order)) if val_dir else None
    test = (lead if first is test_dir else _folder_part(test_dir, order)) if test_dir else None
    for name, part in (("val", val), ("test", test)):
        if train and part and part.digest == train.digest:
            console.warn(
                f"{name} holds the same files as train in {root}: its accuracy says nothing "
                "about new images"
            )
    return Parts(str(root), train, val, test)


def _folder_part(folder: Path, classes: tuple[str, ...] | None) -> Part:
    listing = images.list_classes(folder, classes)
    if listing.ignored:
        console.detail(f"{folder}: {listing.ignored} other or hidden files ignored")
    return Part(sources.Files(listing.files), listing.labels, listing.classes, listing.digest())


def _assemble(spec: DataSpec, parts: Parts, seen: Input, *, need_train: bool) -> Data:
    lead = parts.train or parts.val or parts.test
    assert lead is not None
    if need_train and parts.train is None:
        raise InputError(
            f"{parts.title} has no training images",
            why=f"there is no folder or split called {spec.train_split}",
            try_="--train-split with the name of the right one",
        )
    sets: dict[str, ImageSet | None] = {"train": None, "val": None, "test": None}
    held_out = False
    unreadable = Unreadable(spec.skip_bad)
    for name, part in (("train", parts.train), ("val", parts.val), ("test", parts.test)):
        if part is not None:
            sets[name] = _image_set(name, part, spec, seen, unreadable)
    train, val, test = sets["train"], sets["val"], sets["test"]
    if train is not None and val is None:
        keep, out = held_out_split(train.labels, spec.val_fraction, spec.seed)
        train, val = train.subset(keep, "train"), train.subset(out, "val")
        held_out = True
    empty = _image_set("none", lead, spec, seen).subset(numpy.empty(0, dtype=numpy.int64), "none")
    digest = files.sha256(
        "\n".join(p.digest for p in (parts.train, parts.val, parts.test) if p).encode()
    )
    return Data(
        train=train if train is not None else empty,
        val=val if val is not None else (test if test is not None else empty),
        test=test,
        classes=tuple(images.readable_name(name) for name in lead.classes),
        source=named_only(parts.title),
        input=seen,
        val_is_held_out=held_out,
        digest=digest,
    )


def _image_set(
    name: str, part: Part, spec: DataSpec, seen: Input, unreadable: Unreadable | None = None
) -> ImageSet:
    store = Store(part.source, seen, unreadable=unreadable or Unreadable(spec.skip_bad))
    return ImageSet(
        name=name,
        store=store,
        numbers=numpy.arange(len(part.source)),
        labels=numpy.asarray(part.labels, dtype=numpy.int64),
        augment=spec.augment,
    )


def held_out_split(
    labels: numpy.ndarray, fraction: float, seed: int
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Positions that stay and positions held out, the latter spread evenly over classes."""
    rank, size, offset = _ranks_in_class(labels, seed)
    count = min(HELD_OUT_LIMIT, max(1, round(fraction * len(labels))))
    count = min(count, len(labels) - 1)
    order = numpy.argsort((rank + offset) / size, kind="stable")
    return numpy.sort(order[count:]), numpy.sort(order[:count])


def _ranks_in_class(
    labels: numpy.ndarray, seed: int
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """For every image a random rank inside its class, the class's size, a random class offset."""
    random = numpy.random.default_rng(seed)
    rank = numpy.empty(len(labels))
    size = numpy.empty(len(labels))
    offset = numpy.empty(len(labels))
    for label in numpy.unique(labels):
        where = numpy.flatnonzero(labels == label)
        rank[where] = random.permutation(len(where))
        size[where] = len(where)
        offset[where] = random.random()
    return rank, size, offset


def samples(data: Data, count: int, seed: int = 0) -> ImageSet:
    """`count` training images, as many of each class as can be, without augmentation.

    Classes take turns, so that any few batches of them show all.
    """
    labels = data.train.labels
    rank, _, offset = _ranks_in_class(labels, seed)
    order = numpy.lexsort((offset, rank))[:count]
    return data.train.subset(order, "samples", augment=Augment.none())


def _open_unlabelled(spec: DataSpec, folder: Path, seen: Input) -> Data:
    if not folder.is_dir():
        raise _no_folder(folder, IMAGES)
    listing = images.list_unlabelled(folder)
    if len(listing.files) < 2:
        raise InputError(
            f"{folder} has one image only",
            why="some images are worked with, others are held out to judge by",
            try_="--images with more of them, a few dozen at least",
        )
    part = Part(sources.Files(listing.files), listing.labels, (), listing.digest())
    whole = _image_set("train", part, spec, seen)
    keep, out = held_out_split(whole.labels, spec.val_fraction, spec.seed)
    return Data(
        train=whole.subset(keep, "train"),
        val=whole.subset(out, "val"),
        test=None,
        classes=(),
        source=named_only(str(folder)),
        input=seen,
        labelled=False,
        val_is_held_out=True,
        digest=part.digest,
    )


def _open_digits(spec: DataSpec, network: Network) -> Data:
    """The built-in set: 1,197 to learn from, 200 to choose by, 400 to report on."""
    is_free = spec.img_size is None and not spec.own_size
    if is_free and max(network.input.size[1:]) > SMALL:
        spec = dataclasses.replace(spec, img_size=small_size(network))
    seen = effective_input(spec, network)
    console.note(
        "no data named: using the built-in sample set, 1,797 handwritten digits at "
        f"{seen.size[1]} px (--data-dir names your own)"
    )
    source, labels = sources.digits()
    part = Part(source, tuple(labels), tuple("0123456789"), files.sha256(source.pixels.tobytes()))
    if spec.augment.hflip is None:
        # A mirrored digit is no digit.
        spec = dataclasses.replace(spec, augment=dataclasses.replace(spec.augment, hflip=0.0))
    whole = _image_set("digits", part, spec, seen)
    rest, test = held_out_split(whole.labels, 400 / len(labels), seed=0)
    keep, val = held_out_split(whole.labels[rest], 200 / len(rest), seed=0)
    return Data(
        train=whole.subset(rest[keep], "train"),
        val=whole.subset(rest[val], "val"),
        test=whole.subset(test, "test"),
        classes=part.classes,
        source="built-in digits",
        input=seen,
        builtin=True,
        digest=part.digest,
    )


def small_size(network: Network) -> int:
    """32 px, or 64 px where the network shrinks its input more than eightfold."""
    module = network.module
    was_training = module.training
    smallest = [SMALL]

    def see(_module: torch.nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.dim() == 4 and output.shape[-1] > 1:
            smallest[0] = min(smallest[0], int(output.shape[-1]))

    convs = [m for m in module.modules() if isinstance(m, torch.nn.Conv2d)]
    hooks = [conv.register_forward_hook(see) for conv in convs]
    try:
        parameter = next(module.parameters())
        with torch.no_grad():
            module.eval()(torch.zeros(1, network.input.size[0], SMALL, SMALL).to(parameter))
    except RuntimeError as err:
        raise InputError(
            f"{network.base} cannot see the built-in images",
            why=f"it fails at {SMALL} px: {str(err).splitlines()[0]}",
            try_="--data-dir with images of your own, or --img-size",
        ) from err
    finally:
        for hook in hooks:
            hook.remove()
        module.train(was_training)
    return 32 if smallest[0] * 8 >= SMALL else SMALL
