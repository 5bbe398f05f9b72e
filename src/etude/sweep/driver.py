"""A sweep under way: trials are asked for, trained in processes of their own, watched, given up, and told."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import EtudeError
from etude.runs.directory import Run
from etude.runs.progress import format_duration, format_figure
from etude.sweep.objective import MetricTail, Objective
from etude.sweep.page import write_page
from etude.sweep.plan import SweepFolder
from etude.sweep.processes import TrainingProcess, threads_of
from etude.sweep.space import SearchSpace
from etude.sweep.study import TrialRecord, TrialStudy, name_trial

if TYPE_CHECKING:
    from optuna.trial import Trial

ALIKE_TO_STOP = 3
"""First failures for one reason after which there is no use in going on."""
PAGE_UP_TO_TRIALS = 50
"""Trials up to which the page is written after each; beyond, after every tenth."""


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep does."""

    config: str
    place: SweepFolder
    space: SearchSpace
    objective: Objective
    trials: int
    jobs: int = 1
    sampler: str = "tpe"
    pruner: str = "none"
    seed: int = 0

    def command(self, values: dict[str, object], run: str) -> list[str]:
        """Return the arguments of `etude` that train a trial in its own run directory."""
        return ["train", self.config, *self.space.overrides(values), *self.place.overrides(run)]

    def command_again(self, values: dict[str, object]) -> str:
        """Return the command that trains with the values of a trial, as one types it."""
        return shlex.join(["etude", "train", self.config, *self.space.overrides(values)])


@dataclass
class RunningTrial:
    """A trial while it is trained."""

    trial: Trial
    process: TrainingProcess
    tail: MetricTail
    last_step: int = 0


