"""MapData: the same batches for any workers, splits and starting step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from etude.data import Columns, MapData
from etude.data.noise import normals, uniforms
from etude.errors import DataError
from etude.rng import fold_array
from etude.types.protocols import Data, Place
from tests.unit.data.sources import Augmented, flatten, same, taken

STEPS = [0, 1, 2, 3, 4, 5]


def by_sample(micros: list[list[dict[str, Tensor]]]) -> dict[int, tuple[float, ...]]:
    found = {}
    for micro in [micro for step in micros for micro in step]:
        for index, draws in zip(micro["index"].tolist(), micro["draws"].tolist(), strict=True):
            found[index] = tuple(draws)
    return found


def test_map_data_is_data() -> None:
    assert isinstance(MapData(Augmented()), Data)


def test_batches_are_bitwise_the_same_for_any_number_of_workers() -> None:
    places = [Place(seed=5, batch_size=3, accumulate=2, num_workers=workers) for workers in (0, 1, 2)]
    none, one, two = (taken(MapData(Augmented()), STEPS, place) for place in places)
    assert same(none, one)
    assert same(none, two)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [1, 3, 4])
def test_starting_at_any_step_gives_the_batches_of_a_run_from_the_start(workers: int, start: int) -> None:
    place = Place(seed=5, batch_size=4, num_workers=workers)
    assert same(
        taken(MapData(Augmented(10)), STEPS, place)[start:], taken(MapData(Augmented(10)), STEPS[start:], place)
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_steps_may_be_taken_out_of_order(workers: int) -> None:
    place = Place(batch_size=4, num_workers=workers)
    ordered = taken(MapData(Augmented()), STEPS, place)
    mixed = taken(MapData(Augmented()), [4, 1, 1, 2, 3, 0, 5], place)
    assert same([ordered[step] for step in [4, 1, 1, 2, 3, 0, 5]], mixed)


def test_a_late_start_touches_no_other_samples() -> None:
    dataset = Augmented(1000)
    (micros,) = taken(MapData(dataset), [10_000], Place(batch_size=8, accumulate=2))
    assert dataset.touched == torch.cat([micro["index"] for micro in micros]).tolist()


@pytest.mark.parametrize(
    "batch_size,accumulate,world", [(12, 1, 1), (6, 2, 1), (6, 1, 2), (3, 2, 2), (1, 12, 1), (1, 1, 12), (4, 1, 3)]
)
def test_every_split_gives_the_same_augmented_samples(batch_size: int, accumulate: int, world: int) -> None:
    steps = [0, 1, 2]
    whole = taken(MapData(Augmented(7)), steps, Place(seed=1, batch_size=12))
    parts = [
        taken(MapData(Augmented(7)), steps, Place(1, rank, world, batch_size, accumulate)) for rank in range(world)
    ]
    for step in steps:
        expected = sorted(torch.cat([micro["draws"] for micro in whole[step]]).tolist())
        found = sorted(torch.cat([micro["draws"] for part in parts for micro in part[step]]).tolist())
        assert found == expected


def test_augmentation_depends_on_seed_epoch_and_index_alone() -> None:
    # One epoch of 12 samples each way: other neighbours, ranks and workers, same draws.
    reference = by_sample(taken(MapData(Augmented(12)), [0, 1], Place(seed=9, batch_size=6)))
    assert len(reference) == 12
    unshuffled = Place(seed=9, batch_size=4, shuffle=False, num_workers=1)
    assert by_sample(taken(MapData(Augmented(12)), [0, 1, 2], unshuffled)) == reference
    next_epoch = by_sample(taken(MapData(Augmented(12)), [2, 3], Place(seed=9, batch_size=6)))
    assert all(next_epoch[index] != reference[index] for index in reference)
    other_seed = by_sample(taken(MapData(Augmented(12)), [0, 1], Place(seed=10, batch_size=6)))
    assert all(other_seed[index] != reference[index] for index in reference)


def test_batches_straddle_the_end_of_an_epoch() -> None:
    micros = taken(MapData(Augmented(5)), [0, 1, 2, 3, 4], Place(batch_size=2))
    row = torch.cat([micro["index"] for step in micros for micro in step]).tolist()
    assert sorted(row[:5]) == sorted(row[5:]) == list(range(5))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_smaller_than_a_global_batch_serves(workers: int) -> None:
    place = Place(batch_size=8, accumulate=2, num_workers=workers)
    (micros,) = taken(MapData(Augmented(3)), [0], place)
    counts = torch.bincount(torch.cat([micro["index"] for micro in micros]))
    assert counts.sum() == 16
    assert counts.min() >= 5


def test_ids_name_the_samples_of_each_micro_batch() -> None:
    data = MapData(Augmented())
    data.open(Place(batch_size=3, accumulate=2, world=2, rank=1))
    micros, ids = data.take(4), data.ids(4)
    assert [micro["index"].tolist() for micro in micros] == ids
    assert all(type(index) is int for micro in ids for index in micro)


def test_epochs_count_samples_over_all_ranks() -> None:
    data = MapData(Augmented(24))
    data.open(Place(batch_size=3, accumulate=2, world=2))
    assert data.epochs(3) == 1.5


class Gathered:
    """A dataset with the vectorised protocol, augmented from the keys."""

    def __len__(self) -> int:
        return 11

    def gather(self, indices: np.ndarray, keys: np.ndarray) -> dict[str, Tensor]:
        assert keys.dtype == np.uint64
        return {"index": torch.from_numpy(indices), "noise": torch.from_numpy(normals(keys, (3,)))}


def test_a_gathering_dataset_is_read_a_batch_at_a_time_and_alike_in_workers() -> None:
    here = taken(MapData(Gathered()), STEPS, Place(batch_size=4))
    there = taken(MapData(Gathered()), STEPS, Place(batch_size=4, num_workers=2))
    assert same(here, there)
    assert here[0][0]["noise"].shape == (4, 3)


def test_noise_is_a_function_of_the_key_and_has_the_right_shape() -> None:
    keys = fold_array(1, np.arange(4000))
    values = normals(keys, (5,))
    assert values.shape == (4000, 5)
    assert np.array_equal(values[17:18], normals(keys[17:18], (5,)))
    assert abs(values.mean()) < 0.03
    assert abs(values.std() - 1) < 0.03
    even = uniforms(keys)
    assert even.shape == (4000,)
    assert 0 <= even.min() < 0.01 < 0.99 < even.max() < 1


def test_a_tensor_dataset_gives_what_single_samples_would() -> None:
    tensors = TensorDataset(torch.randn(9, 2), torch.arange(9))
    fast = taken(MapData(tensors), STEPS, Place(batch_size=4))
    slow = taken(MapData([tensors[i] for i in range(9)]), STEPS, Place(batch_size=4))
    assert same(fast, slow)
    assert type(fast[0][0]) is type(slow[0][0])


def test_a_tensor_or_array_is_a_dataset_of_rows() -> None:
    rows = torch.randn(9, 2)
    reference = taken(MapData([*rows]), STEPS, Place(batch_size=4))
    assert same(taken(MapData(rows), STEPS, Place(batch_size=4)), reference)
    assert same(taken(MapData(rows.numpy()), STEPS, Place(batch_size=4)), reference)


class Bulk(Augmented):
    """Returns many samples at once."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        assert all(type(index) is int for index in indices)
        return [self[index] for index in indices]


