"""What an evaluation found: one row an episode, a rate with its interval, a table of tasks; as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.runs.statistics import Z95, student_quantile

if TYPE_CHECKING:
    from etude.simulation.diagnosis import Diagnosis

DIAGNOSIS = ".diagnosis.safetensors"
"""What the file is called that tells why episodes failed, after the results that it belongs to."""


def wilson_interval(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Return Wilson's interval of a success rate (95 % unless told); (0, 1) without trials."""
    if trials < 0 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials cannot be")
    if not trials:
        return 0.0, 1.0
    rate, scale = successes / trials, 1 + z * z / trials
    centre = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    low, high = (centre - spread) / scale, (centre + spread) / scale
    # All or nothing reaches the end of the scale, which rounding would miss.
    return (0.0 if not successes else max(0.0, low)), (1.0 if successes == trials else min(1.0, high))


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of a mean; None where fewer than two values, or infinite ones, say nothing."""
    count = len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return None
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    reach = student_quantile(count - 1) * deviation / math.sqrt(count)
    return mean - reach, mean + reach


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """How one episode went. A function of the policy, the environment and the seed; no times of day, no rates."""

    env: str
    task: str
    episode: int
    """Its number within the split."""
    seed: int
    success: bool | None
    """None where the environment has no notion of success."""
    steps: int
    reward: float
    """Sum of the rewards."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A success rate with what it rests on; where there is no notion of success, the reward alone says something."""

    name: str
    episodes: int
    successes: int
    mean_steps: float
    mean_reward: float
    reward_interval: tuple[float, float] | None = None
    """Student's 95 % interval of the mean reward; None for a single episode."""
    knows_success: bool = True

    @property
    def success(self) -> float:
        """The share of episodes that succeeded; 0 where there is no notion of success."""
        return self.successes / self.episodes if self.episodes else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval."""
        return wilson_interval(self.successes, self.episodes)

    @classmethod
    def of(cls, name: str, rows: Sequence[EpisodeRow]) -> Rate:
        """Sum up episodes."""
        count = max(1, len(rows))
        steps, reward = sum(row.steps for row in rows) / count, math.fsum(row.reward for row in rows) / count
        knows = not rows or any(row.success is not None for row in rows)
        interval = mean_interval([row.reward for row in rows])
        return cls(name, len(rows), sum(bool(row.success) for row in rows), steps, reward, interval, knows)

    def __str__(self) -> str:
        if not self.knows_success:
            found, ends = f"mean reward {self.mean_reward:.4g} of {self.episodes} episodes", self.reward_interval
            return found if ends is None else f"{found} (95 % interval {ends[0]:.4g} to {ends[1]:.4g})"
        low, high = self.interval
        return f"{self.successes}/{self.episodes} = {self.success:.1%} (95 % interval {low:.1%} to {high:.1%})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        found = {name: value for name, value in asdict(self).items() if name != "knows_success"}
        if not self.knows_success:
            return {**found, "successes": None, "success": None, "interval": None}
        return {**found, "success": self.success, "interval": list(self.interval)}


@dataclass(frozen=True)
class EvaluationResult:
    """The outcome of an evaluation; `rows` and everything derived from them are the same each time."""

    rows: tuple[EpisodeRow, ...]
    split: str
    seed: int
    timing: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds, rates and latencies of this very run."""
    videos: tuple[Path, ...] = field(default=(), compare=False)
    policy: str = field(default="", compare=False)
    """Which policy acted, in words, such as "best checkpoint, step 4000"."""
    diagnosis: Diagnosis | None = field(default=None, compare=False, repr=False)
    """Why episodes failed, where that was asked for."""

    @property
    def total(self) -> Rate:
        """The rate over all episodes."""
        return Rate.of("all", self.rows)

    @property
    def success(self) -> float:
        """The share of episodes that succeeded."""
        return self.total.success

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the success rate."""
        return self.total.interval

    @property
    def tasks(self) -> list[Rate]:
        """The rate of each environment, in the order they were asked for."""
        names = dict.fromkeys(row.env for row in self.rows)
        return [Rate.of(name, [row for row in self.rows if row.env == name]) for name in names]

    def metrics(self) -> dict[str, float]:
        """Return what to log: success where there is a notion of it, of each environment too, steps and reward."""
        total = self.total
        found = {"success": total.success} if total.knows_success else {}
        found |= {"steps": total.mean_steps, "reward": total.mean_reward}
        if len(self.tasks) > 1:
            found |= {f"success_{rate.name}": rate.success for rate in self.tasks if rate.knows_success}
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "split": self.split,
            "seed": self.seed,
            "policy": self.policy,
            **{key: value for key, value in self.total.to_dict().items() if key != "name"},
            "tasks": [rate.to_dict() for rate in self.tasks],
            "rows": [asdict(row) for row in self.rows],
            "videos": [str(path) for path in self.videos],
            "timing": dict(self.timing),
            **({} if self.diagnosis is None else {"failures": [asdict(group) for group in self.diagnosis.groups]}),
        }

    def keep(self, stem: Path) -> None:
        """Write everything as STEM.json, STEM.csv and, where there is one, the diagnosis; an older one goes."""
        self.to_json(stem.with_name(stem.name + ".json"))
        self.to_csv(stem.with_name(stem.name + ".csv"))
        diagnosis = stem.with_name(stem.name + DIAGNOSIS)
        if self.diagnosis is None:
            diagnosis.unlink(missing_ok=True)
        else:
            self.diagnosis.write(diagnosis)

    def to_json(self, path: Path | None = None) -> str:
        """Return the result as JSON, and write it if a path is given."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        return _written(text, path)

    def to_csv(self, path: Path | None = None) -> str:
        """Return the episodes as CSV, one a line, and write it if a path is given."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        names = [column.name for column in fields(EpisodeRow)]
        writer.writerow(names)
        for row in self.rows:
            writer.writerow([int(value) if isinstance(value, bool) else value for value in asdict(row).values()])
        return _written(stream.getvalue(), path)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> EvaluationResult:
        """Return the result that `to_dict` described."""
        rows = tuple(EpisodeRow(**row) for row in value["rows"])
        videos = tuple(Path(path) for path in value["videos"])
        return cls(rows, value["split"], value["seed"], value["timing"], videos, str(value.get("policy", "")))


def film_name(row: EpisodeRow) -> str:
    """Return the file name of the film of an episode."""
    plain = "".join(character if character.isalnum() or character in "-_." else "_" for character in row.env)
    outcome = "episode" if row.success is None else "success" if row.success else "failure"
    return f"{plain}-{row.episode:03d}-{outcome}.mp4"


def _written(text: str, path: Path | None) -> str:
    if path is not None:
        from etude.runs.durable import write_output

        write_output(path, text)
    return text
