"""The states of the demonstrations that a policy was trained on: a bounded sample, and how far others are from it.

Shape letters: N demonstrated states, S numbers of a state, P states to measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import EtudeError
from etude.runs.page import spread
from etude.simulation.traces import Array

MOST_STATES = 6000
"""States that others are compared with: 50 episodes of 96 steps then take 0.3 s of one core."""
MOST_FILES = 64
LIMIT = 10.0
"""Normalised numbers are clamped here, as policies do: one that hardly moved must not outweigh all others."""
_BLOCK = 1024


@dataclass(frozen=True)
class Demonstrations:
    """States that were demonstrated."""

    features: tuple[str, ...]
    """The features that make up a state, in this order."""
    states_NS: Array
    episodes_N: Array
    """The episode that each state is of."""
    starts_ES: Array
    """The first state of each episode."""
    lengths_E: Array
    """Steps of each episode."""

    @property
    def centre_and_unit(self) -> tuple[Array, Array]:
        """The mean and the deviation of each number; infinite where it never changed."""
        deviation = self.states_NS.std(0)
        return self.states_NS.mean(0), np.where(deviation > 1e-9, deviation, np.inf)

    def normalize(self, states_PS: Array) -> Array:
        """Return states in deviations from the mean, clamped."""
        centre, unit = self.centre_and_unit
        return np.clip((states_PS - centre) / unit, -LIMIT, LIMIT).astype(np.float32)

    def distances(self, states_PS: Array, without_P: Array | None = None) -> Array:
        """Return how far each state is from the nearest demonstrated one, in deviations, averaged over its numbers.

        Args:
            states_PS: The states.
            without_P: An episode for each state whose own states do not count.
        """
        here, there = self.normalize(states_PS), self.normalize(self.states_NS)
        moving = max(1, int(np.isfinite(self.centre_and_unit[1]).sum()))
        squares_N = np.square(there).sum(1)
        found = np.empty(len(here), np.float32)
        for first in range(0, len(here), _BLOCK):
            block = here[first : first + _BLOCK]
            squares = np.square(block).sum(1)[:, None] + squares_N - 2 * (block @ there.T)
            if without_P is not None:
                squares[without_P[first : first + _BLOCK, None] == self.episodes_N] = np.inf
            found[first : first + _BLOCK] = np.sqrt(np.maximum(squares.min(1), 0) / moving)
        return found

    def own_distances(self) -> Array:
        """Return how far demonstrated states are from the nearest of another episode; empty if there is none."""
        if len(np.unique(self.episodes_N)) < 2:
            return np.zeros(0, np.float32)
        some = np.linspace(0, len(self.states_NS) - 1, min(len(self.states_NS), 1000)).astype(int)
        return self.distances(self.states_NS[some], self.episodes_N[some])


def find_dataset(config: Mapping[str, Any]) -> Path | None:
    """Return where the demonstrations of a run's configuration lie; None if it does not say so."""
    return next((Path(root) for root in _roots(config.get("data"))), None)


def _roots(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        params = value.get("params")
        if isinstance(params, Mapping) and isinstance(params.get("root"), str):
            yield params["root"]
        for inner in value.values():
            yield from _roots(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _roots(inner)


def read_demonstrations(root: Path, features: Sequence[str], task: str = "") -> Demonstrations | str:
    """Return the states of a LeRobot dataset, or the reason why there are none.

    Args:
        root: The dataset.
        features: What a state is made of.
        task: What is to be done; of a dataset of several tasks, only the demonstrations of this one count.
    """
    if not features:
        return "the environment shows no numbers to compare, pictures alone"
    try:
        return _read(root, features, task)
    except (EtudeError, OSError, ValueError) as error:
        return f"the demonstrations cannot be read: {error}"


def _read(root: Path, features: Sequence[str], task: str) -> Demonstrations | str:
    from etude.data.lerobot.episodes import read_task_texts
    from etude.data.lerobot.layout import read_info
    from etude.data.lerobot.tables import integers, numbers, read_table

    if not (root / "meta/info.json").is_file():
        return f"the demonstrations are no longer in {root}"
    info = read_info(root)
    if missing := [name for name in features if name not in info.columns]:
        return f"the demonstrations in {root} have no {', '.join(missing)}"
    texts = read_task_texts(info)
    wanted = texts.index(task) if len(texts) > 1 and task in texts else None
    files = spread(sorted((root / "data").glob("*/*.parquet")), MOST_FILES)
    states, episodes = [], []
    for path in files:
        table = read_table(path, [*features, "episode_index", "task_index"])
        if wanted is not None:
            table = table.filter(integers(table, "task_index", path) == wanted)
        rows = len(table)
        states.append(np.concatenate([numbers(table, info.columns[n], path).reshape(rows, -1) for n in features], 1))
        episodes.append(integers(table, "episode_index", path))
    if not states or not sum(map(len, states)):
        return f"the demonstrations in {root} are empty"
    return sample_states(tuple(features), np.concatenate(states).astype(np.float32), np.concatenate(episodes))


def sample_states(features: tuple[str, ...], states_NS: Array, episodes_N: Array) -> Demonstrations:
    """Return demonstrations of which at most `MOST_STATES` states are kept, evenly spread."""
    _, starts, lengths = np.unique(episodes_N, return_index=True, return_counts=True)
    kept = np.linspace(0, len(states_NS) - 1, min(len(states_NS), MOST_STATES)).astype(int)
    return Demonstrations(features, states_NS[kept], episodes_N[kept], states_NS[starts], lengths)
