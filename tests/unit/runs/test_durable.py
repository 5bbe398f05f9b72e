from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.runs import durable


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    return child.pid


def test_atomic_writing_replaces_the_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    for content in (b"one", b"two"):
        durable.write_atomically(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_failed_atomic_write_leaves_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(OSError, match="directory"):
        durable.write_atomically(tmp_path / "taken", b"new")
    assert os.listdir(tmp_path) == ["taken"]


@pytest.mark.parametrize("place", ["/proc/x.html", "/proc/x/y.html", "file/x.html", "taken", "/dev/full"])
def test_an_output_that_cannot_be_written_is_named_as_it_was_given(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("file").touch()
    with pytest.raises(ConfigError, match=rf"^cannot use {place}: [^\n]+; make it writable, or name another place$"):
        durable.write_output(Path(place), "page")
    if place != "/dev/full":  # which takes files, but no byte
        with pytest.raises(ConfigError, match=rf"^cannot use {place}: "):
            durable.require_place(Path(place))
    assert sorted(os.listdir()) == ["file", "taken"]


def test_an_output_makes_its_folders_and_writes_to_a_pipe_instead_of_replacing_it(tmp_path: Path) -> None:
    durable.require_place(tmp_path / "new/page.html")
    assert os.listdir(tmp_path / "new") == []
    assert durable.write_output(tmp_path / "newer/page.html", "pagé").read_text() == "pagé"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        durable.write_output(pipe, b"page")
        assert os.read(reader, 100) == b"page"
    finally:
        os.close(reader)


def test_hashes_do_not_depend_on_how_the_content_is_cut(tmp_path: Path) -> None:
    content = os.urandom(durable.CHUNK_BYTES + 12345)
    whole = durable.write_hashed(tmp_path / "a", [content])
    parts = durable.write_hashed(tmp_path / "b", [content[:7], memoryview(content)[7:], b""])
    assert whole == parts == durable.hash_file(tmp_path / "a") == durable.hash_file(tmp_path / "b")
    assert whole.size_bytes == len(content)


def test_links_are_swapped_in_one_step(tmp_path: Path) -> None:
    link = tmp_path / "last"
    for target in ("step-1", "step-2", "step-2"):
        (tmp_path / target).mkdir(exist_ok=True)
        durable.swap_symlink(link, target)
        assert os.readlink(link) == target
    assert sorted(os.listdir(tmp_path)) == ["last", "step-1", "step-2"]


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_kept(tmp_path: Path) -> None:
    dead = dead_pid()
    gone = [f".tmp-10-{dead}", f".tmp-10-{dead}@{durable._HOST}", durable.temp_name("x")]
    kept = [f".tmp-10-{os.getppid()}", f".tmp-10-{dead}@another-host", "step-00000010", ".tmp-what"]
    for name in gone + kept:
        (tmp_path / name).mkdir()
    with durable.in_use(tmp_path / durable.temp_name("busy")) as busy:
        busy.mkdir()
        durable.remove_leftovers(tmp_path)
        assert sorted(os.listdir(tmp_path)) == sorted([*kept, busy.name])


def test_leftovers_of_another_host_go_when_they_are_a_day_old(tmp_path: Path) -> None:
    old = tmp_path / ".tmp-10-77@another-host"
    old.mkdir()
    os.utime(old, times=(time.time() - 90_000,) * 2)
    durable.remove_leftovers(tmp_path)
    assert not old.exists()


def test_a_missing_directory_has_no_leftovers(tmp_path: Path) -> None:
    durable.remove_leftovers(tmp_path / "absent")


def test_processes_are_known_dead_or_alive() -> None:
    assert durable.process_alive(os.getpid())
    assert durable.process_alive(1)
    assert not durable.process_alive(dead_pid())
