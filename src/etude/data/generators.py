"""Random generators that a dataset keeps for itself, seeded along with the global ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from etude.rng import fold, seed_everything

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Generators:
    """The global generators, and those that objects hold as attributes (`self.rng = np.random.default_rng()`).

    Generators deeper inside, say in a transform of the dataset, are not found; let those draw from the global ones.
    """

    def __init__(self, *owners: Any) -> None:
        held = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
        self._own = [value for value in held if isinstance(value, _KINDS)]

    @property
    def has_own(self) -> bool:
        """Whether an object holds one."""
        return bool(self._own)

    def seed(self, key: int) -> None:
        """Seed them all from one key."""
        seed_everything(key)
        for number, generator in enumerate(self._own):
            seed_generator(generator, fold(key, number))


def seed_generator(generator: Any, key: int) -> None:
    """Seed a generator of torch, NumPy or Python in place."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(key)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(key).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(key & 0xFFFFFFFF)
    else:
        generator.seed(key)
