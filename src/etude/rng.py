"""Randomness as a function of where we are: (seed, step, rank, micro-batch, sample), never of hidden state."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
import torch

_MASK: Final = 0xFFFFFFFFFFFFFFFF

# Named streams, so that no two purposes ever share random numbers.
STREAM_INIT, STREAM_STEP, STREAM_EVALUATE, STREAM_ORDER, STREAM_SAMPLE, STREAM_ROLLOUT, STREAM_REPLAY = range(1, 8)


def fold(*parts: int) -> int:
    """Mix integers into one 64-bit key (splitmix64 over the running state); order matters."""
    key = 0x9E3779B97F4A7C15
    for part in parts:
        key = fold_more(key, part)
    return key


def fold_more(key: int, part: int) -> int:
    """Extend a key by one integer: `fold_more(fold(a), b) == fold(a, b)`."""
    key = (key ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & _MASK
    return key ^ (key >> 31)


def fold_array(key: int | np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Extend keys by many integers at once: `fold_array(fold(a), [b])[0] == fold(a, b)`; keys and parts broadcast."""
    with np.errstate(over="ignore"):
        keys = (np.uint64(key) ^ parts.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return keys ^ (keys >> np.uint64(31))


def seed_everything(key: int) -> None:
    """Set the global generators of torch (every device), NumPy and Python to one key."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def other_states() -> tuple[object, ...]:
    """Return the states of NumPy's and Python's global generators, which are equal if nothing was drawn between."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


class generators_kept:
    """Context in which the global generators may be used freely, from a key on if one is given.

    They come back as they were.
    """

    def __init__(self, key: int | None = None) -> None:
        self._key = key

    def __enter__(self) -> None:
        self._states = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        if self._key is not None:
            seed_everything(self._key)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._states[0])
        np.random.set_state(self._states[1])
        random.setstate(self._states[2])
