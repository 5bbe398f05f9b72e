"""What evaluations of a run found, read from the files that `etude evaluate` leaves in it. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.runs.page import format_interval, format_number, format_percent
from etude.secrets import redact

FOLDER = "evaluation"
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """How a policy did in one environment, or in all of an evaluation together."""

    name: str
    episodes: int
    successes: int | None
    """None where the environment does not tell success from failure."""
    success: float | None
    success_interval: Interval | None
    reward: float
    reward_interval: Interval | None

    @property
    def title(self) -> str:
        """What is measured: success, or reward where there is no notion of it."""
        return "reward" if self.success is None else "success"

    @property
    def value(self) -> float:
        """The figure that leads."""
        return self.reward if self.success is None else self.success

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of the figure that leads."""
        return self.reward_interval if self.success is None else self.success_interval

    def value_text(self) -> str:
        """Write the figure for people."""
        return format_number(self.value) if self.success is None else format_percent(self.value)

    def interval_text(self) -> str:
        """Write the interval for people; nothing if there is none."""
        if self.interval is None:
            return ""
        if self.success is not None:  # rounded once: 93.85 % is 93.9 % everywhere
            return format_interval(self.interval, format_percent)
        return format_interval([float(f"{end:.4g}") for end in self.interval])


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation: what was found in all, and in each environment."""

    total: Measured
    tasks: tuple[Measured, ...]
    split: str
    policy: str
    """Which checkpoint acted, in words; empty if that was not noted."""
    task_texts: tuple[str, ...] = ()
    """What was to be done, in the words of the environments."""

    @property
    def title(self) -> str:
        """What was evaluated in, in words."""
        return self.tasks[0].name if len(self.tasks) == 1 else f"{len(self.tasks)} environments"


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Return the evaluations of a run, those of the test split and newest first; files of others are passed over."""
    found: list[tuple[bool, float, Evaluation]] = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        if path.name.startswith("step-"):
            continue  # of a callback: their rates are curves already
        try:
            evaluation = _parse(json.loads(path.read_text(encoding="utf-8")))
            found.append((evaluation.split != "test", -path.stat().st_mtime, evaluation))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
            continue
    return [evaluation for *_, evaluation in sorted(found, key=lambda entry: entry[:2])]


def _parse(value: Mapping[str, Any]) -> Evaluation:
    tasks = tuple(_measured(one, str(one["name"])) for one in value["tasks"])
    policy = value.get("policy", "")
    texts = dict.fromkeys(redact(str(row["task"])) for row in value.get("rows", ()) if "task" in row)
    return Evaluation(
        _measured(value, "all"), tasks, redact(str(value["split"])), redact(policy) if isinstance(policy, str) else "",
        tuple(texts),
    )  # fmt: skip


def _measured(value: Mapping[str, Any], name: str) -> Measured:
    episodes, successes = int(value["episodes"]), value["successes"]
    success = value["success"]
    if success is not None and not (0 <= successes <= episodes and 0 <= success <= 1):
        raise ValueError(f"{successes} of {episodes} episodes cannot have succeeded")
    interval, reward_interval = value.get("interval"), value.get("reward_interval")
    reward = float(value["mean_reward"])
    if not math.isfinite(reward):
        raise ValueError("a reward is not finite")
    count, rate = (None, None) if success is None else (int(successes), float(success))
    return Measured(redact(name), episodes, count, rate, _interval(interval), reward, _interval(reward_interval))


def _interval(value: Any) -> Interval | None:
    if value is None:
        return None
    low, high = map(float, value)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None
