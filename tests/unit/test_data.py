"""Images: what is read, what is refused, how it is split and batched."""

from __future__ import annotations

import io
import os
import pickle
import signal
import tarfile
import time
import zlib
from pathlib import Path
from urllib.error import URLError

import numpy
import pytest
import torch
from PIL import Image

from dcptool.errors import EnvironmentFault, InputError, UsageError
from dcptool.network.models import Base, Input, Network
from dcptool.training import images
from dcptool.training.classes import check_classes, reset_head
from dcptool.training.data import DataSpec, held_out_split, open_data, samples, small_size
from dcptool.training.dist import Dist
from dcptool.training.images import BadImage
from dcptool.training.loader import Augment, ImageSet, Store, loader


def network(classes: int = 2, size: int = 16, names: tuple[str, ...] | None = None) -> Network:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, classes),
    )
    seen = Input((3, size, size), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    return Network(module, Base("zoo", "tiny", classes), seen, names)


def paint(path: Path, seed: int, size: int = 16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 20), ("test", 6)):
        for number in range(count):
            name = "cat" if number % 2 else "dog"
            paint(tmp_path / split / name / f"{number:02d}.png", number + 100 * (split == "test"))
    return tmp_path


def numbers(batches, epoch=0, start=0):
    """Which images a loader shows, told by their first pixel row."""
    return [bytes(row) for images_, _ in batches.epoch(epoch, start) for row in key(images_)]


def key(batch):
    return (batch[:, :, 0, :4] * 1000).round().to(torch.int32).flatten(1).numpy()


def test_built_in_digits_are_split_once_and_for_all() -> None:
    data = open_data(DataSpec(), network(10, 32))
    assert (len(data.train), len(data.val), len(data.test or ())) == (1197, 200, 400)
    assert data.builtin
    assert data.classes == tuple("0123456789")
    together = numpy.concatenate([data.train.numbers, data.val.numbers, data.test.numbers])
    assert sorted(together) == list(range(1797))
    assert numpy.bincount(data.test.labels).min() >= 35
    shown, labels = next(iter(loader(data.val, 8)))
    assert shown.shape == (8, 3, 32, 32)
    assert labels.dtype == torch.int64
    assert shown.std() > 0.3


@pytest.mark.parametrize(("name", "size"), [("resnet20", 32), ("resnet18", 64)])
def test_small_size_follows_the_stride(name: str, size: int) -> None:
    from dcptool.network import models

    source = "zoo:" if name == "resnet20" else "timm:"
    assert small_size(models.load(source + name, pretrained=False)) == size


def test_val_is_held_out_of_train_when_there_is_test_alone(folder: Path) -> None:
    data = open_data(DataSpec(data_dir=folder), network())
    assert data.val_is_held_out
    assert len(data.train) + len(data.val) == 20
    assert not set(data.train.numbers) & set(data.val.numbers)
    assert data.report is data.test
    assert data.classes == ("cat", "dog")


def test_val_folder_is_used_as_it_is(folder: Path) -> None:
    (folder / "test").rename(folder / "validation")
    data = open_data(DataSpec(data_dir=folder), network())
    assert not data.val_is_held_out
    assert (len(data.train), len(data.val), data.test) == (20, 6, None)


def test_class_folders_alone_are_split(folder: Path) -> None:
    data = open_data(DataSpec(data_dir=folder / "train", val_fraction=0.2), network())
    assert (len(data.train), len(data.val)) == (16, 4)
    assert sorted(data.val.labels) == [0, 0, 1, 1]


def test_held_out_is_spread_over_classes() -> None:
    labels = numpy.repeat(numpy.arange(10), 50)
    keep, out = held_out_split(labels, 0.1, seed=3)
    assert numpy.bincount(labels[out]).tolist() == [5] * 10
    assert sorted([*keep, *out]) == list(range(500))
    assert (held_out_split(labels, 0.1, seed=3)[1] == out).all()
    assert (held_out_split(labels, 0.1, seed=4)[1] != out).any()


def test_one_image_of_each_class_can_be_split() -> None:
    keep, out = held_out_split(numpy.arange(100), 0.1, seed=0)
    assert (len(keep), len(out)) == (90, 10)


def test_samples_are_balanced_and_seeded(folder: Path) -> None:
    data = open_data(DataSpec(data_dir=folder), network())
    chosen = samples(data, 6, seed=1)
    assert numpy.bincount(chosen.labels).tolist() == [3, 3]
    assert set(chosen.numbers) <= set(data.train.numbers)
    assert (samples(data, 6, seed=1).numbers == chosen.numbers).all()
    assert chosen.augment.off


