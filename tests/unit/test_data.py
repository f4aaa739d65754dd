"""Images: what is read, what is refused, how it is split and batched."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy
import pytest
import torch
from painted import network, paint
from PIL import Image

from dcptool.errors import EnvironmentFault, InputError, UsageError
from dcptool.network import models
from dcptool.network.models import Input
from dcptool.training import images
from dcptool.training.classes import check_classes, reset_head
from dcptool.training.data import (
    DataSpec,
    at_own_size,
    held_out_split,
    open_data,
    samples,
    small_size,
    spec_of,
)
from dcptool.training.dist import Dist
from dcptool.training.loader import Augment, ImageSet, Store, loader


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
    # Classes take turns: the halves of a batch show the same ones.
    assert [set(chosen.labels[i : i + 2]) for i in (0, 2, 4)] == [{0, 1}] * 3


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
    with pytest.raises(InputError, match="no class folders") as caught:
        open_data(DataSpec(data_dir=folder / "train" / "cat"), network())
    assert "--images" in caught.value.try_
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


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        ({"aa": "nonsense"}, "--aa nonsense"),
        ({"aa": "rand-q5"}, "--aa rand-q5"),
        ({"scale": (1.0, 0.5)}, "--scale 1 0.5"),
        ({"ratio": (2.0, 1.0), "aa": "v9"}, "--ratio 2 1.*\n--aa v9"),
    ],
)
def test_augmentation_that_cannot_be_is_refused_before_any_work(augment, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of({}, augment=augment)
    assert re.search(words, caught.value.why)
    given = {"aa": "rand-m9-mstd0.5", "scale": (0.5, 1.0), "ratio": (1.0, 1.0)}
    assert spec_of({}, augment=given).augment == Augment(**given)


@pytest.mark.parametrize("option", ["train_split", "val_split"])
def test_a_split_that_was_named_must_be_there(folder: Path, option: str) -> None:
    for root in (folder, folder / "train"):
        with pytest.raises(InputError, match="no folder typo") as caught:
            open_data(DataSpec(data_dir=root, **{option: "typo"}), network())
        assert f"--{option.replace('_', '-')}" in caught.value.try_
    assert len(open_data(DataSpec(data_dir=folder, train_split="test"), network()).train) == 5


def test_one_image_cannot_be_split(tmp_path: Path) -> None:
    paint(tmp_path / "one.png", 0)
    with pytest.raises(InputError, match="one image only") as caught:
        open_data(DataSpec(images=tmp_path), network())
    assert "held out" in caught.value.why


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


def test_the_built_in_images_can_have_the_size_of_a_network_that_is_not_square() -> None:
    network = models.load("zoo:spherenet4", pretrained=False, num_classes=10)
    found = open_data(at_own_size(DataSpec()), network)
    assert found.input.size == (3, 112, 96)
