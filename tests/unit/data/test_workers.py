"""Worker processes: death, signals, leftovers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from etude.data import MapData, StreamData
from etude.errors import DataError
from etude.types.protocols import Place
from tests.unit.data.sources import Augmented, same


class Waiting(Augmented):
    """Sample 0 tells its process and waits for ever."""

    def __getitem__(self, index: int) -> Any:
        if index == 0 and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


def pids() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def test_the_death_of_a_worker_between_steps_is_reported_by_the_next_take() -> None:
    data = MapData(Augmented())
    data.open(Place(batch_size=4, num_workers=2))
    data.take(0)
    victim = multiprocessing.active_children()[0]
    os.kill(victim.pid or 0, signal.SIGKILL)
    victim.join(timeout=60)  # nothing is raised here, in the middle of whatever the trainer does
    begin = time.monotonic()
    with pytest.raises(DataError, match=rf"worker with process id {victim.pid} was killed by SIGKILL"):
        data.take(1)
    assert time.monotonic() - begin < 10
    with pytest.raises(DataError, match="was killed"):
        data.take(5)
    data.close()


def test_the_death_of_a_worker_interrupts_the_wait_for_it() -> None:
    data = MapData(Waiting(2))
    data.open(Place(batch_size=2, num_workers=1))
    pid: list[int] = []

    def kill(*_: object) -> None:
        pid.extend(pids())
        os.kill(pid[0], signal.SIGKILL)

    previous = signal.signal(signal.SIGALRM, kill)
    begin = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(DataError, match="was killed by SIGKILL"):
            data.take(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        data.close()
    assert time.monotonic() - begin < 10


def test_data_can_be_opened_again_after_a_death() -> None:
    data = MapData(Augmented())
    place = Place(batch_size=4, num_workers=1)
    data.open(place)
    expected = data.take(0)
    victim = multiprocessing.active_children()[0]
    os.kill(victim.pid or 0, signal.SIGKILL)
    victim.join(timeout=60)
    with pytest.raises(DataError):
        data.take(1)
    data.open(place)
    assert same(data.take(0), expected)
    data.close()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_meant_for_the_trainer_do_not_end_its_workers(signum: int) -> None:
    data = MapData(Augmented())
    data.open(Place(batch_size=4, num_workers=1))
    data.take(0)
    os.kill(pids()[0], signum)
    for step in range(1, 6):
        data.take(step)
    data.close()


def test_close_ends_the_workers_and_may_be_called_twice() -> None:
    data = MapData(Augmented())
    data.open(Place(batch_size=4, num_workers=2))
    data.take(0)
    assert len(pids()) == 2
    data.close()
    data.close()
    assert pids() == []


@pytest.mark.slow
def test_close_ends_a_worker_that_does_not_answer() -> None:
    data = MapData(Waiting(8))
    data.open(Place(batch_size=2, num_workers=1, shuffle=False))
    with pytest.raises(_Enough):
        _with_alarm(lambda: data.take(0))
    data.close()
    assert pids() == []


class _Enough(Exception):
    pass


def _with_alarm(act: Any) -> None:
    def stop(*_: object) -> None:
        raise _Enough

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        act()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.slow
def test_a_process_that_forgets_to_close_exits_and_leaves_no_worker() -> None:
    script = """
import tempfile, weakref
class Thing: pass
thing = Thing(); weakref.finalize(thing, print)  # exit hooks of others must not come in between
import multiprocessing, torch
from etude.data import MapData
from etude.types.protocols import Place
data = MapData(list(range(20)))
data.open(Place(batch_size=4, num_workers=2))
data.take(0)
print(*[process.pid for process in multiprocessing.active_children()])
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    for pid in done.stdout.split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_starting_workers_draws_nothing_from_the_global_generator() -> None:
    data = MapData(Augmented())
    data.open(Place(batch_size=4, num_workers=1))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    data.take(0)
    assert torch.equal(torch.get_rng_state(), before)
    data.close()


class Unsendable:
    """Its samples cannot travel between processes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return lambda: index


@pytest.mark.slow
def test_a_batch_that_cannot_be_sent_is_an_error_and_no_hang(capfd: pytest.CaptureFixture[str]) -> None:
    data = MapData(Unsendable(), collate=list)
    data.open(Place(batch_size=2, num_workers=1))
    with pytest.raises(DataError, match="cannot be sent"):
        data.take(0)
    data.close()
    assert "lambda" in capfd.readouterr().err


def test_streams_say_that_workers_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    StreamData([1]).open(Place(num_workers=2))
    assert "num_workers" in caplog.text
