"""The watch over a group: who ended well is not taken for dead, and who died is named."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

import pytest

from etude.errors import RankError
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
