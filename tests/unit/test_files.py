"""Publication is old or new, never a mix, whatever call fails; readers refuse what is odd."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from dcptool import files
from dcptool.errors import DcptoolError, EnvironmentFault, InputError, UsageError
from dcptool.pipeline import rundir

OLD, NEW = b"old" * 1000, b"new" * 2000
CALLS = ("open", "write", "fstat", "close", "fsync", "fchmod", "rename", "unlink", "symlink")


class Shim:
    """The `os` of files.py with a counter: records every call and fails some of them."""

    def __init__(self, fails: Callable[[int, str], int] = lambda k, name: 0) -> None:
        self.fails = fails
        self.log: list[str] = []
        self.failed = ""

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: object, **kwargs: object) -> object:
            self.log.append(name)
            number = self.fails(len(self.log), name)
            if number:
                self.failed = name
                if name == "close":
                    real(*args, **kwargs)  # the descriptor is gone even when close fails
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        return call


def temps(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".dcptool-")]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EXDEV])
@pytest.mark.parametrize("sticky", [False, True])
def test_failing_the_kth_call_leaves_old_or_new(tmp_path, monkeypatch, number, sticky):
    path = tmp_path / "file"
    for k in range(1, 50):
        path.write_bytes(OLD)
        # A sticky fault still lets us clean up: that is what unlink is for.
        shim = Shim(
            lambda i, name, k=k: (
                number if (i == k or (sticky and i > k and name not in ("unlink", "close"))) else 0
            )
        )
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", shim)
            fault = None
            try:
                files.publish(path, NEW)
            except DcptoolError as err:
                fault = err
        assert path.read_bytes() in (OLD, NEW)
        if fault is None:
            assert path.read_bytes() == NEW
        else:
            assert fault.code == 5
            assert str(path) in fault.message
            assert fault.why
            assert fault.try_
        if shim.failed != "unlink":
            assert not temps(tmp_path)
        for name in temps(tmp_path):
            (tmp_path / name).unlink()
        if not shim.failed:
            assert k > 8
            return
    pytest.fail("the clean path was never reached")


def test_dying_at_the_kth_call_leaves_old_or_new_and_the_next_run_cleans_up(tmp_path):
    script = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        from dcptool import files

        folder = Path(sys.argv[1])
        path = folder / "file"
        names = ("open", "write", "fstat", "close", "fsync", "rename", "unlink")
        left = 0
        for k in range(1, 60):
            path.write_bytes(b"old")
            child = os.fork()
            if child == 0:
                calls = [0]

                class Dying:
                    def __getattr__(self, name):
                        real = getattr(os, name)
                        if name not in names:
                            return real

                        def call(*args, **kwargs):
                            calls[0] += 1
                            if calls[0] == k:
                                os._exit(137)
                            return real(*args, **kwargs)

                        return call

                files.os = Dying()
                files.publish(path, b"new")
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            content = path.read_bytes()
            assert content in (b"old", b"new"), content
            left += len(list(folder.glob(".dcptool-*")))
            files.make_folder(folder)
            assert not list(folder.glob(".dcptool-*")), k
            if code == 0:
                assert content == b"new"
                assert k > 8 and left, (k, left)
                print("clean at", k)
                break
            assert code == 137
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "clean at" in done.stdout


def test_order_of_flushes(tmp_path, monkeypatch):
    shim = Shim()
    monkeypatch.setattr(files, "os", shim)
    files.publish(tmp_path / "file", NEW)
    order = [name for name in shim.log if name in ("write", "fsync", "rename")]
    assert order == ["write", "fsync", "rename", "fsync"]


def test_short_writes(tmp_path, monkeypatch):
    shim = Shim()
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[: len(data) // 2 + 1]))
    monkeypatch.setattr(files, "os", shim)
    files.publish(tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW
    assert shim.log.count("write") > 2


def test_folder_that_cannot_be_flushed_warns_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "_warned", set())
    for _ in range(2):
        flushes = []

        def fails(_k: int, name: str, flushes: list[str] = flushes) -> int:
            flushes += [name] if name == "fsync" else []
            return errno.EINVAL if name == "fsync" and len(flushes) == 2 else 0

        with monkeypatch.context() as patch:
            patch.setattr(files, "os", Shim(fails))
            files.publish(tmp_path / "file", NEW)
    assert capsys.readouterr().err.count("cannot be flushed") == 1
    assert (tmp_path / "file").read_bytes() == NEW


def test_full_disk_tells_what_is_free_and_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "os", Shim(lambda k, n: errno.ENOSPC if n == "write" else 0))
    with pytest.raises(EnvironmentFault) as caught:
        files.publish(tmp_path / "file", NEW)
    assert "bytes are free" in caught.value.why
    assert "6,000 are needed" in caught.value.why


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("library", [False, True])
def test_mode_is_as_the_umask_says(tmp_path, mask, library):
    def like_safetensors(temp: Path) -> None:
        other = temp.with_suffix(".other")
        other.write_bytes(NEW)
        other.chmod(0o600)
        other.rename(temp)

    before = os.umask(mask)
    try:
        if library:
            files.publish_with(tmp_path / "file", like_safetensors)
        else:
            files.publish(tmp_path / "file", NEW)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_link_as_output_is_refused(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(OLD)
    (tmp_path / "file").symlink_to(victim)
    with pytest.raises(EnvironmentFault, match="symbolic link"):
        files.publish(tmp_path / "file", NEW)
    assert victim.read_bytes() == OLD


def test_link_swapped_in_before_the_rename_is_refused(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(OLD)

    def swap(temp: Path) -> None:
        temp.write_bytes(NEW)
        (tmp_path / "file").symlink_to(victim)

    with pytest.raises(EnvironmentFault, match="symbolic link"):
        files.publish_with(tmp_path / "file", swap)
    assert victim.read_bytes() == OLD
    assert not temps(tmp_path)


def test_link_swapped_in_at_the_rename_is_replaced_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(OLD)
    real = os.rename

    def swapped(source: Path, target: Path) -> None:
        Path(target).symlink_to(victim)
        real(source, target)

    monkeypatch.setattr(os, "rename", swapped)
    files.publish(tmp_path / "file", NEW)
    assert victim.read_bytes() == OLD
    assert (tmp_path / "file").read_bytes() == NEW


def test_temporary_name_cannot_be_hijacked(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(OLD)
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 12)
    files._temp_beside(tmp_path / "file").symlink_to(victim)
    with pytest.raises(EnvironmentFault):
        files.publish_with(tmp_path / "file", lambda temp: temp.write_bytes(NEW))
    assert victim.read_bytes() == OLD


def test_vanished_folder(tmp_path):
    with pytest.raises(EnvironmentFault, match="cannot write") as caught:
        files.publish(tmp_path / "gone" / "file", NEW)
    assert "mkdir -p" in caught.value.try_


def test_folder_in_the_way(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(EnvironmentFault) as caught:
        files.publish(tmp_path / "file", NEW)
    assert "folder has this name" in caught.value.try_
    assert not temps(tmp_path)


def test_a_signal_while_writing_leaves_nothing(tmp_path):
    def interrupted(temp: Path) -> None:
        temp.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.publish_with(tmp_path / "file", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_only_own_stale_temps_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    node, token = files._NODE, "0123456789ab"
    stale = tmp_path / f".dcptool-{node}-{dead.pid}-{token}.tmp"
    kept = [
        f".dcptool-{node}-{os.getpid()}-{token}.tmp",  # of a process that lives
        f".dcptool-00000000-{dead.pid}-{token}.tmp",  # of another machine
        f".dcptool-{node}-{dead.pid}-{token}.tmp.keep",
        ".dcptool-notes.tmp",
        "model.tmp",
    ]
    for name in [stale.name, *kept]:
        (tmp_path / name).write_bytes(OLD)
    folder = tmp_path / f".dcptool-{node}-{dead.pid}-ffffffffffff.tmp"
    folder.mkdir()
    files.make_folder(tmp_path)
    assert not stale.exists()
    assert folder.is_dir()
    assert all((tmp_path / name).read_bytes() == OLD for name in kept)


def test_a_new_run_cleans_up_after_one_that_left_no_whole_file(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    first = rundir.new_run(tmp_path, "net")
    stale = first / f".dcptool-{files._NODE}-{dead.pid}-0123456789ab.tmp"
    stale.write_bytes(OLD)
    (first / "notes.txt").write_bytes(OLD)
    assert rundir.new_run(tmp_path, "net").name == "net-002"
    assert [path.name for path in first.iterdir()] == ["notes.txt"]


def test_without_rights_the_folder_to_look_at_is_one_that_exists(tmp_path):
    fault = files.storage_fault(PermissionError(errno.EACCES, "x"), tmp_path / "a" / "b" / "file")
    assert fault.try_ == f"check the rights: ls -ld {tmp_path}"


def test_make_folder_proves_that_it_can_be_written(tmp_path, monkeypatch):
    files.make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot write"):
        files.make_folder(tmp_path / "file" / "b")
    monkeypatch.setattr(files, "os", Shim(lambda k, n: errno.EROFS if n == "open" else 0))
    with pytest.raises(EnvironmentFault) as caught:
        files.make_folder(tmp_path / "a")
    assert "writable folder" in caught.value.try_


def test_point_link(tmp_path):
    files.point_link(tmp_path / "latest", "one")
    files.point_link(tmp_path / "latest", "two")
    assert (tmp_path / "latest").readlink() == Path("two")
    (tmp_path / "plain").write_text("")
    with pytest.raises(EnvironmentFault, match="not a link"):
        files.point_link(tmp_path / "plain", "one")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "plain"]


def test_reading_refuses_odd_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (
        (tmp_path / "pipe", "a pipe"),
        (tmp_path, "a folder"),
        (Path("/dev/zero"), "a device"),
        (tmp_path / "none", "No such file"),
        (Path("a\0b"), "null"),
    ):
        with pytest.raises(InputError, match="cannot read thing") as caught:
            files.read_bytes(path, what="thing")
        assert kind in caught.value.why
        assert caught.value.try_


def test_reading_has_a_limit_even_where_no_size_is_told(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(InputError, match="cannot read"):
        files.read_bytes(tmp_path / "file", what="thing", limit=10)
    assert files.read_bytes(tmp_path / "file", what="thing", limit=11) == b"x" * 11
    with pytest.raises(InputError, match="cannot read"):
        files.read_bytes(Path("/proc/self/status"), what="thing", limit=10)  # says 0 bytes


def test_a_bad_disk_is_no_bad_input(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(files, "os", Shim(lambda k, n: errno.EIO if n == "fstat" else 0))
    with pytest.raises(EnvironmentFault):
        files.read_bytes(tmp_path / "file", what="thing")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":\n oops}', "line 2"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_json_is_strict(tmp_path, text, why):
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(InputError) as caught:
        files.read_json(tmp_path / "file", what="thing")
    assert why in caught.value.why


def test_nothing_is_overwritten_unasked(tmp_path):
    path = tmp_path / "file"
    files.require_new(path, force=False)
    path.write_bytes(OLD)
    with pytest.raises(UsageError) as caught:
        files.require_new(path, force=False)
    assert "--force" in caught.value.try_
    files.require_new(path, force=True)
    files.require_new(tmp_path / "empty", force=False)


HOLD = """
import sys, time
from pathlib import Path
from dcptool import files
with files.lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_writer_and_takeover_after_a_kill(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(EnvironmentFault, match="in use") as caught, files.lock_folder(tmp_path):
            pass
        assert f"process {holder.pid}" in caught.value.why
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with files.lock_folder(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_locking_twice_in_one_process_does_not_drop_the_lock(tmp_path):
    with files.lock_folder(tmp_path):
        with pytest.raises(EnvironmentFault, match="in use"), files.lock_folder(tmp_path):
            pass
        done = subprocess.run(
            [sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert "in use" in done.stderr
    with files.lock_folder(tmp_path):
        pass


def test_a_run_takes_of_a_name_what_a_folder_can_have(tmp_path):
    assert rundir.new_run(tmp_path, "art 2-finetune").name == "art-2-finetune-001"
    assert rundir.new_run(tmp_path, "..").name == "run-001"
