"""The state of a run on the disk: two generations, whole or not there, free of code.

One generation is one safetensors file; its name carries a counter, which orders them, and a
digest of its bytes, which proves them. What is no tensor travels as JSON in its header. A
state made under another recipe, network or data set is refused by the name of what changed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcptool import console, files
from dcptool.errors import EnvironmentFault, InputError

GENERATIONS = 2
DIGEST_DIGITS = 32
_NAME = re.compile(r"state-(\d{8})-([0-9a-f]{32})\.safetensors")

Tree = Any  # nested dict, list, tuple, scalar, None, Tensor


@dataclass
class Checkpoints:
    """The generations in one folder."""

    folder: Path
    fingerprint: Mapping[str, str]
    every_s: float = 60.0
    _counter: int = 0
    _saved_at: float = field(default_factory=time.monotonic)

    def due(self) -> bool:
        """Whether enough time went by since the last save."""
        return time.monotonic() - self._saved_at >= self.every_s

    def save(self, state: Tree) -> Path:
        """Publish a new generation, then remove those that are older than the last two."""
        # A run whose folder was removed under way must not go on in half of one.
        files.make_folder(self.folder, parents=False)
        found = generations(self.folder)
        self._counter = max([self._counter, *[counter for counter, _, _ in found]]) + 1
        data = encode({"fingerprint": dict(self.fingerprint), "state": state})
        digest = files.sha256(data)[:DIGEST_DIGITS]
        path = self.folder / f"state-{self._counter:08d}-{digest}.safetensors"
        files.publish(path, data)
        for _, _, old in found[GENERATIONS - 1 :]:
            files.remove(old)
        self._saved_at = time.monotonic()
        return path

    def load(self) -> Tree | None:
        """The newest generation that can be read; None when there is none."""
        faults: list[str] = []
        for counter, digest, path in generations(self.folder):
            try:
                document = _read(path, digest)
            except InputError as err:
                faults.append(f"{path.name}: {err.why}")
                continue
            if faults:
                console.warn(f"{faults[0]}; using generation {counter} instead")
            self._refuse_changes(document["fingerprint"], path)
            self._counter = max(self._counter, counter)
            return document["state"]
        if faults:
            raise InputError(
                f"no saved state in {self.folder} can be read",
                why="\n".join(faults),
                try_="start again without --resume",
            )
        return None

    def _refuse_changes(self, saved: Mapping[str, str], path: Path) -> None:
        keys = sorted({*saved, *self.fingerprint})
        changed = [
            f"{key}: {saved.get(key, 'not set')} -> {self.fingerprint.get(key, 'not set')}"
            for key in keys
            if saved.get(key) != self.fingerprint.get(key)
        ]
        if changed:
            raise InputError(
                f"{path} belongs to another run",
                why="\n".join(changed),
                try_="resume with the options it was started with, or start a new run",
            )


def generations(folder: Path) -> list[tuple[int, str, Path]]:
    """Counter, digest and path of each generation, newest first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), match[2], path))
    return sorted(found, reverse=True)


def _read(path: Path, digest: str) -> dict[str, Tree]:
    data = files.read_bytes(path, what="the saved state")
    got = files.sha256(data)[:DIGEST_DIGITS]
    if got != digest:
        raise InputError(f"cannot read {path}", why=f"damaged: sha256 expected {digest}, got {got}")
    document = decode(data, path)
    if not isinstance(document, dict) or {"fingerprint", "state"} - document.keys():
        raise InputError(f"cannot read {path}", why="it holds no state of a run")
    return document


def encode(tree: Tree) -> bytes:
    """A nested structure of scalars and tensors as safetensors bytes."""
    import safetensors.torch

    tensors: dict[str, Tensor] = {}
    text = json.dumps(_flatten(tree, tensors))
    try:
        return bytes(safetensors.torch.save(tensors, {"tree": text}))
    except MemoryError as err:
        raise EnvironmentFault("not enough memory to save the state of the run") from err


def decode(data: bytes, path: Path) -> Tree:
    """The structure that `encode` made; tensors are on the CPU."""
    import safetensors.torch

    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        tree = json.loads(header["__metadata__"]["tree"])
        tensors = safetensors.torch.load(data)
        return _restore(tree, tensors)
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as err:
        raise InputError(f"cannot read {path}", why=f"no state of a run: {err}") from err


def _flatten(tree: Tree, tensors: dict[str, Tensor]) -> Tree:
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        # A copy of its own: safetensors refuses tensors that share memory.
        tensors[name] = tree.detach().to("cpu", copy=True).contiguous()
        return {"t": name}
    if isinstance(tree, Mapping):
        return {"d": [[key, _flatten(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"l": [_flatten(value, tensors) for value in tree]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise TypeError(f"a {type(tree).__name__} cannot be saved")


def _restore(tree: Tree, tensors: Mapping[str, Tensor]) -> Tree:
    if not isinstance(tree, dict):
        return tree
    if "t" in tree:
        return tensors[tree["t"]]
    if "d" in tree:
        return {key: _restore(value, tensors) for key, value in tree["d"]}
    return [_restore(value, tensors) for value in tree["l"]]


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A short digest of named tensors, to tell one set of weights from another."""
    import hashlib

    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        total.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
