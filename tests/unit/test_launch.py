"""What the command that started several processes answers for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcptool.cli import app, launch
from dcptool.errors import DcptoolError, GateFailed, Interrupted


def leave(folder: Path, *codes: int | None) -> None:
    """The status of every rank, None for one that left none."""
    for rank, code in enumerate(codes):
        if code is not None:
            status = {"code": code, "reason": f"rank {rank}", "why": "w", "printed": False}
            (folder / f"status.{rank}.json").write_text(json.dumps(status))


@pytest.mark.parametrize(
    ("codes", "failed", "wanted"),
    [
        ((0, 0), None, 0),
        ((0, 0), (0, 4), 4),
        ((None, None), None, 0),
        ((None, None), (1, 2), 2),
    ],
)
def test_a_code_is_returned(tmp_path: Path, codes, failed, wanted: int) -> None:
    leave(tmp_path, *codes)
    assert launch._answer(tmp_path, 2, 0, failed) == wanted


@pytest.mark.parametrize(
    ("codes", "stopped", "failed", "code", "words"),
    [
        ((4, 0), 0, (0, 4), 4, "rank 0"),
        ((5, 3), 0, (0, 5), 3, "rank 1"),
        ((143, 3), 0, (1, 3), 3, "rank 1"),
        ((2, None), 0, (0, 2), 2, "rank 0"),
        ((5, None), 0, (0, 5), 5, "process 1 of 2 died"),
        ((0, None), 0, (1, -9), 5, "process 1 of 2 died"),
        ((0, 0), 0, (0, -9), 5, "process 0 of 2 died"),
        ((0, 0), 15, None, 143, "SIGTERM"),
        ((None, 0), 15, None, 143, "SIGTERM"),
    ],
)
def test_a_fault_is_said_again(tmp_path: Path, codes, stopped, failed, code, words) -> None:
    leave(tmp_path, *codes)
    with pytest.raises(DcptoolError, match=words) as seen:
        launch._answer(tmp_path, 2, stopped, failed)
    assert seen.value.code == code
    assert isinstance(seen.value, Interrupted) == (code == 143)


def test_a_rank_leaves_its_word_and_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(app.STATUS_FOLDER, str(tmp_path))
    monkeypatch.setitem(app._printed, "document", False)
    assert app._report(GateFailed("too low", try_="t"), ["evaluate", "--json"]) == 4
    assert capsys.readouterr() == ("", "")
    status = json.loads((tmp_path / "status.0.json").read_text())
    assert (status["code"], status["reason"], status["try"]) == (4, "too low", "t")
    # A word that cannot be left is spoken.
    monkeypatch.setattr(launch, "_write_status", raising)
    assert app._report(GateFailed("too low"), ["evaluate"]) == 4
    assert capsys.readouterr().err == "dcptool: too low\n"


def raising(*_arguments: object, **_options: object) -> None:
    raise OSError


def test_one_rank_prints_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, text in (("0", "a table\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        app.emit("evaluate", {}, "a table", as_json=False)
        assert capsys.readouterr().out == text


def test_the_resuming_command_has_as_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(app.STATUS_FOLDER, raising=False)
    assert launch.resume_command("prune", Path("a b")) == "dcptool prune --resume 'a b'"
    monkeypatch.setenv(app.STATUS_FOLDER, "/tmp/x")
    monkeypatch.setenv("WORLD_SIZE", "3")
    wanted = "dcptool finetune --resume n --nproc-per-node 3"
    assert launch.resume_command("finetune", Path("n")) == wanted
