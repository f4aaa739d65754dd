"""Image files: which of them count, and how one becomes pixels.

A folder is walked once, in a fixed order, each inode once; hidden files are left out. A file
is read whole, must be a regular file in one of the known formats, and has a limit on its
pixels. Nothing is guessed: what cannot be read whole is a `BadImage`, never a grey one.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy
from PIL import Image, UnidentifiedImageError

from dcptool import files
from dcptool.errors import InputError

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")
EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".pbm", ".tif", ".tiff")
)
PIXEL_LIMIT = 50_000_000
BYTE_LIMIT = 512 << 20

# Pillow only warns above its own limit, after the header; here such a file is refused.
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
# Damaged tags beside pixels that can be read; pixels that cannot be read are an error anyway.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


class BadImage(Exception):
    """One image that cannot be used; `where` is a path or a position in a data set."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where = where
        self.why = why


@dataclass(frozen=True)
class Listing:
    """The image files below a folder, in a fixed order."""

    root: Path
    files: tuple[Path, ...]
    classes: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()
    ignored: int = 0
    folders: tuple[str, ...] = field(default=(), repr=False)

    def digest(self) -> str:
        """Name and size of every file, so that another data set is told from this one."""
        parts = []
        for path in self.files:
            name = os.fsencode(path.relative_to(self.root))
            parts.append(name + b"\0%d" % path.stat().st_size)
        return files.sha256(b"\n".join(parts))


def readable_name(name: str) -> str:
    """A file or class name as valid text, whatever bytes it has on the disk."""
    text = os.fsencode(name).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "�" for c in text)


def is_hidden(name: str) -> bool:
    """Names that file browsers, macOS and notebooks leave behind."""
    return name.startswith(".")


def subfolders(root: Path) -> list[Path]:
    """Visible folders directly below `root`, sorted by name."""
    with _scan(root) as entries:
        found = [Path(e.path) for e in entries if not is_hidden(e.name) and e.is_dir()]
    return sorted(found, key=lambda path: os.fsencode(path.name))


def walk(root: Path) -> tuple[list[Path], int]:
    """Image files at any depth below `root`, sorted, and how many entries were left out."""
    found: list[Path] = []
    ignored = 0
    seen: set[tuple[int, int]] = set()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        info = folder.stat()
        if (info.st_dev, info.st_ino) in seen:
            continue
        seen.add((info.st_dev, info.st_ino))
        with _scan(folder) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    ignored += 1
                elif entry.is_dir():
                    waiting.append(Path(entry.path))
                elif Path(entry.name).suffix.lower() in EXTENSIONS:
                    found.append(Path(entry.path))
                else:
                    ignored += 1
    return sorted(found, key=os.fsencode), ignored


def _scan(folder: Path) -> os._ScandirIterator[str]:
    try:
        return os.scandir(folder)
    except OSError as err:
        why = os.strerror(err.errno) if err.errno else str(err)
        raise InputError(
            f"cannot read the folder {folder}", why=why, try_=f"check it: ls -ld {folder}"
        ) from err


def list_unlabelled(root: Path) -> Listing:
    """Every image below `root`, flat or nested, without labels."""
    found, ignored = walk(root)
    if not found:
        raise _no_images(root)
    return Listing(root, tuple(found), labels=(-1,) * len(found), ignored=ignored)


