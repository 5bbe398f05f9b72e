"""The watch over a group: who ended well is not taken for dead, and who died is named."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from etude.errors import RankError
from etude.loop import board
from etude.loop import watchdog as module
from etude.loop.distributed import Group
from etude.loop.watchdog import Pulse, Watchdog, _is_alive
from tests.processes import kill, reap, run_ranks, spawn


def ranks(of_rank: list[Callable[[Watchdog], None]]) -> list[int]:
    """Run one function a rank, each under a watchdog of its own."""

    def work() -> None:
        group = Group.join("cpu")
        with Watchdog(group.rank, group.world, Pulse(), None) as watchdog:
            group.barrier()
            of_rank[group.rank](watchdog)

    return run_ranks(work, len(of_rank))


def nothing(watchdog: Watchdog) -> None:
    """End at once."""


def keep_an_old_report(watchdog: Watchdog) -> None:
    """Read what rank 1 said while it lived, and judge it when it lives no more."""
    watchdog._done.set()  # this thread alone looks
    reports = watchdog._read()
    assert reports[1]["phase"] == "setup"
    deadline = time.monotonic() + 30
    while _is_alive(reports[1]["pid"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    fault = watchdog._find_dead(reports, {}, 0.0)
    raise SystemExit(0 if fault is None else 42)


def linger(watchdog: Watchdog) -> None:
    """Be slow, long enough for the watch to look several times."""
    time.sleep(2.0)


def end_after_a_moment(watchdog: Watchdog) -> None:
    """Let the other read a report first."""
    time.sleep(0.5)


def die(watchdog: Watchdog) -> None:
    """Die without a word, after a moment."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_ended_well_after_its_report_was_read_is_not_taken_for_dead() -> None:
    assert ranks([keep_an_old_report, end_after_a_moment]) == [0, 0]


def test_a_rank_that_died_after_its_report_was_read_is_dead() -> None:
    assert ranks([keep_an_old_report, die]) == [42, -signal.SIGKILL]


@pytest.mark.parametrize("order", [[nothing, linger], [linger, nothing]], ids=["rank 0 first", "rank 1 first"])
def test_ranks_may_end_at_different_times(order: list[Callable[[Watchdog], None]]) -> None:
    assert ranks(order) == [0, 0]


def test_a_second_run_of_the_same_processes_does_not_read_the_first() -> None:
    def work() -> None:
        group = Group.join("cpu")
        for _ in range(3):
            with Watchdog(group.rank, group.world, Pulse(), None) as watchdog:
                group.barrier()
                assert [report["phase"] for report in watchdog._read().values()] == ["setup", "setup"]
                group.barrier()

    began = time.monotonic()
    assert run_ranks(work, 2) == [0, 0]
    assert time.monotonic() - began < 20, "no rank waited in vain for another to say goodbye"


def hold_the_interpreter(seconds: float) -> Callable[[Watchdog], None]:
    """Return work that is busy inside C, where no other thread of the process can run."""

    def work(watchdog: Watchdog) -> None:
        watchdog.pulse.enter("loss")
        time.sleep(0.2)
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    return work


@pytest.mark.parametrize("busy_rank", [0, 1])
def test_a_rank_that_is_busy_inside_c_is_not_dead(busy_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEAD_AFTER_S", 0.4)
    monkeypatch.setattr(module, "INTERVAL_S", 0.05)
    work = [linger, linger]
    work[busy_rank] = hold_the_interpreter(1.5)
    assert ranks(work) == [0, 0]


def test_a_rank_that_is_busy_inside_c_beyond_the_limit_hangs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.05)

    def work() -> None:
        group = Group.join("cpu")
        with Watchdog(group.rank, group.world, Pulse(longest_step_s=0.1), 0.5) as watchdog:
            group.barrier()
            watchdog.pulse.enter("sync")
            if group.rank == 1:
                hold_the_interpreter(100)(watchdog)
            time.sleep(100)

    waiting, busy = spawn(work, 2)
    assert reap([waiting]) == [RankError.exit_code]
    kill([busy])  # it cannot end itself before it is back
    assert reap([busy]) == [-signal.SIGKILL]
    assert "rank 1 hangs in phase 'loss'" in capfd.readouterr().err


def test_a_process_that_got_the_id_of_a_dead_one_is_another() -> None:
    started = module._started(os.getpid())
    assert started is not None
    assert _is_alive(os.getpid(), started)
    assert not _is_alive(os.getpid(), str(int(started) - 1))