def test_pixels_are_normalised_as_the_network_says(folder: Path) -> None:
    data = open_data(DataSpec(data_dir=folder), network())
    shown, _ = next(iter(loader(data.test, 1)))
    pixels = numpy.asarray(Image.open(sorted((folder / "test" / "cat").iterdir())[0]))
    wanted = (pixels / 255 - 0.5) / 0.25
    assert numpy.allclose(shown[0].permute(1, 2, 0).numpy(), wanted, atol=1e-5)


def test_epochs_differ_and_repeat(folder: Path) -> None:
    data = open_data(DataSpec(data_dir=folder), network())
    batches = loader(data.train, 4, train=True, seed=5)
    first = [images_.clone() for images_, _ in batches.epoch(0)]
    again = [images_ for images_, _ in batches.epoch(0)]
    other = [images_ for images_, _ in batches.epoch(1)]
    assert len(first) == len(batches) == 4
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(next(batches.epoch(0, start=2))[0], first[2])


def test_augmentation_shifts_and_mirrors_only(folder: Path) -> None:
    data = open_data(DataSpec(data_dir=folder), network())
    batches = loader(data.train, 18, train=True)
    plain = {int(n): data.train.store.take(numpy.array([n]))[0] for n in data.train.numbers}
    order = batches.order(0)[0]
    shown, labels = next(batches.epoch(0))
    raw = ((shown * 0.25 + 0.5) * 255).round().to(torch.uint8)
    moved = 0
    for image, position in zip(raw, order, strict=True):
        source = torch.nn.functional.pad(plain[int(data.train.numbers[position])], (2, 2, 2, 2))
        windows = [
            torch.equal(image, candidate[:, y : y + 16, x : x + 16])
            for candidate in (source, source.flip(2))
            for y in range(5)
            for x in range(5)
        ]
        assert sum(windows) == 1
        moved += not torch.equal(image, plain[int(data.train.numbers[position])])
    assert moved > 9
    assert labels.tolist() == data.train.labels[order].tolist()


def test_two_ranks_share_a_batch_and_count_every_image_once(folder: Path) -> None:
    data = open_data(DataSpec(data_dir=folder, augment=Augment.none()), network())
    whole = loader(data.train, 8, train=True)
    ranks = [loader(data.train, 4, train=True, dist=Dist(rank, 2)) for rank in range(2)]
    for step, order in enumerate(whole.order(3)):
        parts = [rank.order(3)[step] for rank in ranks]
        assert numpy.concatenate(parts).tolist() == order.tolist()
    odd = [loader(data.test, 2, dist=Dist(rank, 4)) for rank in range(4)]
    seen = [position for rank in odd for batch in rank.order(0) for position in batch]
    assert sorted(seen) == list(range(6))


def test_worker_processes_change_nothing(folder: Path) -> None:
    spec = DataSpec(data_dir=folder, augment=Augment(aa="rand-m9", scale=(0.5, 1.0)))
    data = open_data(spec, network())
    lists = []
    for workers in (0, 2):
        batches = loader(data.train, 6, train=True, seed=1, workers=workers)
        lists.append([images_ for images_, _ in batches.epoch(2, start=1)])
    assert len(lists[0]) == len(batches) - 1
    assert all(torch.equal(a, b) for a, b in zip(*lists, strict=True))


