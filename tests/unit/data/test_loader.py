"""LoaderData: a ready-made DataLoader, addressed by (seed, step)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from etude.data import LoaderData, StreamData, as_data
from etude.errors import DataError
from etude.types.protocols import Data, Place
from tests.unit.data.sources import Augmented, flatten, same, taken

STEPS = list(range(9))


def indices(micros: list[Any]) -> list[list[int]]:
    return [micro["index"].tolist() for step in micros for micro in step]


class Shuffled(Sampler[int]):
    """A sampler of unknown make: remembers its epoch and draws from Python's generator."""

    def __init__(self, length: int) -> None:
        self.length, self.calls, self.epoch = length, 0, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        order = list(range(self.length))
        random.shuffle(order)
        return iter([(index + self.calls + self.epoch) % self.length for index in order])


class Buckets(Sampler[list[int]]):
    """A batch sampler of unknown make, with batches of unequal size."""

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(10).tolist()
        yield order[:2]
        yield order[2:7]
        yield order[7:]

    def __len__(self) -> int:
        return 3


class Endless(Sampler[int]):
    """Never ends, and has no length."""

    def __iter__(self) -> Iterator[int]:
        for _ in count():
            yield int(torch.randint(0, 10, ()))


class Sharded(DistributedSampler[int]):
    """A distributed sampler of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return reversed(list(super().__iter__()))  # type: ignore[return-value]


def loaders(**options: Any) -> dict[str, DataLoader[Any]]:
    dataset: Any = Augmented(10)
    weights = torch.arange(1.0, 11.0)
    generator = torch.Generator().manual_seed(1)
    return {
        "shuffled": DataLoader(dataset, batch_size=3, shuffle=True, **options),
        "with a generator": DataLoader(dataset, batch_size=3, shuffle=True, generator=generator, **options),
        "in order": DataLoader(dataset, batch_size=3, **options),
        "drop last": DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True, **options),
        "weighted": DataLoader(dataset, batch_size=3, sampler=WeightedRandomSampler(weights, 10), **options),
        "replaced": DataLoader(dataset, batch_size=3, sampler=RandomSampler(dataset, replacement=True), **options),
        "part": DataLoader(dataset, batch_size=3, sampler=SubsetRandomSampler([1, 3, 5, 7]), **options),
        "own sampler": DataLoader(dataset, batch_size=3, sampler=Shuffled(10), **options),
        "own batches": DataLoader(dataset, batch_sampler=Buckets(), **options),
        "endless": DataLoader(dataset, batch_size=3, sampler=Endless(), **options),
        "distributed": DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset, 2, 1), **options),
        "own distributed": DataLoader(dataset, batch_size=3, sampler=Sharded(dataset, 2, 1), **options),
        "unbatched": DataLoader(dataset, batch_size=None, shuffle=True, **options),
        "collated": DataLoader(dataset, batch_size=3, shuffle=True, collate_fn=mixed, **options),
    }


def mixed(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"index": torch.stack([s["index"] for s in samples]), "noise": torch.rand(2) + samples[0]["draws"][:2]}


KINDS = sorted(loaders())


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_start_gives_the_batches_of_a_run_from_the_start(kind: str) -> None:
    place = Place(seed=3, accumulate=2)
    expected = taken(LoaderData(loaders()[kind]), STEPS, place)
    for start in (1, 4):
        assert same(taken(LoaderData(loaders()[kind]), STEPS[start:], place), expected[start:])


@pytest.mark.parametrize("kind", KINDS)
def test_workers_change_nothing(kind: str) -> None:
    place = Place(seed=3)
    expected = taken(LoaderData(loaders()[kind]), STEPS, place)
    assert same(taken(LoaderData(loaders(num_workers=1)[kind]), STEPS, place), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_take_turns(kind: str) -> None:
    whole = taken(LoaderData(loaders()[kind]), [0, 1, 2], Place(accumulate=4))
    parts = [taken(LoaderData(loaders()[kind]), [0, 1, 2], Place(accumulate=2, world=2, rank=r)) for r in (0, 1)]
    for step in range(3):
        assert same(whole[step], [parts[0][step][0], parts[1][step][0], parts[0][step][1], parts[1][step][1]])


@pytest.mark.parametrize("kind", KINDS)
def test_ids_name_what_take_gives(kind: str) -> None:
    data = LoaderData(loaders()[kind])
    data.open(Place(accumulate=2))
    for step in STEPS:
        micros = data.take(step)
        named = [micro["index"].reshape(-1).tolist() for micro in micros]
        assert data.ids(step) == named


def test_an_epoch_keeps_the_loaders_own_batches() -> None:
    short = indices(taken(LoaderData(loaders()["shuffled"]), [0, 1, 2, 3], Place(batch_size=99)))
    assert [len(batch) for batch in short] == [3, 3, 3, 1]
    assert sorted(chain(*short)) == list(range(10))
    dropped = indices(taken(LoaderData(loaders()["drop last"]), [0, 1, 2, 3], Place()))
    assert [len(batch) for batch in dropped] == [4, 4, 4, 4]
    ordered = indices(taken(LoaderData(loaders()["in order"]), [0, 1, 2, 3, 4], Place()))
    assert ordered == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9], [0, 1, 2]]
    uneven = indices(taken(LoaderData(loaders()["own batches"]), [0, 1, 2, 3, 4, 5], Place()))
    assert [len(batch) for batch in uneven] == [2, 5, 3, 2, 5, 3]
    assert sorted(chain(*uneven[3:])) == list(range(10))


def test_the_order_depends_on_our_seed_and_epoch_only() -> None:
    first = indices(taken(LoaderData(loaders()["shuffled"]), STEPS, Place(seed=1)))
    torch.manual_seed(99)
    assert indices(taken(LoaderData(loaders()["with a generator"]), STEPS, Place(seed=1))) == first
    assert indices(taken(LoaderData(loaders()["shuffled"]), STEPS, Place(seed=2))) != first
    assert first[:4] != first[4:8]


def test_a_sampler_that_changes_as_it_draws_repeats_when_opened_again() -> None:
    data = LoaderData(loaders()["own sampler"])
    expected = taken(data, STEPS, Place())
    assert same(taken(data, STEPS, Place()), expected)
    assert same(taken(data, [8, 3, 0], Place()), [expected[8], expected[3], expected[0]])


def test_a_distributed_sampler_does_not_shard_twice(caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("distributed", "own distributed"):
        caplog.clear()
        epoch = indices(taken(LoaderData(loaders()[kind]), [0, 1, 2, 3], Place()))
        assert sorted(chain(*epoch)) == list(range(10))
        assert "does not shard" in caplog.text


def test_copies_of_a_sample_in_one_epoch_are_augmented_differently() -> None:
    loader: DataLoader[Any] = DataLoader(
        Augmented(1),
        batch_size=8,
        sampler=WeightedRandomSampler([1.0], 8, replacement=True),  # type: ignore[arg-type]
    )
    ((batch,),) = taken(LoaderData(loader), [0], Place())
    assert len(set(map(tuple, batch["draws"].tolist()))) == 8


def test_a_late_start_reads_no_other_samples() -> None:
    for kind in ("shuffled", "weighted", "own batches"):
        loader = loaders()[kind]
        dataset: Any = loader.dataset
        (micros,) = taken(LoaderData(loader), [1000], Place())
        assert dataset.touched == micros[0]["index"].tolist()


def test_epochs_count_batches() -> None:
    data = LoaderData(loaders()["shuffled"])
    data.open(Place(accumulate=2))
    assert data.epochs(2) == 1.0
    own = LoaderData(loaders()["own batches"])
    own.open(Place())
    assert own.epochs(3) == 1.0
    assert isinstance(data, Data)


def test_a_sampler_that_yields_lists_is_given_to_the_dataset_whole() -> None:
    tensors = torch.arange(10)
    sampler = BatchSampler(SequentialSampler(range(10)), 4, False)
    loader: DataLoader[Any] = DataLoader(tensors, sampler=sampler, batch_size=None)  # type: ignore[arg-type]
    found = [flatten(step)[0].tolist() for step in taken(LoaderData(loader), [0, 1, 2, 3], Place())]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def test_a_tensor_dataset_loader_is_read_at_once() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10), torch.randn(10)), batch_size=5)
    assert same(taken(as_data(loader), [0, 1], Place()), [[batch] for batch in loader])


def started(number: int) -> None:
    torch.set_default_dtype(torch.float64)


class Halves:
    """Its samples have the default type of the process they are made in."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((), 0.5)


def test_the_worker_init_function_runs_in_the_workers() -> None:
    loader: DataLoader[Any] = DataLoader(
        Halves(),
        batch_size=2,
        num_workers=1,
        worker_init_fn=started,  # type: ignore[arg-type]
    )
    assert flatten(taken(LoaderData(loader), [0], Place()))[0].dtype == torch.float64


class Prefixed(DataLoader[Any]):
    """Does something to each batch after loading it."""

    def __iter__(self) -> Any:
        return (("prefix", batch) for batch in super().__iter__())


def test_a_loader_that_iterates_its_own_way_is_kept_whole() -> None:
    loader = Prefixed(Augmented(4), batch_size=2)  # type: ignore[arg-type]
    data = as_data(loader)
    assert isinstance(data, StreamData)
    assert taken(data, [0], Place())[0][0][0] == "prefix"
    with pytest.raises(DataError, match="as_data"):
        LoaderData(loader)


def test_a_loader_without_a_batch_is_refused() -> None:
    data = LoaderData(DataLoader(Augmented(3), batch_size=4, drop_last=True))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no batch"):
        data.open(Place())
