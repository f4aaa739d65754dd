"""Data sets by name, with timm's prefixes: torch/, hfds/, wds/, and folders.

Each becomes images by number, so that order, resume and sharding are ours and the same for
all. Streams that cannot be read by number (hfids/, tfds/) are refused by name. Shards of
wds/ are tar files, indexed once; no library is needed for them.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

from PIL import Image

from dcptool import console, files
from dcptool.errors import EnvironmentFault, InputError, UsageError
from dcptool.training import images, sources
from dcptool.training.images import BadImage

if TYPE_CHECKING:
    from dcptool.training.data import DataSpec, Part, Parts

# Data sets of torchvision whose second split is the test set.
TEST_IS_SECOND = ("cifar10", "cifar100", "mnist", "fashion_mnist", "kmnist", "qmnist")
FOLDERS = ("torch/image_folder", "torch/folder", "image_folder", "folder", "")


def open_parts(spec: DataSpec) -> Parts:
    """The splits of the data set that `spec.dataset` names."""
    from dcptool.training import data

    name = (spec.dataset or "").lower()
    kind, _, rest = name.partition("/")
    if name in FOLDERS:
        if spec.data_dir is None:
            raise UsageError(f"--dataset {spec.dataset} needs --data-dir")
        return data.folder_parts(replace(spec, dataset=None), spec.data_dir)
    if kind == "torch":
        return _torch_parts(spec, rest)
    if kind == "hfds":
        return _hugging_face_parts(spec)
    if kind == "wds":
        return _shard_parts(spec)
    raise UsageError(
        f"unknown data set {spec.dataset!r}",
        why="known are torch/, hfds/ and wds/; streams (hfids/, tfds/) have no fixed order",
        try_="--dataset torch/cifar10 --data-dir DIR, or --data-dir with class folders",
    )


def _torch_parts(spec: DataSpec, name: str) -> Parts:
    from dcptool.training.data import Parts

    train = _torch_part(spec, spec.train_split)
    second = _torch_part(spec, spec.val_split or "validation")
    title = f"torch/{name}"
    if name in TEST_IS_SECOND:
        return Parts(title, train, None, second)
    return Parts(title, train, second, None)


def _torch_part(spec: DataSpec, split: str) -> Part:
    from timm.data.dataset_factory import create_dataset

    if spec.dataset_download and spec.offline:
        raise UsageError("--dataset-download and --offline contradict each other")
    root = str(spec.data_dir or Path(os.environ.get("TORCH_HOME", "data")))
    try:
        dataset: Any = create_dataset(
            str(spec.dataset), root=root, split=split, download=spec.dataset_download
        )
    except URLError as err:
        raise EnvironmentFault(
            f"cannot download {spec.dataset}",
            why=str(err.reason),
            try_="--data-dir with a folder that holds it already",
        ) from err
    except (RuntimeError, AssertionError, OSError, ValueError) as err:
        why = str(err).splitlines()[0] if str(err) else type(err).__name__
        if "download=True" in why:
            why = "it is not there, or it is damaged"
        raise InputError(
            f"cannot open {spec.dataset}, split {split}, in {root}",
            why=why,
            try_="--data-dir with the folder that holds it, or --dataset-download",
        ) from err
    labels = getattr(dataset, "targets", None)
    if labels is None:
        raise InputError(f"{spec.dataset} does not tell its labels")
    names = getattr(dataset, "classes", None) or sorted({int(label) for label in labels})
    return _part(sources.Indexed(dataset, str(spec.dataset)), labels, names)


def _hugging_face_parts(spec: DataSpec) -> Parts:
    from dcptool.training.data import Parts

    try:
        import datasets
    except ImportError as err:
        raise EnvironmentFault(
            "hfds/ needs a package that is not installed",
            why=str(err),
            try_="pip install 'dcptool[hf]'",
        ) from err
    if spec.offline:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    if not console.is_live():
        datasets.disable_progress_bars()
    path = str(spec.dataset).partition("/")[2]
    cache = str(spec.data_dir) if spec.data_dir else None
    try:
        whole = datasets.load_dataset(path, cache_dir=cache)
    except (OSError, ValueError, RuntimeError) as err:
        raise InputError(f"cannot open the data set {path}", why=str(err).splitlines()[0]) from err
    wanted = (spec.val_split,) if spec.val_split else ("validation", "val", "valid")
    val = next((whole[name] for name in wanted if name in whole), None)
    return Parts(
        str(spec.dataset),
        _hugging_face_part(whole[spec.train_split]) if spec.train_split in whole else None,
        _hugging_face_part(val) if val is not None else None,
        _hugging_face_part(whole["test"]) if "test" in whole and val is not whole["test"] else None,
    )


@dataclass(frozen=True)
class _Rows:
    rows: Any
    image: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Any]:
        return (self.rows[number][self.image],)


def _hugging_face_part(rows: Any) -> Part:
    features = rows.features
    label = next((key for key in ("label", "labels", "fine_label", "cls") if key in features), None)
    image = next((key for key in ("image", "img", "jpg", "png") if key in features), None)
    if label is None or image is None:
        raise InputError(
            "the data set has no image and label columns", why="it has " + ", ".join(features)
        )
    names = getattr(features[label], "names", None) or sorted(set(rows[label]))
    return _part(sources.Indexed(_Rows(rows, image), "row"), rows[label], names)


def _part(source: sources.Source, labels: Sequence[Any], names: Sequence[Any]) -> Part:
    from dcptool.training.data import Part

    numbers = tuple(int(label) for label in labels)
    digest = files.sha256(repr((len(source), numbers)).encode())
    return Part(source, numbers, tuple(str(name) for name in names), digest)


@dataclass(frozen=True)
class Shards:
    """Images inside tar files, by offset."""

    places: Sequence[tuple[Path, int, int, str]]

    def __len__(self) -> int:
        return len(self.places)

    def read(self, number: int, mode: str) -> Image.Image:
        """Read the bytes of one member and decode them."""
        path, offset, size, _ = self.places[number]
        try:
            with path.open("rb") as stream:
                stream.seek(offset)
                data = stream.read(size)
        except OSError as err:
            raise BadImage(self.name(number), str(err)) from err
        return images.decode(data, self.name(number), mode)

    def name(self, number: int) -> str:
        """Shard and member."""
        path, _, _, member = self.places[number]
        return f"{path}:{member}"


def _shard_parts(spec: DataSpec) -> Parts:
    from dcptool.training.data import Parts

    if spec.data_dir is None:
        raise UsageError("--dataset wds/ needs --data-dir with the folder of the .tar files")
    root = spec.data_dir
    found: dict[str, Part | None] = {}
    wanted = {
        "train": (spec.train_split,),
        "val": (spec.val_split,) if spec.val_split else ("val", "validation", "valid"),
        "test": ("test",),
    }
    for split, names in wanted.items():
        paths = [
            p for n in names for p in sorted([*root.glob(f"*{n}*.tar"), *root.glob(f"{n}/*.tar")])
        ]
        found[split] = _shard_part(paths) if paths else None
    if not any(found.values()):
        raise InputError(
            f"no shards in {root}", why="files are looked for as *train*.tar or train/*.tar"
        )
    return Parts(f"wds/{root}", found["train"], found["val"], found["test"])


def _shard_part(paths: Sequence[Path]) -> Part:
    from dcptool.training.data import Part

    places: list[tuple[Path, int, int, str]] = []
    labels: list[int] = []
    for path in paths:
        pictures: dict[str, tuple[Path, int, int, str]] = {}
        classes: dict[str, int] = {}
        try:
            with tarfile.open(path, "r:") as shard:
                for member in shard:
                    key, _, ending = member.name.partition(".")
                    if not member.isreg():
                        continue
                    if f".{ending.lower()}" in images.EXTENSIONS:
                        pictures[key] = (path, member.offset_data, member.size, member.name)
                    elif ending == "cls" and member.size <= 32:
                        stream = shard.extractfile(member)
                        classes[key] = int(stream.read()) if stream else -1
        except (tarfile.TarError, OSError, ValueError) as err:
            raise InputError(f"cannot read the shard {path}", why=str(err)) from err
        for key, place in pictures.items():
            if classes.get(key, -1) < 0:
                raise InputError(f"{path}: {place[3]} has no label", why=f"no member {key}.cls")
            places.append(place)
            labels.append(classes[key])
    if not places:
        raise InputError(f"no image in {paths[0]}" + (" and others" if len(paths) > 1 else ""))
    text = "\n".join(f"{p.name} {o} {s} {n}" for p, o, s, n in places)
    digest = files.sha256((text + repr(labels)).encode(errors="surrogateescape"))
    # Shards carry numbers only; names, if any, are the network's.
    return Part(Shards(places), tuple(labels), (), digest)
