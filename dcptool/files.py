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
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from dcptool import console
from dcptool.errors import DcptoolError, EnvironmentFault, InputError, UsageError

MANIFEST_LIMIT = 64 << 20
_NODE = hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]
_TEMP = re.compile(r"\.dcptool-(?P<node>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-[0-9a-f]{12}\.tmp")
_warned: set[str] = set()
_held: set[tuple[int, int]] = set()


def publish(path: Path, data: bytes) -> None:
    """Put `data` at `path`, whole and durable, or leave what was there."""

    def write(temp: Path) -> None:
        handle = os.open(temp, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            _write_all(handle, data)
        finally:
            os.close(handle)

    publish_with(path, write, need=len(data))


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def publish_with(path: Path, write: Callable[[Path], None], *, need: int | None = None) -> None:
    """Let `write` fill a temporary file in the folder of `path`, then rename it there.

    For libraries that insist on writing files themselves; `need` bytes are told of when the
    disk is full.
    """
    _refuse_link(path)
    temp = _temp_beside(path)
    try:
        try:
            # The process umask is applied here; a library may put a file of its own at `temp`.
            handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            try:
                mode = stat.S_IMODE(os.fstat(handle).st_mode)
            finally:
                os.close(handle)
            write(temp)
            _flush(temp, mode)
            _refuse_link(path)
            # A link that appears only now is replaced, never followed.
            os.rename(temp, path)  # noqa: PTH104 - every call of the system goes through `os` here
        except OSError as err:
            raise storage_fault(err, path, need=need) from err
        _settle(path)
    finally:
        with suppress(OSError):
            os.unlink(temp)  # noqa: PTH108


def _temp_beside(path: Path) -> Path:
    return path.parent / f".dcptool-{_NODE}-{os.getpid()}-{secrets.token_hex(6)}.tmp"


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise EnvironmentFault(
            f"cannot write {path}: it is a symbolic link",
            why="writing through a link could change a file somewhere else",
            try_=f"rm {path}",
        )


def _settle(path: Path) -> None:
    """Flush the folder after a rename: the file is there, only a power loss could undo it."""
    try:
        flush_folder(path.parent)
    except OSError as err:
        why = os.strerror(err.errno) if err.errno else str(err)
        raise EnvironmentFault(
            f"{path} is written, but may not survive a power loss",
            why=f"its folder cannot be flushed to the disk: {why}",
            try_="check the disk, then run the same command again",
        ) from err


def publish_json(path: Path, document: object) -> None:
    """Publish a JSON document with stable key order and a final newline."""
    publish(path, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())


def append(path: Path, text: str) -> None:
    """Add whole lines to a record, which a crash may leave without the last of them."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            _write_all(handle, text.encode())
        finally:
            os.close(handle)
    except OSError as err:
        raise storage_fault(err, path) from err


def remove(path: Path) -> None:
    """Remove a file of ours, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as err:
        raise storage_fault(err, path) from err


def point_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, replacing an older link in one step."""
    if link.exists() and not link.is_symlink():
        raise EnvironmentFault(
            f"cannot set {link}: it is not a link",
            why="something else has its name, and nothing is overwritten without being asked",
            try_=f"mv {link} {link}.old",
        )
    sweep(link.parent)
    temp = _temp_beside(link)
    try:
        try:
            os.symlink(target, temp)  # noqa: PTH211
            os.rename(temp, link)  # noqa: PTH104
        except OSError as err:
            raise storage_fault(err, link) from err
        _settle(link)
    finally:
        with suppress(OSError):
            os.unlink(temp)  # noqa: PTH108


def _flush(path: Path, mode: int) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) != mode:
            os.fchmod(handle, mode)
        # Never tried again: after a failure the kernel may have dropped the pages.
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
        if "flush" not in _warned:
            _warned.add("flush")
            console.warn(f"{folder} cannot be flushed to the disk; a power loss may undo renames")
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Remove temporary files in `folder` that a dead process of this program left here."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            found = _TEMP.fullmatch(entry.name)
            if found is None or found["node"] != _NODE or _lives(int(found["pid"])):
                continue
            with suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                ours = stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)
                if ours and info.st_uid == os.geteuid():
                    os.unlink(entry.path)  # noqa: PTH108


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


_REMEDIES = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space, or write to another disk",
    errno.EFBIG: "raise the limit: ulimit -f unlimited",
    errno.EACCES: "check the rights: ls -ld {existing}",
    errno.EPERM: "check the rights: ls -ld {existing}",
    errno.EROFS: "choose a writable folder",
    errno.ENOENT: "was the folder removed? mkdir -p {folder}",
    errno.EISDIR: "a folder has this name; choose another one",
    errno.EEXIST: "a file has this name; choose another one",
    errno.ENOTDIR: "part of the path is a file; choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def storage_fault(err: OSError, path: Path, *, need: int | None = None) -> EnvironmentFault:
    """Translate an error of the operating system while writing `path`."""
    why = os.strerror(err.errno) if err.errno else str(err)
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            why += f": {shutil.disk_usage(path.parent).free:,} bytes are free"
            why += f", {need:,} are needed" if need else ""
    remedy = _REMEDIES.get(err.errno or 0, "check the disk, then run the same command again")
    # Path.exists raises where it may not look.
    found = (folder for folder in path.parents if os.path.exists(folder))  # noqa: PTH110
    existing = next(found, path.parent)
    try_ = remedy.format(folder=path.parent, existing=existing)
    return EnvironmentFault(f"cannot write {path}", why=why, try_=try_)


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
    except (OSError, ValueError) as err:
        raise _read_fault(err, path, what) from err
    with ExitStack() as stack:
        stack.callback(os.close, handle)
        try:
            # Asked of the handle itself: a stream cannot even be made of a folder.
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode):
                raise InputError(
                    f"cannot read {what} {path}",
                    why=f"it is {_kind(info.st_mode)}, not a regular file",
                    try_=f"name a file: ls -l {path}",
                )
            if limit is not None and info.st_size > limit:
                raise _too_large(path, what, info.st_size, limit)
            stream = stack.enter_context(os.fdopen(handle, "rb", closefd=False))
            if check is not None:
                check(stream, info.st_size)
                stream.seek(0)
            # A read of n bytes takes n bytes of memory first, so the limit is no size to ask for.
            # A file may grow while it is read, and some tell no size at all.
            data = stream.read(info.st_size)
            if more := stream.read(1 << 16):
                data += more
                data += (
                    stream.read() if limit is None else stream.read(max(0, limit + 1 - len(data)))
                )
        except OSError as err:
            raise _read_fault(err, path, what) from err
    if limit is not None and len(data) > limit:
        raise _too_large(path, what, len(data), limit)
    return data


def _too_large(path: Path, what: str, size: int, limit: int) -> InputError:
    return InputError(
        f"cannot read {what} {path}",
        why=f"it has {size:,} bytes or more; the limit is {limit:,}",
        try_="is this the right file?",
    )


def _read_fault(err: OSError | ValueError, path: Path, what: str) -> DcptoolError:
    number = err.errno if isinstance(err, OSError) else None
    why = os.strerror(number) if number else str(err)
    message = f"cannot read {what} {path}"
    if number in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return EnvironmentFault(message, why=why, try_="check the disk and the limits: ulimit -a")
    if number in (errno.EACCES, errno.EPERM):
        return InputError(message, why=why, try_=f"check the rights: ls -l {path}")
    return InputError(message, why=why, try_=f"check the name: ls {path.parent}")


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
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as err:
        raise InputError(f"cannot read {what} {path}", why=f"not valid JSON: {err}") from err
    if not isinstance(document, dict):
        raise InputError(f"cannot read {what} {path}", why="it holds no JSON object")
    return document


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the key {name!r} appears twice")
        result[name] = value
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def sha256(data: bytes) -> str:
    """Hex digest of `data`."""
    return hashlib.sha256(data).hexdigest()


def require_new(path: Path, *, force: bool, instead: str = "another name") -> None:
    """Refuse to overwrite a file, or a folder with something in it, unless told to.

    `instead` is how another place is named on the command line.
    """
    occupied = path.is_symlink() or (any(path.iterdir()) if path.is_dir() else path.exists())
    if occupied and not force:
        raise UsageError(
            f"{path} exists already",
            why="nothing is overwritten without being asked",
            try_=f"{instead}, or --force to replace {path}",
        )


def require_space(folder: Path, need: int) -> None:
    """Refuse to begin what the disk of `folder` has no room for; `need` is about what it takes."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # whoever writes there will say what is wrong
    if free < need:
        raise EnvironmentFault(
            f"not enough room in {folder}",
            why=f"{free:,} bytes are free, about {need:,} are needed",
            try_="free some space, or write to another disk",
        )


def make_folder(path: Path, *, parents: bool = True) -> None:
    """Create a folder, prove that it can be written to, and clear what a dead run left in it."""
    probe = _temp_beside(path / "file")
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=parents, exist_ok=True)
        for folder in missing:
            flush_folder(folder.parent)
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError as err:
        raise storage_fault(err, path) from err
    finally:
        with suppress(OSError):
            os.unlink(probe)  # noqa: PTH108
    sweep(path)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Be the only writer of `folder`; the lock dies with this process.

    lockf, not flock: a forked data worker that outlives us must not keep the lock.
    """
    path = folder / ".lock"
    try:
        info = os.stat(folder)  # noqa: PTH116
        place = (info.st_dev, info.st_ino)
        if place in _held:
            # Opening the file again, and closing it, would drop the lock that is held.
            raise _in_use(folder, "this process")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as err:
        raise storage_fault(err, path) from err
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno not in (errno.EAGAIN, errno.EACCES):
                raise storage_fault(err, path) from err
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
            raise _in_use(folder, f"process {owner or '(unknown)'}") from err
        # The number is only told to others; a full disk is no reason to stop.
        with suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        _held.add(place)
        try:
            yield
        finally:
            _held.discard(place)
    finally:
        os.close(handle)


def _in_use(folder: Path, owner: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{folder} is in use by another dcptool",
        why=f"{owner} is writing to it",
        try_="wait for it to end, or write to another folder",
    )
