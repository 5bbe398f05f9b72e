"""One experiment with several seeds: a run for each, of which finished ones are kept and half ones go on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, EtudeError
from etude.runs.directory import Run
from etude.runs.progress import format_duration
from etude.sweep.plan import SweepFolder
from etude.sweep.processes import TrainingProcess, threads_of

ALIKE_TO_STOP = 3
LENGTH = ("training_steps", "duration")
"""What may change without the runs becoming others: they go on for longer."""


def parse_seeds(text: str) -> list[int]:
    """Read `5`, which is 0 to 4, or seeds one by one, as in `3,7,9`."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and not parts[-1]:
        parts.pop()  # `7,` is the seed 7 alone
    if not all(re.fullmatch(r"\d{1,18}", part) for part in parts):
        raise ConfigError(f"--seeds is a number of seeds, such as 5, or seeds such as 3,7,9; got {text!r}")
    seeds = [int(part) for part in parts]
    if "," not in text:
        if not 1 <= seeds[0] <= 1000:
            raise ConfigError(f"--seeds {text}: between 1 and 1000 seeds; write {text}, for the seed {text} alone")
        return list(range(seeds[0]))
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: a seed is there twice, and would give the same run")
    return seeds


@dataclass
class SeedQueue:
    """The runs of an experiment, one for each seed."""

    place: SweepFolder
    stem: str
    command: Sequence[str]
    """The arguments of `etude` that every run has."""
    seeds: Sequence[int]
    length: dict[str, Any]
    """How long a run must have been trained, in the words of its stored configuration."""
    jobs: int
    say: Callable[[str], None]
    failures: dict[int, str] = field(default_factory=dict)
    _next: int = 0
    _ended: int = 0
    _seconds: list[float] = field(default_factory=list)

    def run_of(self, seed: int) -> Run:
        """Return the run of a seed."""
        return Run(self.place.folder / self.name_of(seed))

    def name_of(self, seed: int) -> str:
        """Return the name of the run of a seed."""
        return f"{self.stem}-seed-{seed}"

    def is_done(self, seed: int) -> bool:
        """Tell whether the run of a seed has been trained as long as it is to be."""
        run = self.run_of(seed)
        training = run.read_config().get("training") or {}
        return run.state() == "finished" and {key: training.get(key) for key in LENGTH} == self.length

    def require_no_longer(self) -> None:
        """Refuse a length that a run is beyond: it cannot go back, and would be compared as what it is not."""
        most = None if self.length.get("duration") else self.length.get("training_steps")
        for seed in self.seeds:
            step = self.run_of(seed).status().get("step")
            if isinstance(most, int) and isinstance(step, int) and step > most:
                raise ConfigError(
                    f"{self.run_of(seed).dir} was trained for {step:,} steps already, which is more than {most:,}; ask "
                    f"for training.training_steps={step} or more, or name this one with -t NAME"
                )

    def next(self) -> TrainingProcess | None:
        """Return what to start next; None if nothing is left."""
        while self._next < len(self.seeds):
            seed = self.seeds[self._next]
            self._next += 1
            if self.is_done(seed):
                self._ended += 1
                self.say(f"seed {seed} ({self._ended}/{len(self.seeds)})  had finished before")
                continue
            name = self.name_of(seed)
            arguments = [*self.command, f"training.seed={seed}", *self.place.overrides(name)]
            return TrainingProcess(self.place.folder / name, arguments, threads_of(self.jobs))
        return None

    def look(self, process: TrainingProcess) -> None:
        """Let it train."""

    def ended(self, process: TrainingProcess, code: int) -> None:
        """Say what became of a run."""
        seed = int(process.directory.name.rpartition("-")[2])
        self._ended += 1
        self._seconds.append(time.monotonic() - process.started_s)
        left = len(self.seeds) - self._ended
        eta_s = sum(self._seconds) / len(self._seconds) * left / self.jobs
        ending = f"  ETA {format_duration(eta_s)}" if left else ""
        if code:
            self.failures[seed] = process.complaint()
        elif not self.is_done(seed):
            self.failures[seed] = "it was trained for longer before; ask for that length, or take -t NAME"
        told = f"failed: {self.failures[seed]}" if seed in self.failures else last_words(process.directory)
        self.say(f"seed {seed} ({self._ended}/{len(self.seeds)})  {told}{ending}")
        alike = {re.sub(r"\d+", "#", complaint) for complaint in self.failures.values()}
        if len(self.failures) == ALIKE_TO_STOP == self._ended and len(alike) == 1:
            raise EtudeError(f"the first {ALIKE_TO_STOP} seeds failed alike, and no more were tried: {told}")


def last_words(directory: Path) -> str:
    """Return what matters of a run, in a line."""
    from etude.runs.leading import is_quiet, lead
    from etude.runs.metrics import last_metrics
    from etude.runs.progress import format_figure

    run = Run(directory)
    latest = {name: value for name, value in last_metrics(run.metrics_path).items() if isinstance(value, int | float)}
    names = [name for name in lead(latest, run.best_metric()) if not is_quiet(name)][:2]
    return "  ".join(f"{name} {format_figure(latest[name])}" for name in names) or "finished"
