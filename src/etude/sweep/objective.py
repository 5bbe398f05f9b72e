"""What a sweep optimises: a metric of its trials, which way, and which of its values counts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError
from etude.reading.plain import show_value
from etude.runs.leading import is_loss, prefers_large
from etude.runs.metrics import read_metrics

if TYPE_CHECKING:
    from etude.config.load import Loaded

LAST_SHARE = 0.1
"""What counts of a curve of training is the mean of its last tenth: single points are noise."""
_ROLLOUTS = ("rollouts", "environment_rollouts")


@dataclass(frozen=True)
class Objective:
    """A metric, by its name in metrics.jsonl, and whether more of it is better."""

    metric: str
    is_large: bool
    note: str = ""
    """What else to know of it."""

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluations measure it, and not every step of training."""
        return self.metric.startswith("eval/")

    @property
    def direction(self) -> str:
        """The direction in Optuna's words."""
        return "maximize" if self.is_large else "minimize"

    @property
    def mode(self) -> str:
        """The direction in the words of the command line."""
        return "max" if self.is_large else "min"

    def __str__(self) -> str:
        which = "the best evaluation" if self.is_evaluated else "the mean over the last tenth"
        return f"{self.metric}, {'more' if self.is_large else 'less'} is better, {which} of each trial"

    def score(self, metrics: Path) -> float | None:
        """Return what a trial reached by its metrics.jsonl; None if it never logged the metric as a number."""
        values = [value for _, value in points(read_metrics(metrics), self.metric)]
        if not values:
            return None
        if self.is_evaluated:
            return (max if self.is_large else min)(values)
        count = max(1, round(len(values) * LAST_SHARE))
        return sum(values[-count:]) / count

    def is_better(self, one: float, other: float) -> bool:
        """Tell whether one value is better than another."""
        return one > other if self.is_large else one < other


def points(rows: Iterable[Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Return step and value of every row that has the metric as a finite number."""
    found = [(int(row["step"]), row[metric]) for row in rows if isinstance(row.get(metric), int | float)]
    return [(step, float(value)) for step, value in found if math.isfinite(value)]


def choose_objective(
    loaded: Loaded, metric: str | None, mode: str | None, minimised: Sequence[Mapping[str, Any]] = ()
) -> Objective:
    """Return what to optimise: what was asked for, what ranks checkpoints, or what matters of this kind of training.

    Args:
        loaded: The configuration.
        metric: What was asked for.
        mode: Which way, as far as that was said.
        minimised: What trials may minimise (`what_is_minimised`). Losses that are not alike rank nothing: they are
            taken only where they are asked for, with a note.
    """
    name = metric or _leading(loaded)
    unlike = _unlike(minimised) if is_loss(name) else ""
    if unlike and metric is None:
        raise ConfigError(
            f"{unlike}: trials would minimise different losses, and the least {name} would say nothing about which is "
            "best; evaluate_in_simulation among the callbacks gives them a success to be ranked by, --metric names "
            "another metric"
        )
    note = f"{unlike}: trials minimise different losses, so that the least says little about which is best"
    training = loaded.config.training.model_dump(mode="json")
    is_large = prefers_large(name, training) if mode is None else mode == "max"
    if is_large is None:
        raise ConfigError(f"whether more of {name} is better is not known; say --mode max or --mode min")
    return Objective(name, is_large, note if unlike else "")


def _unlike(minimised: Sequence[Mapping[str, Any]]) -> str:
    """Say in which setting the losses of trials differ; nothing if they do not."""
    for name in dict.fromkeys(name for one in minimised for name in one):
        values = list(dict.fromkeys(show_value(one[name]) if name in one else "not set" for one in minimised))
        if len(values) > 1:
            return f"{name} is {', '.join(values[:-1])} or {values[-1]}"
    return ""


def _leading(loaded: Loaded) -> str:
    config = loaded.config
    if str(loaded.origin("training.best_metric")) != "default":
        return config.training.best_metric
    called = {callback.type for callback in config.callbacks}
    if "evaluate_in_simulation" in called:
        return "eval/success"
    if "evaluate_rewards" in called:
        return "eval/reward"
    if config.data is not None and config.data.type in _ROLLOUTS:
        return "train/reward"
    return "train/loss" if config.eval_data is None and config.online is None else "eval/loss"


class MetricTail:
    """Reads what a metrics.jsonl has got since it was last looked at."""

    def __init__(self, path: Path, metric: str) -> None:
        self.path, self.metric = path, metric
        self._offset_bytes = 0

    def read(self) -> list[tuple[int, float]]:
        """Return step and value of the metric in the rows that are new; a file that was cut back is read anew."""
        try:
            with self.path.open("rb") as file:
                size_bytes = file.seek(0, 2)
                if size_bytes < self._offset_bytes:
                    self._offset_bytes = 0
                file.seek(self._offset_bytes)
                content = file.read()
        except FileNotFoundError:
            return []
        whole, newline, _ = content.rpartition(b"\n")
        self._offset_bytes += len(whole) + len(newline)
        return points(_rows(whole), self.metric)


def _rows(content: bytes) -> Iterable[Mapping[str, Any]]:
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            yield row
