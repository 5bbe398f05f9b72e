"""Trials of a sweep as trials of Ray Tune; what to try and what was found stays with the sweep's own journal.

Ray Tune places the trials and watches them. Each is an actor that runs the ordinary training command as a child. The
run directories must be on a file system that all nodes share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from etude.engines.ray import cluster
from etude.errors import EtudeError
from etude.loop.signals import StopSignals
from etude.runs.directory import Run
from etude.sweep.driver import RunningTrial, SweepDriver
from etude.sweep.objective import MetricTail
from etude.sweep.processes import LOOK_EVERY_S, TrainingProcess

ANSWER_EVERY_S = 1.0
"""How long a trial may keep Ray Tune waiting, which can stop it only between two answers."""
QUIET: Mapping[str, str] = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "600",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Settings of Ray Tune's: what is logged and when it stops is ours to say."""


class TrialTrainable(tune.Trainable):
    """One training, as an actor of Ray Tune."""

    def setup(self, config: dict[str, Any]) -> None:
        """Start the training."""
        folder = Path(config["folder"])
        self.process = TrainingProcess(folder / config["directory"], config["arguments"], folder=folder)
        self.tail = MetricTail(Run(self.process.directory).metrics_path, config["metric"])
        self.process.start()

    def step(self) -> dict[str, Any]:
        """Wait for an evaluation or the end, and answer before long in any case."""
        until_s = time.monotonic() + ANSWER_EVERY_S
        while True:
            code = self.process.poll()
            found = self.tail.read()
            if found or code is not None or time.monotonic() > until_s:
                told = self.process.complaint() if code else ""
                seconds = time.monotonic() - self.process.started_s
                news = {"points": found, "code": code, "complaint": told, "seconds": seconds}
                return {"news": json.dumps(news), "done": code is not None}
            time.sleep(LOOK_EVERY_S)

    def cleanup(self) -> None:
        """Let the training save and end."""
        self.process.end("stopped")


class _Forgotten:
    """What Ray Tune would keep in files of its own: nothing, for the journal has it all."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class JournalSearcher(_Forgotten, Searcher):
    """Hands the trials of a sweep to Ray Tune, and takes what became of them."""

    def __init__(self, driver: SweepDriver) -> None:
        super().__init__()
        self.driver = driver
        self.begun: dict[str, RunningTrial] = {}
        self.raised: EtudeError | None = None

    def suggest(self, trial_id: str) -> Any:
        """Return what a trial needs to know; the end if there are no more."""
        begun = None if self.raised else self.driver.begin()
        if begun is None:
            return Searcher.FINISHED
        self.begun[trial_id] = begun
        process = begun.process
        return {
            "folder": os.getcwd(), "directory": str(process.directory), "arguments": process.arguments,
            "metric": begun.tail.metric,
        }  # fmt: skip

    def look(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Hand what a trial has reached to the pruner; return whether that gives it up."""
        begun = self.begun[trial_id]
        reports = [self.driver.report(begun, step, value) for step, value in _news(result)["points"]]
        if any(reports):
            begun.process.stopped_because = "pruned"
        return any(reports)

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Take what became of a trial; one that was only stopped goes on another time."""
        begun = self.begun.pop(trial_id)
        news = _news(result or {})
        is_pruned = begun.process.stopped_because == "pruned"
        if not is_pruned:
            for step, value in news["points"]:
                self.driver.report(begun, step, value)
        if news["code"] is None and not is_pruned and not error:
            del self.driver.running[begun.process.directory]
            return
        complaint = "its Ray worker was lost" if error else news["complaint"]
        code = 1 if news["code"] is None else news["code"]
        try:
            self.driver.settle(begun, code, complaint, is_pruned, news["seconds"])
        except EtudeError as failure:  # Ray Tune would make a failed trial of it
            self.raised = failure

    def save(self, checkpoint_path: str) -> None:
        """Keep nothing."""

    def restore(self, checkpoint_path: str) -> None:
        """Know nothing of earlier."""


def _news(result: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.get("news") or "{}")
    return {"points": [], "code": None, "complaint": "", "seconds": 0.0} | found


class PruningScheduler(_Forgotten, FIFOScheduler):
    """Starts trials in their order, and stops those that the pruner of the sweep gives up."""

    def __init__(self, searcher: JournalSearcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.searcher = searcher

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return whether a trial goes on."""
        is_over = self.searcher.look(trial.trial_id, result)
        return TrialScheduler.STOP if is_over else TrialScheduler.CONTINUE


class AskedToStop(_Forgotten, tune.Stopper):
    """Ends everything after a signal, at the deadline, or when there is no use in going on."""

    def __init__(self, searcher: JournalSearcher, signals: StopSignals, deadline_s: float | None) -> None:
        self.searcher, self.signals, self.deadline_s = searcher, signals, deadline_s

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Leave single trials to the scheduler."""
        return False

    def stop_all(self) -> bool:
        """Tell whether to end."""
        return bool(self.reason())

    def reason(self) -> str:
        """Return why it must end; nothing if it need not."""
        if self.searcher.raised is not None:
            return "failed"
        if self.signals.received:
            return "interrupted"
        return "timeout" if self.deadline_s is not None and time.monotonic() > self.deadline_s else ""


def run_on_ray(driver: SweepDriver, jobs: int | None, signals: StopSignals, deadline_s: float | None) -> str:
    """Train what is left of a sweep with Ray Tune, as `run_queue` does in processes of this machine."""
    samples = driver.left()
    if samples == 0:
        return "finished"
    searcher = JournalSearcher(driver)
    stopper = AskedToStop(searcher, signals, deadline_s)
    with cluster.quiet(), _settings(), cluster.connected(None, jobs or 1, use_gpu=True) as folder:
        resources: Mapping[str, float] = cluster.untyped.cluster_resources()
        driver.width = min(jobs or samples, samples, max(1, int(resources.get("CPU", 1))))
        tune.run(
            TrialTrainable, name="sweep", search_alg=searcher, scheduler=PruningScheduler(searcher), stop=stopper,
            num_samples=samples, max_concurrent_trials=jobs or 0, verbose=0, raise_on_failed_trial=False,
            resources_per_trial={"cpu": 1, "gpu": 1 if resources.get("GPU") else 0}, storage_path=str(folder / "tune"),
        )  # fmt: skip
    if searcher.raised is not None:
        raise searcher.raised
    return stopper.reason() or "finished"


@contextmanager
def _settings() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