def test_bad_files_are_all_named(folder: Path) -> None:
    (folder / "train" / "cat" / "01.png").write_bytes(b"")
    whole = (folder / "train" / "dog" / "02.png").read_bytes()
    (folder / "train" / "dog" / "02.png").write_bytes(whole[: len(whole) * 6 // 10])
    data = open_data(DataSpec(data_dir=folder, val_fraction=0.05), network())
    batches = loader(data.train, 4, train=True)
    with pytest.raises(InputError) as caught:
        list(batches)
    assert "01.png: the file is empty" in caught.value.why
    assert "02.png" in caught.value.why
    skipping = open_data(DataSpec(data_dir=folder, val_fraction=0.05, skip_bad=2), network())
    shown = sum(len(labels) for _, labels in loader(skipping.train, 19))
    assert shown + len(skipping.train.store.bad) == len(skipping.train)


def test_bad_files_are_named_by_workers_too(folder: Path) -> None:
    (folder / "train" / "cat" / "01.png").write_bytes(b"\x89PNG broken")
    spec = DataSpec(data_dir=folder, augment=Augment(aa="rand-m9"), val_fraction=0.05)
    batches = loader(open_data(spec, network()).train, 19, train=True, workers=1)
    with pytest.raises(InputError, match="1 image cannot be read"):
        list(batches)


def test_sixteen_bit_images_are_scaled() -> None:
    ramp = (numpy.arange(256, dtype=numpy.uint16) * 257).reshape(16, 16)
    stream = io.BytesIO()
    Image.fromarray(ramp).save(stream, "PNG")
    grey = numpy.asarray(images.decode(stream.getvalue(), "x.png"))[..., 0]
    assert (grey.reshape(-1) == numpy.arange(256)).all()


@pytest.mark.parametrize("mode", ["CMYK", "P", "RGBA", "LA", "L", "1"])
def test_other_modes_are_converted(mode: str) -> None:
    image = Image.new("RGB", (8, 8), (250, 250, 250)).convert(mode)
    stream = io.BytesIO()
    image.save(stream, "TIFF" if mode == "CMYK" else "PNG")
    found = images.decode(stream.getvalue(), "x")
    assert found.mode == "RGB"
    assert numpy.asarray(found).min() > 200


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"GIF89a" + bytes(50), "format is refused"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "format is refused"),
        (b"hello", "format is refused"),
        (b"", "empty"),
    ],
)
def test_other_formats_are_refused(data: bytes, word: str) -> None:
    with pytest.raises(BadImage, match=word):
        images.decode(data, "x.jpg")


def bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        size = len(body).to_bytes(4, "big")
        return size + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x00\0\0\0"
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [7200, 10_000, 14_000, 60_000])
def test_bombs_are_refused_by_their_header(side: int) -> None:
    with pytest.raises(BadImage, match="pixels"):
        images.decode(bomb(side, side), "bomb.png")


def test_pipes_loops_and_hidden_files(folder: Path) -> None:
    wanted = images.list_classes(folder / "train").digest()
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    paint(folder / "train" / ".ipynb_checkpoints" / "x.png", 1)
    paint(folder / "train" / "cat" / "._01.png", 1)
    (folder / "train" / "cat" / "notes.txt").write_text("x")
    for name in ("again", "twice"):
        (folder / "train" / "cat" / name).symlink_to(folder / "train" / "cat")
    started = time.monotonic()
    listing = images.list_classes(folder / "train")
    assert time.monotonic() - started < 1
    assert listing.digest() == wanted
    assert listing.classes == ("cat", "dog")
    assert listing.ignored == 2
    os.mkfifo(folder / "train" / "dog" / "pipe.jpg")
    with pytest.raises(BadImage, match="a pipe, not a regular file"):
        images.read(folder / "train" / "dog" / "pipe.jpg")


def test_strange_names_become_text() -> None:
    name = os.fsdecode(b"caf\xe9\n<script>")
    readable = images.readable_name(name)
    assert readable.encode()
    assert "\n" not in readable


def test_empty_classes_and_single_classes_are_refused(folder: Path) -> None:
    (folder / "train" / "bird").mkdir()
    with pytest.raises(InputError, match="no image") as caught:
        open_data(DataSpec(data_dir=folder), network())
    assert "bird" in caught.value.why
    (folder / "train" / "bird").rmdir()
    with pytest.raises(InputError, match="no image"):
        open_data(DataSpec(data_dir=folder / "train" / "cat"), network())
    with pytest.raises(InputError, match="no folder"):
        open_data(DataSpec(data_dir=folder / "nothing"), network())


def test_the_same_images_twice_are_a_leak(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "val").symlink_to(folder / "train")
    open_data(DataSpec(data_dir=folder), network())
    assert "same files as train" in capsys.readouterr().err


def test_classes_are_checked(folder: Path) -> None:
    data = open_data(DataSpec(data_dir=folder), network())
    check_classes(network(2), data)
    with pytest.raises(InputError, match="2 classes, zoo:tiny has 5"):
        check_classes(network(5), data)
    with pytest.raises(InputError, match="another order"):
        check_classes(network(2, names=("dog", "cat")), data)
    fresh = reset_head(network(5), data)
    assert fresh.module(torch.zeros(1, 3, 16, 16)).shape == (1, 2)
    assert fresh.base.num_classes == 2
    check_classes(fresh, data)


def test_images_without_labels(folder: Path) -> None:
    data = open_data(DataSpec(images=folder), network())
    assert not data.labelled
    assert len(data.train) + len(data.val) == 26
    assert set(data.train.labels) == {-1}


