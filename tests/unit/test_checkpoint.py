"""Checkpoints: whole or absent, ordered, proven, free of code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dcptool import files
from dcptool.errors import EnvironmentFault, InputError
from dcptool.training.checkpoint import Checkpoints, decode, encode, generations

STATE = {
    "step": 3,
    "none": None,
    "model": {"a.weight": torch.arange(6.0).view(2, 3), "n": torch.tensor(5)},
    "optimizer": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
}


def test_round_trip_keeps_types_and_bits() -> None:
    found = decode(encode(STATE), Path("x"))
    assert found["step"] == 3
    assert found["none"] is None
    assert torch.equal(found["model"]["a.weight"], STATE["model"]["a.weight"])
    assert torch.equal(found["optimizer"]["state"][0]["momentum_buffer"], torch.ones(2))
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1}]


def test_channels_last_and_shared_tensors_are_saved() -> None:
    tensor = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    found = decode(encode({"a": tensor, "b": tensor}), Path("x"))
    assert torch.equal(found["a"], tensor)
    assert torch.equal(found["b"], tensor)


def test_two_generations_by_counter_not_by_time(tmp_path: Path) -> None:
    states = Checkpoints(tmp_path, {})
    for step in range(4):
        path = states.save({"step": step})
        os.utime(path, (1e9 - step, 1e9 - step))
    assert [counter for counter, _, _ in generations(tmp_path)] == [4, 3]
    assert Checkpoints(tmp_path, {}).load() == {"step": 3}
    later = Checkpoints(tmp_path, {})
    later.load()
    later.save({"step": 9})
    assert [counter for counter, _, _ in generations(tmp_path)] == [5, 4]


@pytest.mark.parametrize("place", [0, 9, -1])
def test_a_damaged_newest_generation_gives_way(
    tmp_path: Path, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    states = Checkpoints(tmp_path, {})
    states.save({"step": 1})
    newest = states.save({"step": 2})
    data = bytearray(newest.read_bytes())
    data[place] ^= 1
    newest.write_bytes(data)
    assert states.load() == {"step": 1}
    assert "using generation 1 instead" in capsys.readouterr().err
    oldest = generations(tmp_path)[1][2]
    oldest.write_bytes(b"")
    with pytest.raises(InputError) as caught:
        states.load()
    assert caught.value.why.count("sha256") == 2
    assert newest.exists()


def test_a_changed_recipe_is_refused_by_name(tmp_path: Path) -> None:
    Checkpoints(tmp_path, {"lr": "0.1", "data": "a"}).save({"step": 1})
    with pytest.raises(InputError) as caught:
        Checkpoints(tmp_path, {"lr": "0.2", "data": "a", "seed": "1"}).load()
    assert caught.value.why.splitlines() == ["lr: 0.1 -> 0.2", "seed: not set -> 1"]


def test_nothing_saved_is_nothing_found(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "absent", {}).load() is None
    (tmp_path / ".dcptool-abc.tmp").write_bytes(b"half")
    assert Checkpoints(tmp_path, {}).load() is None


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(InputError):
        decode(b"\x80\x04garbage", Path("x"))
    with pytest.raises(TypeError):
        encode({"code": print})


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_failed_save_keeps_the_old_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    states = Checkpoints(tmp_path, {})
    states.save({"step": 1})
    states.save({"step": 2})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        with pytest.raises(EnvironmentFault):
            states.save({"step": 3})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert states.load() == {"step": 2}


def test_a_vanished_run_is_not_made_again(tmp_path: Path) -> None:
    states = Checkpoints(tmp_path / "run" / "states", {})
    (tmp_path / "run").mkdir()
    states.save({"step": 1})
    (tmp_path / "run").rename(tmp_path / "gone")
    with pytest.raises(EnvironmentFault, match="cannot write") as caught:
        states.save({"step": 2})
    assert "was the folder removed?" in caught.value.try_
    assert not (tmp_path / "run").exists()
