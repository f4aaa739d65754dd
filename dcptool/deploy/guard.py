"""A child process that meets a foreign .onnx file first.

The child scans, checks, loads and runs the file under a memory limit and a time limit, and
reports what it found: MACs, input, peak memory. A file that crashes a library or fills the
memory takes the child with it, and the command that asked lives and says so.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import onnx

from dcptool import child
from dcptool.deploy import onnx_cost, onnx_scan
from dcptool.deploy.session import feed_of, open_session
from dcptool.errors import DcptoolError, EnvironmentFault, InputError, UsageError

TIME_LIMIT_S = 180.0
MEMORY_DEFAULT = 4 << 30
# Loading holds the bytes, the parsed graph and the packed weights at the same time.
MEMORY_PER_FILE_BYTE = 8


@dataclass(frozen=True)
class Visit:
    """What the child saw."""

    macs: int
    params: int
    peak_bytes: int


def visit(
    path: Path,
    *,
    batch_size: int = 1,
    threads: int = 1,
    size: int | None = None,
    memory_bytes: int = MEMORY_DEFAULT,
    time_limit_s: float = TIME_LIMIT_S,
) -> Visit:
    """Let a child process load and run `path` once; exit 3 when that fails."""
    request = {
        "path": str(path.absolute()),
        "batch_size": batch_size,
        "threads": threads,
        "size": size,
        "memory_bytes": memory_bytes,
    }
    try:
        done = subprocess.run(
            child.command("dcptool.deploy.guard", "serve"),
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise InputError(
            f"refused {path}", why=f"one run took longer than {time_limit_s:.0f} s"
        ) from err
    except OSError as err:
        raise EnvironmentFault("cannot start a child process", why=str(err)) from err
    if done.returncode < 0:
        if -done.returncode == signal.SIGKILL:
            raise EnvironmentFault(
                f"the process that checked {path} was killed", why="probably out of memory"
            )
        raise InputError(
            f"refused {path}",
            why=f"the checker died of signal {-done.returncode} "
            f"({signal.Signals(-done.returncode).name})",
        )
    try:
        answer = json.loads(done.stdout)
    except ValueError as err:
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no answer"]
        raise InputError(f"refused {path}", why=f"the checker failed: {tail[0][:300]}") from err
    if "error" in answer:
        kinds = {kind.code: kind for kind in (UsageError, EnvironmentFault)}
        raise kinds.get(answer["code"], InputError)(
            answer["error"], why=answer["why"], try_=answer["try"]
        )
    return Visit(answer["macs"], answer["params"], answer["peak_bytes"])


def check_whole(scanned: onnx_scan.Scanned) -> None:
    """Run onnx's checker; to be called where a crash does no harm."""
    try:
        # By name, so that it finds external data; the scan has looked at every link on the way.
        onnx.checker.check_model(
            str(scanned.path.resolve()) if scanned.folder else scanned.proto.SerializeToString()
        )
    except (onnx.checker.ValidationError, ValueError) as err:
        lines = str(err).strip().splitlines() or [type(err).__name__]
        raise InputError(f"refused {scanned.path}", why=f"invalid graph: {lines[0][:300]}") from err


def _serve(request: dict[str, object]) -> dict[str, object]:
    path = Path(str(request["path"]))
    limit = int(str(request["memory_bytes"]))
    size = None if request["size"] is None else int(str(request["size"]))
    try:
        scanned = onnx_scan.scan(path)
        own = len(scanned.data)
        limit += MEMORY_PER_FILE_BYTE * max(own, min(scanned.bytes, scanned.weight_bytes))
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        check_whole(scanned)
        macs = onnx_cost.macs(scanned.proto, size=size)
        params = onnx_cost.params(scanned.proto)
        feed = feed_of(scanned.proto)
        feeds = feed.random(int(str(request["batch_size"])), size=size)
        data, folder = scanned.data, scanned.folder
        del scanned
        before = _reset_peak()
        session = open_session(data, threads=int(str(request["threads"])), folder=folder)
        for _ in range(2):
            session.run(None, feeds)
        peak = _status("VmHWM")
    except DcptoolError as err:
        if _is_memory(err.why):
            return _too_big(path, limit)
        return {"error": err.message, "why": err.why, "try": err.try_, "code": err.code}
    except MemoryError:
        return _too_big(path, limit)
    except Exception as err:  # onnxruntime's classes share no public base
        text = str(err).strip()
        if _is_memory(text):
            return _too_big(path, limit)
        why = text.splitlines()[0][:300] if text else type(err).__name__
        return {"error": f"cannot run {path}", "why": why, "try": "", "code": InputError.code}
    return {"macs": macs, "params": params, "peak_bytes": max(peak - before, 0)}


def _reset_peak() -> int:
    """Start a new high-water mark, and tell what is resident without the model."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    """Bytes that the kernel states for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def _is_memory(text: str) -> bool:
    return any(mark in text for mark in ("bad_alloc", "Failed to allocate", "allocate memory"))


def _too_big(path: Path, limit: int) -> dict[str, object]:
    return {
        "error": f"refused {path}",
        "why": f"loading or running it exceeds the memory limit of {limit / 2**30:.1f} GiB",
        "try": "a smaller --batch-size, or a larger --onnx-memory if you trust the file",
        "code": InputError.code,
    }


def serve() -> None:
    """Answer the one request on stdin."""
    sys.stdout.write(json.dumps(_serve(json.load(sys.stdin))))
