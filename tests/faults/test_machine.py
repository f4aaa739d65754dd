"""Publish, crash, damage and resume in any order: what is read is what was last promised."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dcptool import files
from dcptool.errors import DcptoolError, InputError
from dcptool.training.checkpoint import Checkpoints, _read, generations

CALLS = ("open", "write", "fsync", "rename", "unlink", "close", "fstat")


class Crash(BaseException):
    """The end of the process: nothing is caught, nothing is cleaned up."""


class Faulty:
    """The `os` of files.py, which fails or ends at one call."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number, self.count, self.dead = at, number, 0, False

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: object, **options: object) -> object:
            if self.dead:
                raise Crash  # a process that has ended calls nothing more
            self.count += 1
            if self.count == self.at:
                if name == "close":
                    real(*arguments, **options)
                if self.number == 0:
                    self.dead = True
                    raise Crash
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **options)

        return call


class Machine(RuleBasedStateMachine):
    """A run that saves its states and publishes one file, on a bad day."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.states = Checkpoints(self.folder / "states", {"a": "1"})
        self.step = 0
        # What may be read: the last that was promised, and one whose save did not end well.
        self.saved: set[int | None] = set()
        self.promised = False
        self.published: set[bytes] = {b""}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def _within(self, at: int, number: int, work: object) -> bool:
        files.os = Faulty(at, number)  # type: ignore[assignment, attr-defined]
        try:
            work()  # type: ignore[operator]
        except (DcptoolError, Crash):
            return False
        finally:
            files.os = os  # type: ignore[attr-defined]
        return True

    @rule(at=st.integers(0, 40), number=st.sampled_from((0, 5, 28)))
    def save(self, at: int, number: int) -> None:
        self.step += 1
        state = {"step": self.step, "x": torch.full((3,), float(self.step))}
        done = self._within(at, number, lambda: self.states.save(state))
        self.saved = {self.step} if done else self.saved | {self.step}
        self.promised |= done

    @rule(at=st.integers(0, 20), number=st.sampled_from((0, 5, 28)))
    def publish(self, at: int, number: int) -> None:
        self.step += 1
        data = b"%d" % self.step
        done = self._within(at, number, lambda: files.publish(self.folder / "file", data))
        self.published = {data} if done else self.published | {data}

    @rule()
    def restart(self) -> None:
        self.states = Checkpoints(self.folder / "states", {"a": "1"})
        files.make_folder(self.folder)

    @rule(place=st.integers(0, 1 << 20))
    def damage_the_newest(self, place: int) -> None:
        whole = [_step_of(path, digest) for _, digest, path in self._generations()]
        if len(whole) < 2 or None in whole:
            return  # one bad generation is what the other is for
        path = self._generations()[0][2]
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= 1
        path.write_bytes(data)
        self.saved = {whole[1]}

    def _generations(self) -> list[tuple[int, str, Path]]:
        return generations(self.folder / "states")

    @invariant()
    def what_is_read_was_promised(self) -> None:
        found = Checkpoints(self.folder / "states", {"a": "1"}).load()
        if found is None:
            assert not self.promised
        else:
            assert found["step"] in self.saved
            assert found["x"].tolist() == [float(found["step"])] * 3
        path = self.folder / "file"
        assert (path.read_bytes() if path.exists() else b"") in self.published


def _step_of(path: Path, digest: str) -> int | None:
    try:
        return int(_read(path, digest)["state"]["step"])
    except InputError:
        return None


Machine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=15, deadline=None, derandomize=True, database=None
)
TestMachine = Machine.TestCase