def test_bulk_reading_is_seeded_and_alike_in_workers() -> None:
    here = taken(MapData(Bulk()), STEPS, Place(batch_size=4))
    assert same(here, taken(MapData(Bulk()), STEPS, Place(batch_size=4, num_workers=2)))
    assert same(here[3:], taken(MapData(Bulk()), STEPS[3:], Place(batch_size=4)))


def test_a_subset_keeps_the_random_stream_of_each_sample() -> None:
    subset = Subset(Subset(Augmented(30), range(5, 25)), [2, 3, 5, 7, 11, 13])
    wide = by_sample(taken(MapData(subset), [0], Place(batch_size=6)))
    narrow = by_sample(taken(MapData(subset), [0, 1, 2], Place(batch_size=2)))
    assert wide == narrow
    assert sorted(wide) == [7, 8, 10, 12, 16, 18]
    columns = Subset(Columns({"x": torch.arange(10)}), [8, 9])
    assert sorted(flatten(taken(MapData(columns), [0], Place(batch_size=2)))[0].tolist()) == [8, 9]


class OwnGenerators:
    """Keeps its random generators for itself."""

    def __init__(self) -> None:
        import random

        self.torch = torch.Generator()
        self.numpy = np.random.default_rng()
        self.legacy = np.random.RandomState()
        self.python = random.Random()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[float]:
        draws = torch.rand((), generator=self.torch).item(), self.numpy.random()
        return [*draws, float(self.legacy.rand()), self.python.random()]