class Counted:
    """A store that counts the messages of the rank that uses it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: list[str] = []
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.calls.append(name)
            found = call(*args)
            answers = found if isinstance(found, list) else [found]
            self.nbytes += sum(len(part) for part in [*args, *answers] if isinstance(part, str | bytes))
            return found

        return counted


def count_messages(out: Path, beats: int = 6) -> None:
    """Watch until a rank has spoken often enough, and write down how many messages each time took."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, rank == 0)  # type: ignore[attr-defined]
    watchdog = Watchdog(rank, world, Pulse(), None)
    with watchdog:
        store = watchdog._board._store = Counted(watchdog._board._store)
        deadline = time.monotonic() + 60
        while store.calls.count("set") <= beats and time.monotonic() < deadline:
            time.sleep(0.01)
        calls = list(store.calls)
        server.add("counted", 1)
        while server.add("counted", 0) < world and time.monotonic() < deadline:
            time.sleep(0.05)
    whole = calls[calls.index("set") : len(calls) - 1 - calls[::-1].index("set")]  # from one beat to another
    (out / f"{rank}.json").write_text(json.dumps([len(whole), whole.count("set")]))


def messages_per_beat(folder: Path, world: int) -> list[float]:
    folder.mkdir()
    assert run_ranks(partial(count_messages, folder), world) == [0] * world
    counts = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert len(counts) == world
    return [calls / beats for calls, beats in counts]


@pytest.mark.parametrize(
    "ranks", [pytest.param((3, 8), marks=pytest.mark.slow), pytest.param((8, 32), marks=pytest.mark.nightly)]
)
def test_messages_of_a_rank_do_not_grow_with_ranks(
    ranks: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.1)
    few, many = (messages_per_beat(tmp_path / str(number), number) for number in ranks)
    assert min(few) == max(few) == min(many) == max(many) == 2, "a report, and an answer"


def on_hosts(names: str, work: Callable[[Watchdog, int], None], limit_s: float | None = None) -> list[int]:
    """Run ranks that believe to be on different hosts: one letter of the names is one rank's."""

    def start() -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        socket.gethostname = lambda: names[rank]
        group = Group.join("cpu")
        with Watchdog(rank, world, Pulse(longest_step_s=0.1), limit_s) as watchdog:
            group.barrier()
            work(watchdog, rank)

    return run_ranks(start, len(names))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.05)
    monkeypatch.setattr(board, "FAN_OUT", 1)  # hosts in a line: the longest way that a word can take


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(6))
def test_a_death_on_any_host_is_told_to_all(victim: int, impatient: None, capfd: pytest.CaptureFixture[str]) -> None:
    def work(watchdog: Watchdog, rank: int) -> None:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    codes = on_hosts("aabbcc", work)
    # Rank 0 holds the store: with it goes the way to tell.
    assert codes == [-signal.SIGKILL if rank == victim else RankError.exit_code for rank in range(6)]
    err = capfd.readouterr().err
    assert err.count(f"rank {victim} died in phase") == 5 or (victim == 0 and err.count("rank 0 ") == 5)


@pytest.mark.slow
def test_a_lost_host_is_told_to_all(
    impatient: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "DEAD_AFTER_S", 3.0)

    def work(watchdog: Watchdog, rank: int) -> None:
        if rank in (2, 3):  # of a host that is gone, nobody hears anything, nor sees its processes
            watchdog._done.set()
            watchdog._thread.join()
        time.sleep(8 if rank in (2, 3) else 60)
        os._exit(0)

    assert on_hosts("aabbcc", work) == [6, 6, 0, 0, 6, 6]
    err = capfd.readouterr().err
    assert "rank 2 died in phase" in err or "rank 3 died in phase" in err


@pytest.mark.slow
def test_collectives_that_do_not_match_are_found_across_hosts(
    impatient: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(watchdog: Watchdog, rank: int) -> None:
        watchdog.pulse.enter("sync")
        watchdog.pulse.step = 7
        time.sleep(60)

    assert on_hosts("abcab", work, limit_s=1.0) == [RankError.exit_code] * 5
    err = capfd.readouterr().err
    assert "all ranks hang in phase 'sync'" in err and "rank 3 at step 7" in err


@pytest.mark.slow
def test_ranks_that_wait_are_not_blamed_for_the_one_that_hangs(
    impatient: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(watchdog: Watchdog, rank: int) -> None:
        watchdog.pulse.enter("data" if rank == 3 else "sync")
        time.sleep(60)

    assert on_hosts("aabb", work, limit_s=1.0) == [RankError.exit_code] * 4
    err = capfd.readouterr().err
    assert "rank 3 hangs in phase 'data'" in err
    assert not any(f"rank {rank} hangs" in err for rank in (0, 1, 2))
