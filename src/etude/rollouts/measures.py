"""What every kind of rollouts is measured by: where the time goes, and what was earned."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from etude.algorithms.moments import Gather, Moments

Metrics = dict[str, tuple[float, float]]
"""Means and their weights, by name."""


@contextmanager
def timed(timings: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that a block takes to what is under a name."""
    began = time.perf_counter()
    yield
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - began


def measure_rewards(rewards: Iterable[float], gather: Gather) -> Metrics:
    """Return the mean of this rank's rewards and the deviation of all ranks'; all must call, even without rewards."""
    own = Moments.of(torch.tensor(list(rewards), dtype=torch.float64))
    deviation = math.sqrt(own.over(gather).variance)
    return {"reward": (own.mean, own.count), "reward_std": (deviation, own.count)} if own.count else {}
