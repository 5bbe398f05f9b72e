"""Work shared among forked processes: results, errors in words, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from etude.errors import ConfigError
from etude.simulation.processes import deal, run_in_processes


def square(numbers: Sequence[int]) -> Iterator[int]:
    for number in numbers:
        yield number * number


def test_everything_comes_back_from_processes_of_their_own() -> None:
    def work(numbers: Sequence[int]) -> Iterator[list[int]]:
        yield [os.getpid(), *square(numbers)]

    found = list(run_in_processes(work, deal(range(5), 2)))
    assert sorted(value for _, *values in found for value in values) == [0, 1, 4, 9, 16]
    assert len({pid for pid, *_ in found} | {os.getpid()}) == 3
    assert not multiprocessing.active_children()


def test_a_users_mistake_keeps_its_class_and_its_sentence() -> None:
    def work(numbers: Sequence[int]) -> Iterator[int]:
        yield 1
        raise ConfigError("no such thing")

    with pytest.raises(ConfigError, match="no such thing"):
        list(run_in_processes(work, [[1], [2]]))
    assert not multiprocessing.active_children()


def test_our_mistake_comes_with_its_traceback() -> None:
    def work(numbers: Sequence[int]) -> Iterator[int]:
        yield 1 // numbers[0]

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(run_in_processes(work, [[0]]))


def test_a_process_that_dies_is_noticed() -> None:
    def work(numbers: Sequence[int]) -> Iterator[int]:
        yield 1
        os._exit(9)

    with pytest.raises(RuntimeError, match="exit code 9"):
        list(run_in_processes(work, [[0]]))


def test_leaving_early_ends_the_processes() -> None:
    def work(numbers: Sequence[int]) -> Iterator[int]:
        while True:
            yield 1

    before = set(multiprocessing.active_children())  # of other tests, in the same process
    results = run_in_processes(work, [[0], [1]])
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) <= before


def test_a_process_that_does_not_heed_the_signal_is_ended_too() -> None:
    def work(numbers: Sequence[int]) -> Iterator[int]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            yield 1

    before = set(multiprocessing.active_children())
    results = run_in_processes(work, [[0]])
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) <= before


def test_items_are_dealt_in_turn() -> None:
    assert deal([1, 2, 3, 4, 5], 2) == [[1, 3, 5], [2, 4]]
    assert deal([1], 4) == [[1]]
