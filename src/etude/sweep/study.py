"""The trials of a sweep, kept by Optuna in a journal: what to try next, what to give up, and what was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.sweep.objective import Objective
from etude.sweep.space import SearchChoice, SearchSpace

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

JOURNAL = "journal.log"
SAMPLERS = ("tpe", "random", "grid", "gp")
PRUNERS = ("median", "asha", "hyperband", "none")
FEWEST_FOR_IMPORTANCE = 4
"""Finished trials from which the importance of parameters is told."""


@dataclass(frozen=True)
class TrialRecord:
    """One trial, as everything shows it."""

    number: int
    state: str
    """finished, pruned, failed or running."""
    values: Mapping[str, Any]
    value: float | None = None
    error: str = ""
    step: int | None = None
    """The step it was given up at, if it was."""
    reported: Mapping[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return name_trial(self.number)


def name_trial(number: int) -> str:
    """Return the name of a trial's run directory."""
    return f"trial-{number:04d}"


class TrialStudy:
    """An Optuna study in a folder that one process writes."""

    def __init__(
        self, folder: Path, space: SearchSpace, objective: Objective, *, sampler: str = "tpe", pruner: str = "none",
        seed: int = 0, jobs: int = 1, cadence: tuple[int, int | None] = (1, None),
    ) -> None:  # fmt: skip
        optuna = import_extra("optuna", "sweep")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self.space, self.objective = space, objective
        self._sampler, self._seed, self._jobs = sampler, seed, jobs
        self._grid = space.grid() if sampler == "grid" else []
        path = folder / JOURNAL
        _mend(path)
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend), study_name="sweep", direction=objective.direction,
            load_if_exists=True, pruner=_make_pruner(optuna.pruners, pruner, *cadence),
        )  # fmt: skip

    @property
    def grid_size(self) -> int | None:
        """How many trials there are once a grid is complete; None if it is none."""
        return len(self.study.get_trials(deepcopy=False)) + len(self._grid_left()) if self._grid else None

    def _grid_left(self) -> list[dict[str, Any]]:
        """Return the combinations that no trial has: those before may have been chosen by another sampler."""

        def written(values: Mapping[str, Any]) -> tuple[str, ...]:
            return tuple(one.write(values[one.key]) for one in self.space.parameters if one.key in values)

        known = self.study.get_trials(deepcopy=False)
        tried = {written({**one.system_attrs.get("fixed_params", {}), **one.params}) for one in known}
        return [values for values in self._grid if written(values) not in tried]

    def records(self) -> list[TrialRecord]:
        """Return every trial, in order."""
        return [_record(trial) for trial in self.study.get_trials(deepcopy=False)]

    def best(self) -> TrialRecord | None:
        """Return the best finished trial; None if none has finished."""
        found = [one for one in self.records() if one.state == "finished" and one.value is not None]
        sign = -1 if self.objective.is_large else 1
        return min(found, key=lambda one: sign * (one.value or 0.0), default=None)

    def unfinished(self) -> list[Trial]:
        """Return the trials that were under way when the sweep was stopped."""
        running = self._optuna.trial.TrialState.RUNNING
        return [self._open(one) for one in self.study.get_trials(deepcopy=False, states=(running,))]

    def ask(self) -> Trial | None:
        """Return a new trial with its values; None if a grid has no more."""
        known = self.study.get_trials(deepcopy=False)
        waiting = [one.number for one in known if one.state.name == "WAITING"]  # noted, and killed before it began
        number = waiting[0] if waiting else len(known)
        if self._grid and not waiting:
            left = self._grid_left()
            if not left:
                return None
            self.study.enqueue_trial(left[0])
        # Randomness is a function of the seed and the number: a sweep that goes on suggests what it would have.
        self.study.sampler = self._make_sampler(number)
        return self._suggest(self.study.ask())

    def _open(self, frozen: FrozenTrial) -> Trial:
        self.study.sampler = self._make_sampler(frozen.number)
        return self._suggest(self._optuna.trial.Trial(self.study, frozen._trial_id))

    def _suggest(self, trial: Trial) -> Trial:
        """Give a trial the values that it lacks."""
        for parameter in self.space.parameters:
            if isinstance(parameter, SearchChoice):
                trial.suggest_categorical(parameter.key, list(parameter.options))
            elif parameter.is_whole:
                trial.suggest_int(
                    parameter.key, int(parameter.low), int(parameter.high), step=int(parameter.step or 1),
                    log=parameter.is_log,
                )  # fmt: skip
            else:
                trial.suggest_float(
                    parameter.key, parameter.low, parameter.high, step=parameter.step, log=parameter.is_log
                )
        return trial

    def _make_sampler(self, number: int) -> BaseSampler:
        samplers, seed = self._optuna.samplers, _mix(self._seed, number)
        if self._sampler == "tpe":
            made: BaseSampler = samplers.TPESampler(seed=seed, constant_liar=self._jobs > 1)
        elif self._sampler == "gp":
            made = samplers.GPSampler(seed=seed, deterministic_objective=False)
        else:
            made = samplers.RandomSampler(seed=seed)
        return made

    def report(self, trial: Trial, step: int, value: float) -> bool:
        """Note an intermediate value; return whether the trial is to be given up."""
        known = trial.study._storage.get_trial(trial._trial_id).intermediate_values
        if step in known:
            return False
        trial.report(value, step)
        return trial.should_prune()

    def finish(self, trial: Trial, value: float) -> None:
        """Note what a trial reached."""
        self.study.tell(trial, value)

    def prune(self, trial: Trial, step: int) -> None:
        """Note that a trial was given up; its value is the last that it reported."""
        trial.set_user_attr("step", step)
        self.study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, trial: Trial, error: str) -> None:
        """Note that a trial failed, and why."""
        trial.set_user_attr("error", error)
        self.study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def importances(self) -> dict[str, float]:
        """Return the share of each parameter in what makes trials good (PED-ANOVA), the largest first.

        Empty where too few trials have finished, or all of them alike.
        """
        finished = [one for one in self.records() if one.state == "finished"]
        if len(finished) < FEWEST_FOR_IMPORTANCE or len({one.value for one in finished}) < 2:
            return {}
        found: dict[str, float] = self._optuna.importance.get_param_importances(self.study)
        return found if all(map(math.isfinite, found.values())) else {}