def test_generators_that_a_dataset_keeps_are_seeded_too() -> None:
    here = taken(MapData(OwnGenerators()), STEPS, Place(batch_size=4))
    assert same(here, taken(MapData(OwnGenerators()), STEPS, Place(batch_size=4)))
    assert same(here, taken(MapData(OwnGenerators()), STEPS, Place(batch_size=4, num_workers=2)))


def mix(samples: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([sample["draws"] for sample in samples]).mean(0) + torch.rand(3)


class Seldom(Dataset[dict[str, Tensor]]):
    """Draws from torch always, and from NumPy and Python for a few samples only."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        seldom = {5: random.random, 40: np.random.standard_normal}.get(index, float)()
        return {"index": torch.tensor(index), "draws": torch.stack([torch.rand(()), torch.tensor(float(seldom))])}


def test_samples_that_seldom_draw_do_so_under_their_own_keys() -> None:
    alone = by_sample(taken(MapData(Seldom()), list(range(64)), Place(batch_size=1)))
    together = by_sample(taken(MapData(Seldom()), [0, 1], Place(batch_size=32)))
    assert alone == together and len({draws[0] for draws in alone.values()}) == 64
    assert alone[5][1] != 0 != alone[40][1]


def test_randomness_in_the_collate_function_repeats() -> None:
    here = taken(MapData(Augmented(), mix), STEPS, Place(batch_size=4))
    assert same(here, taken(MapData(Augmented(), mix), STEPS, Place(batch_size=4, num_workers=2)))
    assert same(here[4:], taken(MapData(Augmented(), mix), STEPS[4:], Place(batch_size=4)))


class Broken(Augmented):
    """Fails on one sample."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 2:
            raise KeyError("no such column")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_sample_is_named(workers: int) -> None:
    data = MapData(Broken(4))
    data.open(Place(batch_size=4, num_workers=workers))
    try:
        with pytest.raises(DataError, match=r"Broken failed on sample 2: KeyError: 'no such column'") as caught:
            data.take(0)
    finally:
        data.close()
    assert "no such column" in str(caught.value.__cause__)


def test_samples_that_do_not_fit_together_are_named() -> None:
    data = MapData([torch.zeros(1), torch.zeros(2)])
    data.open(Place(batch_size=2))
    with pytest.raises(DataError, match=r"could not join samples \[\d, \d\].*one shape"):
        data.take(0)


def test_a_failing_gather_is_named() -> None:
    class Bad(Gathered):
        def gather(self, indices: np.ndarray, keys: np.ndarray) -> dict[str, Tensor]:
            raise ValueError("disk")

    data = MapData(Bad())
    data.open(Place(batch_size=10))
    with pytest.raises(DataError, match=r"gather of samples \[.*, \.\.\.\]: ValueError: disk"):
        data.take(0)


def test_misuse_is_explained() -> None:
    with pytest.raises(DataError, match="empty"):
        MapData([])
    with pytest.raises(DataError, match="StreamData"):
        MapData(iter([1]))
    with pytest.raises(DataError, match="open"):
        MapData([1]).take(0)
    with pytest.raises(DataError, match="__getitem__"):
        MapData(Gathered(), collate=mix)
