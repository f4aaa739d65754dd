"""All that touches the disk: atomic publication, one-time reads, hashes, locks.

A file appears whole or not at all: it is written beside its place, flushed to the disk,
renamed, and the folder is flushed. Readers take a regular file once into memory, so that
what was hashed is what is parsed. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dcptool.errors import EnvironmentFault, InputError, UsageError

MANIFEST_LIMIT = 64 << 20
_TEMP_MARK = ".dcptool-"


def publish(path: Path, data: bytes) -> None:
    """Put `data` at `path`, whole and durable, or leave what was there."""

    def write(temp: Path) -> None:
        handle = os.open(temp, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
        finally:
            os.close(handle)

    publish_with(path, write)


def publish_with(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file in the folder of `path`, then rename it there.

    For libraries that insist on writing files themselves.
    """
    if path.is_symlink():
        raise EnvironmentFault(
            f"cannot write {path}: it is a symbolic link",
            why="writing through a link could change a file somewhere else",
            try_=f"rm {path}",
        )
    temp = path.parent / f"{_TEMP_MARK}{secrets.token_hex(6)}.tmp"
    try:
        umask_mode = 0o666  # the process umask is applied by open
        os.close(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, umask_mode))
        write(temp)
        _flush(temp)
        os.rename(temp, path)  # noqa: PTH104 - kept beside os.open so that faults can be injected
        flush_folder(path.parent)
    except OSError as err:
        raise storage_fault(err, path) from err
    finally:
        with suppress(OSError):
            temp.unlink()


def publish_json(path: Path, document: object) -> None:
    """Publish a JSON document with stable key order and a final newline."""
    publish(path, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())


def point_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, replacing an older link in one step."""
    if link.exists() and not link.is_symlink():
        raise EnvironmentFault(f"cannot set {link}: it is not a link", try_=f"mv {link} {link}.old")
    temp = link.parent / f"{_TEMP_MARK}{secrets.token_hex(6)}.tmp"
    try:
        temp.symlink_to(target)
        temp.rename(link)
        flush_folder(link.parent)
    except OSError as err:
        raise storage_fault(err, link) from err
    finally:
        with suppress(OSError):
            temp.unlink()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    """Make renames inside `folder` durable, where the file system can do it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as err:
        # Some network file systems cannot flush folders; the file itself is safe.
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def storage_fault(err: OSError, path: Path) -> EnvironmentFault:
    """Translate an error of the operating system while writing `path`."""
    remedies = {
        errno.ENOSPC: "free some space, or choose another disk with -o",
        errno.EDQUOT: "free some space, or choose another disk with -o",
        errno.EFBIG: "raise the limit: ulimit -f unlimited",
        errno.EACCES: f"check the rights: ls -ld {path.parent}",
        errno.EPERM: f"check the rights: ls -ld {path.parent}",
        errno.EROFS: "choose a writable folder with -o",
        errno.ENOENT: f"was the folder removed? mkdir -p {path.parent}",
    }
    return EnvironmentFault(
        f"cannot write {path}",
        why=f"{os.strerror(err.errno) if err.errno else err}",
        try_=remedies.get(err.errno or 0, "check the disk, then run the same command again"),
    )


def read_bytes(
    path: Path,
    *,
    what: str,
    limit: int | None = None,
    check: Callable[[IO[bytes], int], None] | None = None,
) -> bytes:
    """Read a regular file once; `what` names the kind of file in messages.

    `check` may look at the open file and its size first, and raise before all is in memory.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        why = os.strerror(err.errno) if err.errno else str(err)
        raise InputError(f"cannot read {what} {path}", why=why) from err
    # Asked of the handle itself: a stream cannot even be made of a folder.
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        os.close(handle)
        raise InputError(
            f"cannot read {what} {path}", why=f"it is {_kind(info.st_mode)}, not a regular file"
        )
    with os.fdopen(handle, "rb") as stream:
        if limit is not None and info.st_size > limit:
            raise InputError(
                f"cannot read {what} {path}",
                why=f"it has {info.st_size:,} bytes; the limit is {limit:,}",
            )
        try:
            if check is not None:
                check(stream, info.st_size)
                stream.seek(0)
            data = stream.read()
        except OSError as err:
            raise InputError(f"cannot read {what} {path}", why=str(err)) from err
    return data


def _kind(mode: int) -> str:
    for check, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if check(mode):
            return name
    return "something else"


def read_json(path: Path, *, what: str, limit: int = MANIFEST_LIMIT) -> dict[str, object]:
    """Read a JSON object; duplicate keys, NaN and deep nesting are refused."""
    data = read_bytes(path, what=what, limit=limit)
    try:
        document = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as err:
        raise InputError(f"cannot read {what} {path}", why=f"not valid JSON: {err}") from err
    if not isinstance(document, dict):
        raise InputError(f"cannot read {what} {path}", why="it holds no JSON object")
    return document


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return result


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def sha256(data: bytes) -> str:
    """Hex digest of `data`."""
    return hashlib.sha256(data).hexdigest()


def require_new(path: Path, *, force: bool) -> None:
    """Refuse to overwrite a file, or a folder with something in it, unless told to."""
    occupied = path.is_symlink() or (any(path.iterdir()) if path.is_dir() else path.exists())
    if occupied and not force:
        raise UsageError(
            f"{path} exists already",
            why="nothing is overwritten without being asked",
            try_=f"choose another place with -o, or add --force to replace {path}",
        )


def make_folder(path: Path) -> None:
    """Create a folder and prove that it can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f"{_TEMP_MARK}{secrets.token_hex(6)}.tmp"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        probe.unlink()
    except OSError as err:
        raise storage_fault(err, path / "(new file)") from err


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Be the only writer of `folder`; the lock dies with this process.

    lockf, not flock: a forked data worker that outlives us must not keep the lock.
    """
    path = folder / ".lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as err:
        raise storage_fault(err, path) from err
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
            raise EnvironmentFault(
                f"{folder} is in use by another dcptool",
                why=f"process {owner} is writing to it",
                try_="wait for it to end, or choose another folder with -o",
            ) from err
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
