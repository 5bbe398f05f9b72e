"""Addressing: which samples a step takes."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data import order as order_module
from etude.data.order import Order, micro_starts, permutation, shuffled
from etude.errors import DataError
from etude.rng import STREAM_SAMPLE, fold
from etude.types.protocols import Place


def step_indices(order: Order, place: Place, step: int) -> list[int]:
    """All samples of one step over all ranks, in the order of their positions."""
    taken: list[tuple[int, int]] = []
    for rank in range(place.world):
        here = Place(rank=rank, world=place.world, batch_size=place.batch_size, accumulate=place.accumulate)
        for start in micro_starts(here, step):
            indices, _ = order.at(start, place.batch_size)
            taken += zip(range(start, start + place.batch_size), indices.tolist(), strict=True)
    return [index for _, index in sorted(taken)]


lengths = st.integers(1, 60)
seeds = st.integers(0, 2**63 - 1)


@given(lengths, seeds, st.integers(0, 1000))
def test_an_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(length, seed, epoch).tolist()) == list(range(length))
    assert permutation(length, seed, epoch).tolist() == permutation(length, seed, epoch).tolist()


@given(st.integers(1, 5000), seeds, st.integers(0, 1000))
def test_an_order_that_is_not_written_down_is_a_permutation_too(length: int, seed: int, epoch: int) -> None:
    samples = shuffled(np.arange(length), length, seed, epoch)
    assert sorted(samples.tolist()) == list(range(length))
    place = seed % length
    assert shuffled(np.array([place]), length, seed, epoch).tolist() == [samples[place]]


def test_the_order_of_a_large_dataset_looks_random() -> None:
    length, bins = 100_003, 64
    expected = length / bins**2
    first, second = (shuffled(np.arange(length), length, 7, epoch) for epoch in (0, 1))
    pairs = {
        "place and sample": (np.arange(length), first),
        "two epochs": (first, second),
        "neighbours": (first[:-1], first[1:]),
    }
    for name, (one, other) in pairs.items():
        counts, _, _ = np.histogram2d(one, other, bins=bins)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        # (bins - 1) ** 2 degrees of freedom, whose deviation is 89: five of them either way.
        assert abs(chi_square - (bins - 1) ** 2) < 5 * 89, f"{name}: {chi_square:.0f}"
    assert np.count_nonzero(first == np.arange(length)) < 10


def test_a_place_in_a_billion_samples_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        indices, keys = Order(10**9, seed=0).at(123_456_789_012, 256)
        again, _ = Order(10**9, seed=0).at(123_456_789_012 + 100, 10)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert indices[100:110].tolist() == again.tolist()
    assert indices.min() >= 0 and indices.max() < 10**9 and len(set(indices.tolist())) == len(set(keys.tolist())) == 256


def test_a_batch_may_span_many_blocks_and_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shuffled(np.arange(100_000), 100_000, 5, 2)
    assert Order(100_000, seed=5).at(250_000, 50_000)[0].tolist() == whole[50_000:].tolist()
    taken = Order(100_000, seed=5).at(299_990, 20)[0].tolist()
    assert taken == [*whole[-10:], *shuffled(np.arange(10), 100_000, 5, 3)]


def test_old_runs_keep_the_order_of_whole_permutations() -> None:
    old = Order(100_000, seed=5, version=1).at(100_000, 100_000)[0]
    assert old.tolist() == permutation(100_000, 5, 1).tolist()
    small = [Order(1000, seed=5, version=version).at(0, 1000)[0].tolist() for version in (1, 2)]
    assert small[0] == small[1] == permutation(1000, 5, 0).tolist()


@given(lengths, seeds, st.integers(0, 10_000), st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4]))
def test_every_split_of_a_global_batch_covers_the_same_samples(
    length: int, seed: int, step: int, batch_size: int, world: int
) -> None:
    order = Order(length, seed=seed)
    whole = step_indices(order, Place(batch_size=144), step)
    split = Place(batch_size=batch_size, world=world, accumulate=144 // (batch_size * world))
    assert split.global_batch == 144
    assert step_indices(order, split, step) == whole


@given(lengths, seeds, st.integers(1, 40))
def test_no_sample_is_lost_or_repeated_over_an_epoch(length: int, seed: int, batch: int) -> None:
    order = Order(length, seed=seed)
    row = np.concatenate([order.at(step * batch, batch)[0] for step in range(2 * length // batch + 2)])
    assert sorted(row[:length].tolist()) == list(range(length))
    assert sorted(row[length : 2 * length].tolist()) == list(range(length))


@given(lengths, seeds, st.integers(0, 10**12), st.integers(1, 200))
def test_positions_are_read_alike_in_one_piece_or_singly(length: int, seed: int, start: int, count: int) -> None:
    indices, keys = Order(length, seed=seed).at(start, count)
    again = Order(length, seed=seed)
    singly = [again.at(position, 1) for position in range(start, start + count)]
    assert indices.tolist() == [int(one[0]) for one, _ in singly]
    assert keys.tolist() == [int(key[0]) for _, key in singly]


def test_a_key_is_a_function_of_seed_epoch_and_index() -> None:
    indices, keys = Order(10, seed=3).at(25, 10)
    expected = [fold(3, STREAM_SAMPLE, (25 + place) // 10, index) for place, index in enumerate(indices.tolist())]
    assert keys.tolist() == expected


def test_keys_are_the_same_whether_cached_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = Order(10, seed=3).at(5, 20)
    monkeypatch.setattr(order_module, "_CACHED_KEYS", 0)
    fresh = Order(10, seed=3).at(5, 20)
    assert np.array_equal(cached[0], fresh[0])
    assert np.array_equal(cached[1], fresh[1])


def test_unshuffled_order_is_the_order_of_the_dataset() -> None:
    assert Order(3, seed=0, shuffle=False).at(1, 7)[0].tolist() == [1, 2, 0, 1, 2, 0, 1]


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = [tuple(permutation(50, seed, epoch)) for seed in range(5) for epoch in range(5)]
    assert max(Counter(orders).values()) == 1


def test_changing_what_was_handed_out_does_not_change_the_order() -> None:
    order = Order(10, seed=0)
    first, keys = order.at(0, 5)
    expected, expected_keys = first.copy(), keys.copy()
    first[:], keys[:] = 0, 0
    assert np.array_equal(order.at(0, 5)[0], expected)
    assert np.array_equal(order.at(0, 5)[1], expected_keys)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        Order(0, seed=0)
