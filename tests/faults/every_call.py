"""Run before a command: at every call that touches its files, forks fail there or die there.

The command itself goes on as if nothing had been, so one run of it tries every fault there is.
Before each call the folder is remembered by links and bytes; after each fork it is put back,
with the same inodes, as the command has files open. What a fork left behind is kept in
`FAULT_LOG/NUMBER-KIND`, what it said in `.err` beside it, its exit code in `log.jsonl`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = os.environ["FAULT_FOLDER"]
LOG = Path(os.environ["FAULT_LOG"])
# die: ends there, as by SIGKILL. A number: this error, once; with + it stays.
KINDS = os.environ["FAULT_KINDS"].split()
SKIP = os.environ.get("FAULT_SKIP") or "\0"
CALLS = ("open", "write", "fsync", "rename", "symlink", "unlink", "mkdir", "fchmod", "pwrite")
# What a broken disk still lets us do: clean up.
ALWAYS = ("unlink", "close", "rmdir")

real = {name: getattr(os, name) for name in (*CALLS, "link", "fork", "waitpid", "close", "rmdir")}
# A process that ends after one of these leaves what it would have left before it.
SAME = ("fsync", "fchmod")
state: dict[str, Any] = {"number": 0, "fork": "", "off": False, "last": ""}
# Instead of all this: end at one call, in the command itself.
DIE_AT = int(os.environ.get("FAULT_DIE_AT", "0"))


def concerns(arguments: tuple[Any, ...]) -> str:
    """The path below the folder that a call is about, or nothing."""
    for one in arguments[:2]:
        if isinstance(one, int):
            try:
                place = os.readlink(f"/proc/self/fd/{one}")
            except OSError:
                continue
        else:
            place = os.path.abspath(os.fsdecode(one)) if isinstance(one, (str, os.PathLike)) else ""
        if place == FOLDER or place.startswith(FOLDER + "/"):
            return place
    return ""


def remember() -> dict[str, Any]:
    found: dict[str, Any] = {}
    shutil.rmtree(LOG / "links", ignore_errors=True)
    (LOG / "links").mkdir()
    for number, (folder, folders, names) in enumerate(os.walk(FOLDER)):
        found[folder] = None
        for name in [*names, *(one for one in folders if os.path.islink(f"{folder}/{one}"))]:
            path = f"{folder}/{name}"
            if os.path.islink(path):
                found[path] = os.readlink(path)
            else:
                link = str(LOG / "links" / f"{number}-{len(found)}")
                os.link(path, link)
                found[path] = (link, Path(path).read_bytes())
    return found


def put_back(found: dict[str, Any]) -> None:
    for folder, folders, names in os.walk(FOLDER, topdown=False):
        for name in [*names, *folders]:
            path = f"{folder}/{name}"
            if path not in found:
                os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(
                    path
                )
    for path, what in found.items():
        if what is None:
            os.makedirs(path, exist_ok=True)
        elif isinstance(what, str):
            if not os.path.islink(path) or os.readlink(path) != what:
                if os.path.lexists(path):
                    os.unlink(path)
                os.symlink(what, path)
        else:
            link, data = what
            if not os.path.exists(path) or not os.path.samefile(path, link):
                if os.path.lexists(path):
                    os.unlink(path)
                os.link(link, path)
            if Path(path).read_bytes() != data:
                with Path(path).open("r+b") as stream:
                    stream.truncate(0)
                    stream.write(data)


def quietly(work: Callable[[], Any]) -> Any:
    """Do something of our own without counting its calls."""
    state["off"] = True
    try:
        return work()
    finally:
        state["off"] = False


def fork(kind: str, name: str, path: str) -> bool:
    """Whether this is the fork in which the call fails."""
    place = LOG / f"{state['number']}-{kind}"
    pid = real["fork"]()
    if pid == 0:
        if kind == "die":
            os._exit(137)
        for number, suffix in ((1, ".out"), (2, ".err")):
            handle = real["open"](f"{place}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(handle, number)
        state["fork"] = kind
        return True
    _, status = real["waitpid"](pid, 0)

    def note() -> None:
        shutil.copytree(FOLDER, place, symlinks=True)
        line = {
            "number": state["number"],
            "kind": kind,
            "call": name,
            "path": path,
            "code": os.waitstatus_to_exitcode(status),
        }
        with (LOG / "log.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    quietly(note)
    return False


def wrap(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        path = "" if state["off"] else concerns(arguments)
        reads = (
            name == "open" and len(arguments) > 1 and not arguments[1] & (os.O_WRONLY | os.O_RDWR)
        )
        if not path or reads or (SKIP in path and not state["fork"]):
            return real[name](*arguments, **options)
        if state["fork"]:
            if state["fork"].endswith("+") and name not in ALWAYS:
                number = int(state["fork"][:-1])
                raise OSError(number, os.strerror(number), path)
            return real[name](*arguments, **options)
        state["number"] += 1
        if DIE_AT:
            if state["number"] == DIE_AT:
                os._exit(137)
            return real[name](*arguments, **options)
        sys.stdout.flush()
        sys.stderr.flush()
        found = quietly(remember)
        for kind in KINDS:
            if kind == "die" and state["last"] in SAME:
                continue
            if fork(kind, name, path):
                number = int(kind.rstrip("+"))
                raise OSError(number, os.strerror(number), path)
            quietly(lambda: put_back(found))
        state["last"] = name
        return real[name](*arguments, **options)

    return call


for _name in CALLS:
    setattr(os, _name, wrap(_name))
