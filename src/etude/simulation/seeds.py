"""Seeds of episodes: a function of (seed, split, episode), with splits that cannot meet."""

from __future__ import annotations

from typing import Final, Literal, get_args

from etude.errors import ConfigError
from etude.rng import STREAM_ROLLOUT, fold, fold_more

Split = Literal["train", "validation", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)

_PLACES: Final = 2**30
_STRIDE: Final = 0x2545F491  # odd, so that episode -> place is one-to-one


def split_code(split: str) -> int:
    """Return the number of a split: 0, 1 or 2."""
    if split not in SPLITS:
        raise ConfigError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return SPLITS.index(split)


def episode_seed(seed: int, split: str, episode: int) -> int:
    """Return the seed of one episode, below 2**32.

    Its last two bits are the split, so that no episode of one split is ever an episode of another, whatever the
    seeds; the other bits walk through all values, so that no two of the first 2**30 episodes of a split are alike.
    """
    if episode < 0:
        raise ValueError(f"an episode is a whole number from 0, got {episode}")
    code = split_code(split)
    start = fold(seed, STREAM_ROLLOUT, code)
    return ((start + episode * _STRIDE) % _PLACES) << 2 | code


def action_key(seed: int, split: str, episode: int, step: int) -> int:
    """Return the key of the random numbers that a policy may draw at one step of one episode."""
    return fold_more(episode_key(seed, split, episode), step)


def episode_key(seed: int, split: str, episode: int) -> int:
    """Return what `fold_more(key, step)` makes the keys of all steps of one episode from."""
    return fold(seed, STREAM_ROLLOUT, split_code(split), episode)
