"""StreamData: iterables, generators, lists of ready-made batches."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from etude.data import StreamData, as_data
from etude.errors import DataError
from etude.types.protocols import Data, Place
from tests.unit.data.sources import flatten, same, taken


def batches(count: int) -> list[Tensor]:
    return [torch.tensor([number]) for number in range(count)]


def numbers(micros: list[Any]) -> list[list[int]]:
    return [torch.cat(flatten(step)).tolist() for step in micros]


def noisy() -> Iterator[Tensor]:
    """Draw from all global generators, at the start and at each item."""
    order = torch.randperm(7)
    for number in order.tolist():
        yield torch.tensor([number, torch.rand(()).item(), float(np.random.rand()), random.random()])


class Stream(IterableDataset[Tensor]):
    """Counts its passes and remembers what it was told."""

    def __init__(self, length: int = 7) -> None:
        self.length = length
        self.epoch = -1
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.length):
            yield torch.tensor([self.epoch, number]) + torch.randint(0, 1000, (2,)) * 10


class Seekable:
    """Starts anywhere; counts what it reads."""

    def __init__(self) -> None:
        self.position = 0
        self.reads = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.reads += 1
            yield torch.tensor(float(self.position)) + torch.rand(())
            self.position += 1
            if self.position % 5 == 0:
                return


def test_stream_data_is_data() -> None:
    assert isinstance(StreamData([1]), Data)


def test_a_list_of_batches_is_served_in_order_and_from_any_step() -> None:
    data = StreamData(batches(3), batched=True)
    assert numbers(taken(data, [0, 1, 2, 3, 1_000_000], Place())) == [[0], [1], [2], [0], [1]]
    data.open(Place())
    assert data.epochs(6) == 2.0
    assert data.ids(4) == [[4]]


def test_ready_made_batches_are_dealt_out_in_turn() -> None:
    places = [Place(rank=rank, world=2, accumulate=2) for rank in (0, 1)]
    first, second = (numbers(taken(StreamData(batches(5), batched=True), [0, 1], place)) for place in places)
    assert first == [[0, 2], [4, 1]]
    assert second == [[1, 3], [0, 2]]
    streams = [numbers(taken(StreamData(lambda: batches(5), batched=True), [0, 1], place)) for place in places]
    assert streams == [first, second]


@pytest.mark.parametrize("batch_size,accumulate,world", [(12, 1, 1), (3, 2, 2), (1, 4, 3)])
def test_every_split_takes_the_same_samples(batch_size: int, accumulate: int, world: int) -> None:
    whole = taken(StreamData(noisy), [0, 1, 2], Place(batch_size=12))
    parts = [
        taken(StreamData(noisy), [0, 1, 2], Place(0, rank, world, batch_size, accumulate)) for rank in range(world)
    ]
    for step in range(3):
        split = torch.cat([micro for part in parts for micro in part[step]])
        assert sorted(split.tolist()) == sorted(whole[step][0].tolist())


@pytest.mark.parametrize("source", [noisy, Stream()])
@pytest.mark.parametrize("start", [1, 2, 5])
def test_a_late_start_is_exact_with_randomness_inside(
    source: Any, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(seed=4, batch_size=2, accumulate=2)
    data = StreamData(source)
    data.open(place)
    expected = []
    for step in range(7):
        expected.append(data.take(step))
        torch.manual_seed(step)  # training draws and seeds in between
        torch.rand(step)
    with caplog.at_level(logging.WARNING, "etude.data"):
        assert same(taken(StreamData(source), list(range(start, 7)), place), expected[start:])
    assert f"reading past {start * 4} items to reach step {start}" in caplog.text


def test_steps_may_be_taken_again_and_out_of_order() -> None:
    ordered = taken(StreamData(noisy), [0, 1, 2, 3], Place(batch_size=3))
    assert same(taken(StreamData(noisy), [2, 2, 0, 3, 1], Place(batch_size=3)), [ordered[i] for i in (2, 2, 0, 3, 1)])


def test_a_new_pass_is_announced_and_no_item_is_lost() -> None:
    source = Stream()
    micros = taken(StreamData(source), [0, 1, 2, 3], Place(batch_size=5))
    row = torch.cat(flatten(micros)) % 10
    assert row[:, 1].tolist() == [*range(7), *range(7), *range(6)]
    assert row[:, 0].tolist() == [0] * 7 + [1] * 7 + [2] * 6
    assert source.told == [0, 1, 2]


def test_a_seekable_source_starts_late_without_reading() -> None:
    whole = taken(StreamData(Seekable()), list(range(12)), Place(batch_size=2))
    for start in (1, 4, 5, 10):
        source = Seekable()
        assert same(taken(StreamData(source), list(range(start, 12)), Place(batch_size=2)), whole[start:])
        assert source.reads == 2 * (12 - start)
    source = Seekable()
    taken(StreamData(source), [10_000], Place(batch_size=2))
    assert source.reads == 2


def test_a_generator_that_ends_says_how_many_steps_were_possible() -> None:
    data = StreamData(torch.tensor(number) for number in range(10))
    data.open(Place(batch_size=2, accumulate=2))
    data.take(0)
    data.take(1)
    with pytest.raises(
        DataError, match=r"generator ended after 10 items, enough for 2 steps, and it can be read only once"
    ):
        data.take(2)
    with pytest.raises(DataError, match="only once"):
        data.take(2)


def test_a_generator_cannot_go_back_but_repeats_the_last_step() -> None:
    data = StreamData(torch.tensor(number) for number in range(10))
    data.open(Place(batch_size=2))
    data.take(0)
    assert same(data.take(1), data.take(1))
    with pytest.raises(DataError, match="cannot go back"):
        data.take(0)


def test_an_empty_source_is_an_error() -> None:
    for source in (lambda: iter(()), iter(())):
        data = StreamData(source)
        data.open(Place())
        with pytest.raises(DataError, match="empty"):
            data.take(0)
    with pytest.raises(DataError, match="empty"):
        StreamData([], batched=True)


def test_a_source_that_fails_to_restart_is_an_error() -> None:
    iterator = iter(batches(3))
    data = StreamData(lambda: iterator, batched=True)
    data.open(Place(accumulate=2))
    data.take(0)
    with pytest.raises(
        DataError, match="ended after 3 items, enough for 1 steps, and another pass over it gave nothing"
    ):
        data.take(1)


def test_a_failing_source_is_named_with_the_item() -> None:
    def failing() -> Iterator[Tensor]:
        yield torch.zeros(1)
        raise OSError("disk")

    data = StreamData(failing)
    data.open(Place(batch_size=4))
    with pytest.raises(DataError, match="reading item 1 of failing failed: OSError: disk") as caught:
        data.take(0)
    assert isinstance(caught.value.__cause__, OSError)


def test_epochs_of_an_unsized_source_are_passes_seen_by_every_rank_alike() -> None:
    seen = []
    for rank in (0, 1):
        data = StreamData(noisy)  # 7 items a pass, 4 a step
        data.open(Place(batch_size=2, world=2, rank=rank))
        seen.append([(data.take(step), data.epochs(step + 1))[1] for step in range(5)])
    assert seen[0] == seen[1] == [0.0, 1.0, 1.0, 2.0, 2.0]


def test_epochs_of_a_sized_source_are_exact() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.length

    data = StreamData(Sized(8))
    data.open(Place(batch_size=2))
    assert data.epochs(2) == 0.5


def test_samples_are_collated_and_misfits_are_named() -> None:
    doubled = StreamData([1, 2, 3], collate=lambda samples: [2 * sample for sample in samples])
    assert taken(doubled, [0], Place(batch_size=2)) == [[[2, 4]]]
    data = StreamData([torch.zeros(1), torch.zeros(2)])
    data.open(Place(batch_size=2))
    with pytest.raises(DataError, match="could not join items 0 to 1"):
        data.take(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_over_an_iterable_dataset_is_a_stream_of_batches(workers: int) -> None:
    def make() -> StreamData:
        data = as_data(DataLoader(Stream(), batch_size=2, num_workers=workers, generator=torch.Generator()))
        assert isinstance(data, StreamData)
        return data

    expected = taken(make(), list(range(9)), Place())
    assert same(taken(make(), [5, 6, 7, 8], Place()), expected[5:])


def test_what_cannot_be_iterated_is_refused() -> None:
    for source in (3, "text", None):
        with pytest.raises(DataError, match="iterable"):
            StreamData(source)
