"""Seeds of episodes: splits that cannot meet, and no episode twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.simulation.seeds import SPLITS, action_key, episode_seed

seeds = st.integers(0, 2**63 - 1)
episodes = st.integers(0, 2**30 - 1)


@given(seeds, seeds, episodes, episodes)
def test_no_episode_of_one_split_is_ever_one_of_another(one: int, other: int, first: int, second: int) -> None:
    found = {split: {episode_seed(one, split, first), episode_seed(other, split, second)} for split in SPLITS}
    assert not found["train"] & found["validation"]
    assert not found["train"] & found["test"]
    assert not found["validation"] & found["test"]


@given(seeds, episodes, episodes)
def test_two_episodes_of_a_split_have_two_seeds(seed: int, first: int, second: int) -> None:
    assert (episode_seed(seed, "test", first) == episode_seed(seed, "test", second)) == (first == second)


@given(seeds, episodes)
def test_seeds_fit_every_generator(seed: int, episode: int) -> None:
    assert 0 <= episode_seed(seed, "validation", episode) < 2**32


def test_seeds_stay_what_they_are() -> None:
    """Published results name their seeds: a change here would make them other episodes."""
    assert [episode_seed(0, "test", episode) for episode in range(3)] == [4219175710, 2425574754, 631973798]
    assert episode_seed(1, "train", 0) != episode_seed(0, "train", 0)


def test_wrong_splits_and_episodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="train, validation, test"):
        episode_seed(0, "tests", 0)
    with pytest.raises(ValueError, match="whole number"):
        episode_seed(0, "test", -1)


def test_every_step_has_random_numbers_of_its_own() -> None:
    keys = {action_key(0, split, episode, step) for split in SPLITS for episode in range(5) for step in range(5)}
    assert len(keys) == 75
