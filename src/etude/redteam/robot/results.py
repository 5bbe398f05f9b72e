"""What a stress test found: every episode with its vector, its likelihood and how it went; one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import DataError
from etude.redteam.robot.disturbances import DisturbanceSpace
from etude.redteam.robot.search import Tried, search_reward
from etude.runs.durable import write_output
from etude.simulation.environments.base import Array
from etude.simulation.results import EpisodeRow, wilson_interval

STRESS_FILE = "stress.json"
RANDOM = "random"
_VERSION = 1


@dataclass(frozen=True)
class StressEpisode:
    """One episode of a search."""

    number: int
    seed: int
    vector: tuple[float, ...]
    """What happened, as the space reads it."""
    failed: bool
    steps: int
    reward: float
    """What the environment gave."""
    score: float
    """What it earned who looks for likely failures."""
    log_likelihood: float
    plausibility: float
    """The share of what chance draws that is less likely."""
    scene: Mapping[str, float] = field(default_factory=dict)
    """Where things were at the beginning."""
    what: str = ""
    """What went wrong, as far as that is known."""

    @classmethod
    def of(
        cls, space: DisturbanceSpace, vector: Array, row: EpisodeRow, max_steps: int, scene: Mapping[str, float],
        what: str = "",
    ) -> StressEpisode:  # fmt: skip
        """Return an episode as it went."""
        failed = not row.success
        return cls(
            row.episode, row.seed, tuple(float(value) for value in vector), failed, row.steps, row.reward,
            search_reward(space, vector, failed, row.steps / max_steps), float(space.log_likelihood(vector)),
            float(space.plausibility(vector)), dict(scene), what,
        )  # fmt: skip


@dataclass(frozen=True)
class SearchTally:
    """How a search went."""

    name: str
    episodes: int
    failures: int
    distinct: int
    likeliest: float | None
    """Plausibility of the likeliest failure."""
    median: float | None
    """The median of them."""

    @property
    def rate(self) -> float:
        """The share of episodes that are distinct failures."""
        return self.distinct / max(1, self.episodes)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of that share; episodes of a search that adapts are not independent."""
        return wilson_interval(self.distinct, self.episodes)


@dataclass
class StressResult:
    """A stress test: its settings, and the episodes of each search."""

    settings: dict[str, Any]
    space: DisturbanceSpace
    searches: dict[str, list[StressEpisode]]
    videos: tuple[Path, ...] = ()

    def tried(self, search: str) -> Tried:
        """Return the episodes of a search as arrays."""
        episodes = self.searches.get(search, [])
        vectors = np.array([one.vector for one in episodes]).reshape(len(episodes), len(self.space.names))
        return Tried(vectors, np.array([one.failed for one in episodes], bool))

    def failures(self, search: str) -> list[StressEpisode]:
        """Return the failures of a search, the likeliest first."""
        failed = [one for one in self.searches.get(search, []) if one.failed]
        return sorted(failed, key=lambda one: (-one.log_likelihood, one.number))

    def distinct(self, search: str) -> list[StressEpisode]:
        """Return the failures that differ, the likeliest first; of those that are alike the likeliest is kept."""
        return self._distinct_of(self.failures(search))

    def _distinct_of(self, failures: Sequence[StressEpisode]) -> list[StressEpisode]:
        if not failures:
            return []
        return [failures[number] for number in self.space.distinct(np.array([one.vector for one in failures]))]

    def likeliest(self, most: int | None = None) -> list[tuple[str, StressEpisode]]:
        """Return distinct failures of all searches together, the likeliest first, with who found them."""
        found = [(name, one) for name in self.searches for one in self.failures(name)]
        found.sort(key=lambda pair: (-pair[1].log_likelihood, pair[1].number))
        names = {one.number: name for name, one in found}
        return [(names[one.number], one) for one in self._distinct_of([one for _, one in found])[:most]]

    def tally(self, search: str) -> SearchTally:
        """Return how a search went."""
        failures = self.failures(search)
        plausible = [one.plausibility for one in failures]
        return SearchTally(
            search, len(self.searches.get(search, [])), len(failures), len(self.distinct(search)),
            max(plausible, default=None), float(np.median(plausible)) if plausible else None,
        )  # fmt: skip

    @property
    def tallies(self) -> list[SearchTally]:
        """How each search went; the one by chance comes last."""
        return [self.tally(name) for name in sorted(self.searches, key=lambda name: name == RANDOM)]

    def advantage(self, search: str) -> float | None:
        """Return how many times as many distinct failures a search found as chance; None if chance found none."""
        by_chance = self.tally(RANDOM).distinct
        return self.tally(search).distinct / by_chance if by_chance else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        summary = [
            {**asdict(tally), "rate": tally.rate, "interval": list(tally.interval),
             "advantage": None if tally.name == RANDOM else self.advantage(tally.name)}
            for tally in self.tallies
        ]  # fmt: skip
        return {
            "version": _VERSION, "settings": self.settings, "names": list(self.space.names), "summary": summary,
            "searches": {name: [asdict(one) for one in episodes] for name, episodes in self.searches.items()},
            "videos": [str(path) for path in self.videos],
        }  # fmt: skip

    def write(self, folder: Path) -> Path:
        """Write the file, in one step."""
        return write_output(folder / STRESS_FILE, json.dumps(self.to_dict()) + "\n")


def read_stress(folder: Path) -> StressResult:
    """Read what a stress test left in a folder."""
    path = folder / STRESS_FILE if folder.is_dir() else folder
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != _VERSION:
            raise ValueError(f"it is of version {found['version']}")
        searches = {
            str(name): [StressEpisode(**{**one, "vector": tuple(one["vector"])}) for one in episodes]
            for name, episodes in found["searches"].items()
        }
        space = DisturbanceSpace.from_dict(found["settings"]["space"])
        return StressResult(dict(found["settings"]), space, searches, tuple(Path(one) for one in found["videos"]))
    except FileNotFoundError:
        raise DataError(f"{folder}: there is no {STRESS_FILE}; `etude redteam robot` writes one") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not the result of a stress test ({error})") from error
