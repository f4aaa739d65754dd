"""Image files: what is read, what is converted, what is refused."""

from __future__ import annotations

import io
import os
import time
import zlib
from pathlib import Path

import numpy
import pytest
from painted import network, paint
from PIL import Image

from dcptool.errors import InputError
from dcptool.training import images
from dcptool.training.data import DataSpec, open_data
from dcptool.training.images import BadImage
from dcptool.training.loader import Augment, loader


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


def test_splits_share_the_number_of_files_that_may_be_skipped(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split / "cat" / "01.png").write_bytes(b"")
    for limit in (1, 2):
        spec = DataSpec(data_dir=folder, val_fraction=0.05, skip_bad=limit)
        data = open_data(spec, network())
        assert sum(len(labels) for _, labels in loader(data.test, 6)) == 5
        batches = loader(data.train, 19, train=True)
        if limit == 2:
            list(batches)
        else:
            with pytest.raises(InputError, match="2 images cannot be read"):
                list(batches)


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