def list_classes(root: Path, classes: Sequence[str] | None = None) -> Listing:
    """Images of an ImageFolder: one sub-folder for each class, sorted by name.

    With `classes`, the folders must be among those, which also fixes the numbers.
    """
    folders = subfolders(root)
    names = [folder.name for folder in folders]
    if classes is not None and (strange := sorted(set(names) - set(classes))):
        raise InputError(
            f"{root} has classes that the training images do not have",
            why=_some([readable_name(name) for name in strange]),
            try_="give both folders the same class folders",
        )
    order = list(classes) if classes is not None else names
    paths: list[Path] = []
    labels: list[int] = []
    empty: list[str] = []
    ignored = 0
    for folder in folders:
        found, left_out = walk(folder)
        ignored += left_out
        if not found:
            empty.append(readable_name(folder.name))
        paths += found
        labels += [order.index(folder.name)] * len(found)
    if not paths and not folders and (loose := walk(root)[0]):
        raise InputError(
            f"{root} has no class folders",
            why=f"{len(loose):,} images lie in it side by side, which says no class of any",
            try_=f"{root}/CLASS/*.jpg; unlabelled images go by --images {root}",
        )
    if not paths:
        raise _no_images(root)
    if empty and classes is None:
        raise InputError(
            f"{len(empty)} class folders of {root} have no image",
            why=_some(empty),
            try_="remove the empty folders, or put images there",
        )
    if len(order) < 2:
        raise InputError(
            f"{root} has one class only: {readable_name(order[0])}",
            why="there is nothing to tell apart",
            try_="name the folder that holds the class folders; unlabelled images go by --images",
        )
    return Listing(root, tuple(paths), tuple(order), tuple(labels), ignored, tuple(names))


def _no_images(root: Path) -> InputError:
    kinds = " ".join(sorted(EXTENSIONS))
    return InputError(
        f"no image in {root}",
        why=f"an image file ends in one of {kinds}",
        try_=f"look what is there: ls {root}",
    )


def _some(names: Sequence[str], limit: int = 10) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def read(path: Path, mode: str = "RGB") -> Image.Image:
    """The pixels of one file, as 8-bit `RGB` or `L`."""
    try:
        data = files.read_bytes(path, what="the image", limit=BYTE_LIMIT)
    except InputError as err:
        raise BadImage(str(path), err.why) from err
    return decode(data, str(path), mode)


def decode(data: bytes, where: str, mode: str = "RGB") -> Image.Image:
    """The pixels of an encoded image; raises BadImage with the reason."""
    if not data:
        raise BadImage(where, "the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > PIXEL_LIMIT:
                raise _too_large(where, image.width, image.height)
            image.load()
            return convert(image, mode)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as err:
        raise BadImage(where, f"more than {PIXEL_LIMIT:,} pixels, the limit") from err
    except UnidentifiedImageError as err:
        known = ", ".join(FORMATS)
        raise BadImage(where, f"the format is refused or unknown; known are {known}") from err
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, ArithmeticError) as err:
        raise BadImage(where, str(err) or type(err).__name__) from err
    except (struct.error, IndexError, KeyError, TypeError, AttributeError, RuntimeError) as err:
        # Decoders meet damaged headers in many ways; each is a bad file, not a fault of ours.
        raise BadImage(where, f"damaged: {type(err).__name__}: {err}") from err


def _too_large(where: str, width: int, height: int) -> BadImage:
    return BadImage(
        where, f"{width} x {height} = {width * height:,} pixels; the limit is {PIXEL_LIMIT:,}"
    )


def convert(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """Any mode to 8-bit `RGB` or `L`; wide integers and floats are scaled, never clipped."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        wide = numpy.asarray(image).astype(numpy.float64)
        if image.mode == "F":
            top = 1.0 if wide.max(initial=0) <= 1 else max(255.0, float(wide.max()))
        else:
            # Pillow opens 16-bit PNG either as I;16 or as I; both count to 65535.
            top = 65535.0 if wide.max(initial=0) <= 65535 else float(2**31 - 1)
        scaled = numpy.clip(numpy.rint(wide * (255.0 / top)), 0, 255).astype(numpy.uint8)
        image = Image.fromarray(scaled)
    elif image.mode == "P" and "transparency" in image.info:
        # Straight to RGB, Pillow warns about palettes with transparency given as bytes.
        image = image.convert("RGBA")
    return image.convert(mode) if image.mode != mode else image.copy()
