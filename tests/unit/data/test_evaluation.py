"""evaluation_batches: one ordered pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

from etude.data import MapData, StreamData, evaluation_batches
from etude.errors import DataError
from etude.types.protocols import Place
from tests.unit.data.sources import Augmented, flatten, same, taken
from tests.unit.data.test_coerce import Module
from tests.unit.data.test_loader import Buckets, Sharded


def indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def stream() -> StreamData:
    return StreamData(lambda: (Augmented(10)[index] for index in range(10)))


@pytest.mark.parametrize("source", [Augmented(10), MapData(Augmented(10)), stream()])
def test_a_pass_is_ordered_complete_and_keeps_the_short_batch(source: Any) -> None:
    assert indices(evaluation_batches(source, Place(batch_size=4))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("source", [Augmented(10), stream()])
def test_ranks_share_the_batches_of_one_process(source: Any) -> None:
    whole = list(evaluation_batches(source, Place(batch_size=2)))
    parts = [list(evaluation_batches(source, Place(batch_size=2, world=2, rank=rank))) for rank in (0, 1)]
    assert same(parts[0], whole[::2])
    assert same(parts[1], whole[1::2])
    limited = [indices(evaluation_batches(source, Place(batch_size=2, world=2, rank=rank), 3)) for rank in (0, 1)]
    assert limited == [[[0, 1], [4, 5]], [[2, 3]]]


def test_passes_repeat_for_any_number_of_workers_and_differ_by_seed() -> None:
    first = list(evaluation_batches(Augmented(10), Place(seed=1, batch_size=4)))
    random.seed(5)
    assert same(list(evaluation_batches(Augmented(10), Place(seed=1, batch_size=4))), first)
    assert same(list(evaluation_batches(Augmented(10), Place(seed=1, batch_size=4, num_workers=2))), first)
    assert not same(list(evaluation_batches(Augmented(10), Place(seed=2, batch_size=4))), first)


def test_samples_draw_from_a_stream_of_their_own() -> None:
    place = Place(seed=1, batch_size=10, shuffle=False)
    ((training,),) = taken(MapData(Augmented(10)), [0], place)
    (evaluation,) = evaluation_batches(Augmented(10), place)
    assert not (training["draws"] == evaluation["draws"]).any()


def test_an_abandoned_pass_leaves_no_workers() -> None:
    batches = evaluation_batches(Augmented(50), Place(batch_size=4, num_workers=1))
    next(batches)
    batches.close()  # type: ignore[attr-defined]


def test_evaluating_on_training_data_does_not_disturb_it() -> None:
    data = MapData(Augmented(10))
    place = Place(batch_size=4, num_workers=1)
    expected = taken(MapData(Augmented(10)), [0, 1, 2], place)
    data.open(place)
    found = []
    for step in range(3):
        found.append(data.take(step))
        list(evaluation_batches(data, place))
    data.close()
    assert same(found, expected)


def test_a_loader_keeps_its_batches_but_does_not_shuffle() -> None:
    dataset: Any = Augmented(7)
    assert indices(evaluation_batches(DataLoader(dataset, 3, shuffle=True), Place())) == [[0, 1, 2], [3, 4, 5], [6]]
    assert indices(evaluation_batches(DataLoader(dataset, 3, drop_last=True), Place())) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", ["weighted", "batches", "sharded"])
def test_other_samplers_repeat(kind: str) -> None:
    dataset: Any = Augmented(10)
    options: dict[str, dict[str, Any]] = {
        "weighted": {"sampler": WeightedRandomSampler([1.0] * 10, 10), "batch_size": 3},
        "batches": {"batch_sampler": Buckets()},
        "sharded": {"sampler": Sharded(dataset, 2, 1), "batch_size": 3},
    }
    loader: DataLoader[Any] = DataLoader(dataset, **options[kind])
    first = list(evaluation_batches(loader, Place()))
    assert sum(map(len, indices(first))) == 10
    assert same(list(evaluation_batches(loader, Place())), first)


def test_a_list_of_ready_made_batches_is_passed_once() -> None:
    batches = [torch.zeros(1), torch.ones(1), torch.ones(2)]
    assert same(list(evaluation_batches(StreamData(batches, batched=True), Place())), batches)


def test_a_data_module_gives_its_validation_loader() -> None:
    assert flatten(list(evaluation_batches(Module(), Place())))[0].tolist() == [10, 11]


def test_an_exhausted_generator_is_an_error() -> None:
    source = (Augmented(10)[index] for index in range(3))
    assert len(list(evaluation_batches(source, Place(batch_size=2)))) == 2
    with pytest.raises(DataError, match="nothing to evaluate"):
        list(evaluation_batches(source, Place(batch_size=2)))


class Counting:
    """Data of a user's own: knows only how to take."""

    spec = None

    def open(self, place: Place) -> None:
        self.place = place

    def take(self, step: int) -> Sequence[Tensor]:
        return [torch.tensor([step])]

    def ids(self, step: int) -> Sequence[int]:
        return [step]

    def epochs(self, step: int) -> float:
        return step / 5

    def close(self) -> None:
        del self.place


def test_data_that_only_knows_take_is_taken_for_one_epoch() -> None:
    found = [list(evaluation_batches(Counting(), Place(world=2, rank=rank))) for rank in (0, 1)]
    assert [torch.cat(part).tolist() for part in found] == [[0, 2, 4], [1, 3]]
    assert len(list(evaluation_batches(Counting(), Place(), 2))) == 2