def _record(trial: FrozenTrial) -> TrialRecord:
    states = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
    state = states.get(trial.state.name, "running")
    error, step = trial.user_attrs.get("error", ""), trial.user_attrs.get("step")
    value = trial.value if state in ("finished", "pruned") else None
    return TrialRecord(trial.number, state, dict(trial.params), value, error, step, dict(trial.intermediate_values))


def _mix(seed: int, number: int) -> int:
    import numpy as np  # which Optuna brings; what Etude mixes seeds with elsewhere brings torch

    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def _mend(journal: Path) -> None:
    """Take back a line that a kill has torn, and a lock that it has left: the folder is locked for us."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if not journal.exists():
        return
    content = journal.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with journal.open("r+b") as file:
            file.truncate(whole)


def _make_pruner(pruners: Any, kind: str, least: int, most: int | None) -> BasePruner:
    """Return a pruner whose rungs are steps of training: the first at `least`, the last at `most`."""
    made: dict[str, Callable[[], Any]] = {
        "none": pruners.NopPruner,
        "median": pruners.MedianPruner,
        "asha": lambda: pruners.SuccessiveHalvingPruner(min_resource=least),
        "hyperband": lambda: pruners.HyperbandPruner(min_resource=least, max_resource=most or "auto"),
    }
    if kind not in made:
        raise ConfigError(f"--pruner is one of {', '.join(PRUNERS)}, got {kind!r}")
    pruner: BasePruner = made[kind]()
    return pruner
