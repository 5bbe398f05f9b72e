"""One training at a time in a directory: others are refused by name; a death, however it comes, lets the next in."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.errors import DirectoryInUseError
from etude.runs import lock as module
from etude.runs.lock import LOCK_NAME, DirectoryLock
from tests.processes import kill, reap, spawn, wait_for


def hold(directory: Path, then: Callable[[], object] = lambda: time.sleep(60)) -> None:
    with DirectoryLock(directory):
        (directory / "held").touch()
        then()


def test_a_second_holder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(DirectoryInUseError) as refused:
        DirectoryLock(tmp_path).acquire()
    assert f"process {os.getpid()} on {socket.gethostname()}" in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    with DirectoryLock(tmp_path):  # and it is free again
        pass
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_come_and_go_one_at_a_time_is_inside(tmp_path: Path) -> None:
    def come_and_go() -> None:
        for _ in range(200):
            try:
                with DirectoryLock(tmp_path):
                    descriptor = os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL)  # fails for a second one
                    os.close(descriptor)
                    os.unlink(tmp_path / "inside")
            except DirectoryInUseError:
                continue

    assert reap([pid for _ in range(4) for pid in spawn(come_and_go)]) == [0] * 4


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    (pid,) = spawn(lambda: hold(tmp_path))
    wait_for(tmp_path / "held")
    with pytest.raises(DirectoryInUseError, match=f"process {pid} "):
        DirectoryLock(tmp_path).acquire()
    kill([pid])
    reap([pid])
    DirectoryLock(tmp_path).__enter__().release()


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    def leave_an_orphan() -> None:
        if os.fork() == 0:
            (tmp_path / "orphan").write_text(str(os.getpid()))
            (tmp_path / "born").touch()
            time.sleep(60)
            os._exit(0)
        wait_for(tmp_path / "born")
        os.kill(os.getpid(), signal.SIGKILL)

    assert reap(spawn(lambda: hold(tmp_path, leave_an_orphan))) == [-signal.SIGKILL]
    try:
        DirectoryLock(tmp_path).__enter__().release()
    finally:
        kill([int((tmp_path / "orphan").read_text())])


@pytest.mark.parametrize("content", [b"", b"null", b"\xff\x00", b'{"pid": "x"}'])
def test_an_odd_note_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    with DirectoryLock(tmp_path):
        (tmp_path / LOCK_NAME).write_bytes(content)
        with pytest.raises(DirectoryInUseError, match="another training is writing"):
            DirectoryLock(tmp_path).acquire()


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", unsupported)
    warnings: list[str] = []
    with DirectoryLock(tmp_path, warnings.append), DirectoryLock(tmp_path, warnings.append):
        pass
    assert "cannot be locked (No locks available)" in warnings[0]
