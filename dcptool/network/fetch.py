"""Files that a model name implies, from a cache or once over the network.

What comes back are bytes whose hash is the one that the source publishes, checked on
every use, because a cache is a folder that anything may write to. Without a route this
fails within seconds. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dcptool import console, files
from dcptool.errors import EnvironmentFault, InputError

CONNECT_S = 10.0
_URL_HASH = re.compile(r"-([0-9a-f]{8,64})\.")
_CHUNK = 1 << 20


class WeightsUnreachable(EnvironmentFault):
    """The weights of a name are neither in a cache nor to be had over the network."""


class NotPublished(WeightsUnreachable):
    """The source answers, but has no such file, or not for everybody."""


@dataclass(frozen=True)
class Place:
    """A URL, or files of a repository on the hub in order of preference."""

    url: str = ""
    repo: str = ""
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        # Without user, password and query, which may be secrets.
        parts = urlsplit(self.url)
        shown = f"{parts.scheme}://{parts.hostname}{parts.path}"
        return shown if self.url else f"hf-hub:{self.repo}"


Fetch = Callable[[Place, bool], tuple[Path, bytes]]


def fetch(place: Place, offline: bool) -> tuple[Path, bytes]:
    """Where the file lies in the cache, and its verified bytes."""
    return _from_url(place, offline) if place.url else _from_hub(place, offline)


def unreachable(place: Place, why: str) -> WeightsUnreachable:
    """The error that tells how to go on without the network."""
    return WeightsUnreachable(
        f"cannot get {place}",
        why=why,
        try_="--checkpoint FILE for weights that you have, or --no-pretrained for random ones",
    )


def _from_url(place: Place, offline: bool) -> tuple[Path, bytes]:
    import torch

    name = Path(urlsplit(place.url).path).name
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    match = _URL_HASH.search(name)
    wanted = match.group(1) if match else ""
    if path.exists():
        data = files.read_bytes(path, what="cached weights")
        _compare(path, files.sha256(data), wanted)
        return path, data
    if offline:
        raise unreachable(place, "it is not in the cache, and --offline forbids the network")
    data = _download(place)
    if not files.sha256(data).startswith(wanted):
        raise InputError(
            f"{place} is not the file that was published",
            why=f"its sha256 starts with {files.sha256(data)[: len(wanted)]}, not {wanted}",
            try_="the same command again, on another connection",
        )
    try:
        files.make_folder(path.parent)
        files.publish(path, data)
    except EnvironmentFault as err:
        console.detail(f"{name} is not kept for the next time: {err.why}")
    return path, data


def _compare(path: Path, found: str, wanted: str) -> None:
    if not found.startswith(wanted):
        raise InputError(
            f"the cached file {path} is not what was published",
            why=f"its hash differs: expected {wanted}, got {found[: max(len(wanted), 8)]}",
            try_=f"delete it: rm '{path}'",
        )


def _download(place: Place) -> bytes:
    console.note(f"fetching {place}")
    _reach(place, place.url)
    request = urllib.request.Request(place.url, headers={"User-Agent": "dcptool"})
    parts = []
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_S) as answer:
            total = float(answer.headers.get("Content-Length") or 0) or None
            with console.progress("fetching", total) as task:
                while part := answer.read(_CHUNK):
                    parts.append(part)
                    task.advance(len(part))
    except (OSError, http.client.HTTPException) as err:
        reason = getattr(err, "reason", None) or err
        raise unreachable(place, f"{urlsplit(place.url).hostname}: {reason}") from err
    return b"".join(parts)


def _reach(place: Place, url: str) -> None:
    """Fail early when no connection can be made: name lookups have no time limit of their own."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    faults: list[BaseException | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
            faults.append(None)
        except Exception as err:  # handed to the thread that waits
            faults.append(err)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    fault = faults[0] if faults else TimeoutError(f"no answer in {CONNECT_S:.0f} s")
    if fault is not None:
        raise unreachable(place, f"no connection to {host}: {fault}") from fault


def _from_hub(place: Place, offline: bool) -> tuple[Path, bytes]:
    import huggingface_hub as hub
    from huggingface_hub import constants

    repo, _, revision = place.repo.partition("@")
    for name in place.names:
        cached = hub.try_to_load_from_cache(repo, name, revision=revision or None)
        if isinstance(cached, str):
            return _verified(Path(cached), "")
    if offline or constants.HF_HUB_OFFLINE:
        rule = "--offline" if offline else "HF_HUB_OFFLINE"
        raise unreachable(place, f"it is not in the cache, and {rule} forbids the network")
    console.note(f"fetching {place}")
    _reach(place, constants.ENDPOINT)
    for name in place.names:
        found = _ask_hub(place, repo, name, revision or None)
        if found is not None:
            return found
    raise NotPublished(f"{place} has none of the files {', '.join(place.names)}")


def _ask_hub(place: Place, repo: str, name: str, revision: str | None) -> tuple[Path, bytes] | None:
    """One file of a repository, or nothing when the repository lacks it."""
    import huggingface_hub as hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # The class of the hub's own HTTP library, whichever that is.
    transport_error: type[BaseException] = errors.HfHubHTTPError.__bases__[0]
    disable_progress_bars()
    try:
        # Asked first, without retries: the download itself would try for minutes.
        about = hub.get_hf_file_metadata(
            hub.hf_hub_url(repo, name, revision=revision), timeout=CONNECT_S
        )
        path = hub.hf_hub_download(repo, name, revision=revision, etag_timeout=CONNECT_S)
    except errors.LocalEntryNotFoundError as err:
        raise unreachable(place, str(err)) from err
    except errors.EntryNotFoundError:
        return None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as err:
        raise NotPublished(
            f"there is no {place}",
            why="the hub does not have it, or not for everybody",
            try_="check the name at https://huggingface.co/timm",
        ) from err
    except (OSError, transport_error) as err:
        reason = str(err).strip().partition("\n")[0]
        raise unreachable(place, reason or type(err).__name__) from err
    return _verified(Path(path), about.etag or "")


def _verified(path: Path, etag: str) -> tuple[Path, bytes]:
    """Read a file of the hub's cache; its true name there is its hash."""
    wanted = path.readlink().name if path.is_symlink() else etag
    data = files.read_bytes(path, what="cached file")
    if re.fullmatch("[0-9a-f]{64}", wanted):
        _compare(path, files.sha256(data), wanted)
    elif re.fullmatch("[0-9a-f]{40}", wanted):
        blob = b"blob %d\0" % len(data) + data
        _compare(path, hashlib.sha1(blob, usedforsecurity=False).hexdigest(), wanted)
    else:
        raise InputError(
            f"the cached file {path} cannot be verified",
            why="the hub's cache keeps files under their hash; this one has none",
            try_=f"delete it: rm '{path}'",
        )
    return path, data