def test_contradictions_are_usage_errors(folder: Path) -> None:
    with pytest.raises(UsageError):
        open_data(DataSpec(data_dir=folder, images=folder), network())
    with pytest.raises(UsageError, match="unknown data set"):
        open_data(DataSpec(dataset="tfds/mnist"), network())
    with pytest.raises(UsageError):
        open_data(DataSpec(data_dir=folder, std=(0.0, 1.0, 1.0)), network())


def test_shards_are_read_by_number(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "shards"
    root.mkdir()
    for split in ("train", "val"):
        with tarfile.open(root / f"set-{split}-000.tar", "w") as shard:
            for number in range(8):
                stream = io.BytesIO()
                Image.new("RGB", (16, 16), (number * 10,) * 3).save(stream, "PNG")
                parts = ((".png", stream.getvalue()), (".cls", str(number % 2).encode()))
                for ending, body in parts:
                    member = tarfile.TarInfo(f"{number:04d}{ending}")
                    member.size = len(body)
                    shard.addfile(member, io.BytesIO(body))
    data = open_data(DataSpec(dataset="wds/", data_dir=root), network())
    assert (len(data.train), len(data.val)) == (8, 8)
    shown, labels = next(iter(loader(data.val, 8)))
    assert labels.tolist() == [0, 1] * 4
    assert shown[:, 0, 0, 0].tolist() == pytest.approx(
        [(n * 10 / 255 - 0.5) / 0.25 for n in range(8)]
    )


def test_torchvision_folders_by_name(folder: Path) -> None:
    data = open_data(DataSpec(dataset="torch/image_folder", data_dir=folder), network())
    assert len(data.test or ()) == 6


def test_a_set_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [f"class{n}" for n in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        pixels = numpy.full((10, 3072), 10 * number, numpy.uint8)
        body = {"data": pixels, "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(body))
    cifar10 = torchvision.datasets.CIFAR10
    spec = DataSpec(dataset="torch/cifar10", data_dir=tmp_path)
    with pytest.raises(InputError, match="cannot open torch/cifar10"):
        open_data(spec, network())
    # Its own files only pass its sums of checks.
    monkeypatch.setattr(cifar10, "_check_integrity", lambda _self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = open_data(spec, network())
    assert (len(data.train), len(data.val), len(data.test or ())) == (45, 5, 10)
    assert data.classes == tuple(names)
    assert data.source == "torch/cifar10"
    assert data.test is not None
    shown, labels = next(iter(loader(data.test, 10)))
    assert labels.tolist() == list(range(10))
    assert float(shown[0, 0, 0, 0]) == pytest.approx((50 / 255 - 0.5) / 0.25)


def test_a_download_that_fails_is_the_networks_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    spec = DataSpec(dataset="torch/cifar10", data_dir=tmp_path, dataset_download=True)
    with pytest.raises(EnvironmentFault, match="cannot download torch/cifar10") as caught:
        open_data(spec, network())
    assert "no route" in caught.value.why


def test_a_set_of_hugging_face(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("datasets")
    cache = tmp_path_factory.mktemp("rows")
    spec = DataSpec(dataset=f"hfds/{folder}", data_dir=cache, offline=True)
    data, plain = open_data(spec, network()), open_data(DataSpec(data_dir=folder), network())
    assert data.source == f"hfds/{folder.name}"
    assert data.classes == plain.classes
    assert data.test is not None
    assert plain.test is not None
    (ours, labels), (theirs, wanted) = (next(iter(loader(d.test, 6))) for d in (data, plain))
    assert labels.tolist() == wanted.tolist()
    assert torch.equal(ours, theirs)


class Deadly:
    """A source that takes its worker process with it."""

    def __len__(self) -> int:
        return 8

    def read(self, number: int, mode: str) -> Image.Image:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def name(self, number: int) -> str:
        return "deadly"


def test_a_dead_worker_is_the_machines_fault() -> None:
    store = Store(Deadly(), Input((3, 128, 128), (0.5,) * 3, (0.5,) * 3))
    whole = ImageSet("train", store, numpy.arange(8), numpy.zeros(8, dtype=numpy.int64))
    batches = loader(whole, 4, train=True, workers=1)
    with pytest.raises(EnvironmentFault, match="worker died") as caught:
        list(batches)
    assert "--workers 0" in caught.value.try_


def test_an_image_that_vanishes_is_named(folder: Path) -> None:
    data = open_data(DataSpec(data_dir=folder), network())
    (folder / "test" / "cat" / "01.png").unlink()
    batches = loader(data.test, 8)
    with pytest.raises(InputError) as caught:
        list(batches)
    assert "01.png: No such file" in caught.value.why