@dataclass
class SweepDriver:
    """Hands out trials and takes what became of them; who runs the processes is not its business."""

    plan: SweepPlan
    study: TrialStudy
    say: Callable[[str], None]
    running: dict[Path, RunningTrial] = field(default_factory=dict)
    width: int = 0
    """How many trials are trained at a time, if not as many as planned."""
    _to_resume: list[Trial] | None = None
    _seconds: list[float] = field(default_factory=list)
    _failures: list[str] = field(default_factory=list)

    def left(self) -> int:
        """Return how many trials are still to be started or to go on."""
        return len(self._resumed()) + max(0, self.plan.trials - len(self.study.records()))

    def _resumed(self) -> list[Trial]:
        if self._to_resume is None:
            self._to_resume = self.study.unfinished()
        return self._to_resume

    def begin(self) -> RunningTrial | None:
        """Return the next trial with its process, not yet started: one that was stopped first, then new ones."""
        if self._resumed():
            trial: Trial | None = self._resumed().pop(0)
        elif len(self.study.records()) < self.plan.trials:
            trial = self.study.ask()
        else:
            trial = None
        if trial is None:
            return None
        name = name_trial(trial.number)
        directory = self.plan.place.folder / name
        process = TrainingProcess(directory, self.plan.command(trial.params, name), threads_of(self.plan.jobs))
        self.running[directory] = RunningTrial(
            trial, process, MetricTail(Run(directory).metrics_path, self.plan.objective.metric)
        )
        return self.running[directory]

    def next(self) -> TrainingProcess | None:
        """Return what to start next; None if nothing is left."""
        begun = self.begin()
        return None if begun is None else begun.process

    def look(self, process: TrainingProcess) -> None:
        """Hand what a trial has reached to the pruner, and stop the trial if that gives it up."""
        one = self.running[process.directory]
        if any(self.report(one, step, value) for step, value in one.tail.read()):
            process.stop("pruned")

    def report(self, one: RunningTrial, step: int, value: float) -> bool:
        """Note an intermediate value of a trial; return whether it is given up."""
        one.last_step = step
        return self.study.report(one.trial, step, value)

    def ended(self, process: TrainingProcess, code: int) -> None:
        """Take what became of a trial whose process has ended."""
        one = self.running[process.directory]
        for step, value in one.tail.read():
            self.report(one, step, value)
        complaint = process.complaint() if code and process.stopped_because != "pruned" else ""
        self.settle(one, code, complaint, process.stopped_because == "pruned", time.monotonic() - process.started_s)

    def settle(self, one: RunningTrial, code: int, complaint: str, is_pruned: bool, seconds: float) -> None:
        """Tell the study what became of a trial, say it in a line, and write the page."""
        directory = one.process.directory
        del self.running[directory]
        value = self.plan.objective.score(Run(directory).metrics_path)
        if code == 0 and value is not None:
            self.study.finish(one.trial, value)
        elif is_pruned:
            self.study.prune(one.trial, one.last_step)
        else:
            complaint = complaint or self._unlogged(directory)
            self.study.fail(one.trial, complaint)
            self._failures.append(re.sub(r"\d+", "#", complaint))
        self._seconds.append(seconds)
        records = self.study.records()
        self.say(self._line(records[one.trial.number], records))
        self._write_report(directory)
        if len(records) <= PAGE_UP_TO_TRIALS or len(records) % 10 == 0:
            self.write_page()
        if self.study.best() is None:
            self._stop_if_hopeless(one.trial.number, complaint, is_unlogged=code == 0)

    def _unlogged(self, directory: Path) -> str:
        from etude.runs.metrics import read_metrics

        names = sorted({name for row in read_metrics(Run(directory).metrics_path) for name in row} - {"step"})
        listed = ", ".join(name for name in names if not name.startswith(("lr/", "time/", "grad_norm/")))
        return f"it never logged {self.plan.objective.metric}, but {listed or 'nothing'}; choose with --metric"

    def _stop_if_hopeless(self, number: int, complaint: str, *, is_unlogged: bool) -> None:
        first = self._failures[:ALIKE_TO_STOP]
        if is_unlogged:
            raise EtudeError(f"trial {number}: {complaint}")  # as every other would
        if len(first) == ALIKE_TO_STOP and len(set(first)) == 1:
            raise EtudeError(f"the first {ALIKE_TO_STOP} trials failed alike, and the sweep was stopped: {complaint}")

    def require_success(self) -> None:
        """Refuse to end well where every trial failed."""
        records = self.study.records()
        failed = [one for one in records if one.state == "failed"]
        if failed and len(failed) == len(records):
            raise EtudeError(
                f"all {len(records)} trials failed, the last one so: {failed[-1].error}; mend that and raise --trials"
            )

    def _line(self, record: TrialRecord, records: Sequence[TrialRecord]) -> str:
        """Return the line about a trial that has ended: number, value, best so far, values, time left."""
        metric, best = self.plan.objective.metric, self.study.best()
        if record.state == "failed":
            told = f"failed: {record.error}"
        else:
            found = "-" if record.value is None else format_figure(record.value)
            told = f"{metric} {found}" + (f" (pruned at step {record.step})" if record.state == "pruned" else "")
        if best is not None and best.value is not None:
            told += "  best" if best.number == record.number else f"  best {format_figure(best.value)} ({best.number})"
        ended = sum(one.state != "running" for one in records)
        left = max(0, self.plan.trials - ended)
        eta_s = sum(self._seconds) / len(self._seconds) * math.ceil(left / (self.width or self.plan.jobs))
        ending = f"  ETA {format_duration(eta_s)}" if left else ""
        values = show_values(record, self.plan.space)
        return f"trial {record.number} ({ended}/{self.plan.trials})  {told}  {values}{ending}"

    def _write_report(self, directory: Path) -> None:
        if Run(directory).exists():
            from etude.simulation.report import write_run_report

            write_run_report(directory)

    def write_page(self, *, is_last: bool = False) -> Path:
        """Write the page of the sweep; the last one tells importances, whose evaluator takes seconds to import."""
        plan = self.plan
        return write_page(
            plan.place.folder, self.study, name=plan.place.name, trials=plan.trials, command_again=plan.command_again,
            about=f"{plan.sampler} sampler, {plan.pruner if plan.pruner != 'none' else 'no'} pruner, seed {plan.seed}",
            importances=self.study.importances() if is_last else None,
        )  # fmt: skip


def show_values(record: TrialRecord, space: SearchSpace) -> str:
    """Write the values of a trial for people, each with the last part of its key."""
    keys = [one.key for one in space.parameters]
    short = {key: re.sub(r"^.*\.(?=[^.]*[^.\d])", "", key) for key in keys}  # hidden.0, and not 0
    names = {key: word if list(short.values()).count(word) == 1 else key for key, word in short.items()}
    return " ".join(f"{names[key]}={show_number(record.values[key])}" for key in keys if key in record.values)


def show_number(value: object) -> str:
    """Write a value of a parameter for people."""
    return format_figure(value) if isinstance(value, float) else str(value)
