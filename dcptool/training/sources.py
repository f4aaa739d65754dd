"""Where images come from: files, arrays in memory, data sets of other libraries.

A source answers one question, the pixels of image number i, and knows a digest of what it
holds. It has no opinion on splits, sizes or labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
from PIL import Image

from dcptool import files
from dcptool.training import images
from dcptool.training.images import BadImage


class Source(Protocol):
    """Images by number."""

    def __len__(self) -> int: ...

    def read(self, number: int, mode: str) -> Image.Image:
        """One image in `RGB` or `L`; raises BadImage."""
        ...

    def name(self, number: int) -> str:
        """What to call that image in a message."""
        ...


@dataclass(frozen=True)
class Files:
    """Image files on the disk."""

    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, number: int, mode: str) -> Image.Image:
        """Open the file now; one that vanished since is a bad image."""
        return images.read(self.paths[number], mode)

    def name(self, number: int) -> str:
        """Its path."""
        return str(self.paths[number])


@dataclass(frozen=True)
class Arrays:
    """Grey images in memory, uint8, shape (n, h, w)."""

    pixels: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, number: int, mode: str) -> Image.Image:
        """A copy as an image."""
        return Image.fromarray(self.pixels[number]).convert(mode)

    def name(self, number: int) -> str:
        """Its number."""
        return f"image {number}"


@dataclass(frozen=True)
class Indexed:
    """A map-style data set of timm, torchvision or Hugging Face; items are (image, label)."""

    dataset: Any
    title: str

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, number: int, mode: str) -> Image.Image:
        """Take the image of an item; whatever the library raises is a bad image."""
        try:
            image = self.dataset[number][0]
        except Exception as err:
            raise BadImage(self.name(number), f"{type(err).__name__}: {err}") from err
        if not isinstance(image, Image.Image):
            raise BadImage(self.name(number), f"a {type(image).__name__}, not an image")
        if image.width * image.height > images.PIXEL_LIMIT:
            raise BadImage(self.name(number), f"more than {images.PIXEL_LIMIT:,} pixels")
        return images.convert(image, mode)

    def name(self, number: int) -> str:
        """Its number in the data set."""
        return f"{self.title}[{number}]"


def digits() -> tuple[Arrays, list[int]]:
    """scikit-learn's handwritten digits: 1,797 real images of 8 x 8, ten classes.

    Read from the package's own table: loading them through scikit-learn costs two seconds.
    """
    import importlib.util

    spec = importlib.util.find_spec("sklearn")
    folder = Path(str(spec.origin)).parent if spec and spec.origin else Path()
    table = folder / "datasets" / "data" / "digits.csv.gz"
    import gzip

    text = gzip.decompress(files.read_bytes(table, what="the built-in images", limit=1 << 20))
    rows = numpy.loadtxt(text.decode("ascii").splitlines(), delimiter=",", dtype=numpy.int64)
    grey = numpy.rint(rows[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(numpy.uint8)
    return Arrays(grey), [int(label) for label in rows[:, 64]]
