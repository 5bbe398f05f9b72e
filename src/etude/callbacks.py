"""Callbacks: what happens around the loop. Each hook is optional; only the ones a class defines are called."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from etude.config.training import EarlyStopping
from etude.types.duration import Duration, Progress

if TYPE_CHECKING:
    from etude.runs.progress import ProgressDisplay
    from etude.trainer import Trainer


class Callback:
    """Base of callbacks: override the hooks you need; `state_dict` is saved with the run."""

    measures: tuple[str, ...] = ()
    """Metrics that it records itself with `trainer.session.measure`, so that one of them may rank checkpoints."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Act once everything is built and restored, before the first step."""

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Act after every optimizer step; keep it cheap."""

    def on_part(self, trainer: Trainer, what: str, done: int, total: int) -> None:
        """Called within long steps, with what is done of how much: `("turns", 4, 28)`."""

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Act when training metrics are written."""

    def on_evaluate_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Act after an evaluation."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """Act after a checkpoint was handed to the writer."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Act once training has reached its length."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Act when training ends by an error or a signal."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""


class EvaluateEvery(Callback):
    """Base of callbacks that measure the policy every so often and at the end: override `evaluate`, run by rank 0."""

    def __init__(self, every: int | str) -> None:
        self.every = Duration.parse(every)
        self._before = Progress()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Remember where training goes on from."""
        self._before = trainer.progress

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Evaluate when it is due, and after the last step."""
        before, self._before = self._before, trainer.progress
        if self.every.due(before, self._before) or trainer.session.finished:
            trainer.session.measure(lambda: self.evaluate(trainer) if trainer.rank == 0 else {})

    def evaluate(self, trainer: Trainer) -> Mapping[str, float]:
        """Return the metrics to log."""
        raise NotImplementedError


class CallbackGroup:
    """Calls the callbacks in order, skipping hooks that nobody defines."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)
        self.watch_parts = [c for c in self.callbacks if type(c).on_part is not Callback.on_part]
        self.watch_steps = [c for c in self.callbacks if type(c).on_step_end is not Callback.on_step_end]

    def on_fit_start(self, trainer: Trainer) -> None:
        """Tell every callback."""
        for callback in self.callbacks:
            callback.on_fit_start(trainer)

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Tell the callbacks that watch every step."""
        for callback in self.watch_steps:
            callback.on_step_end(trainer, metrics)

    def on_part(self, trainer: Trainer, what: str, done: int, total: int) -> None:
        """Tell the callbacks that watch parts of steps."""
        for callback in self.watch_parts:
            callback.on_part(trainer, what, done, total)

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Tell every callback."""
        for callback in self.callbacks:
            callback.on_log(trainer, step, metrics)

    def on_evaluate_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Tell every callback."""
        for callback in self.callbacks:
            callback.on_evaluate_end(trainer, step, metrics)

    def on_save(self, trainer: Trainer, step: int) -> None:
        """Tell every callback."""
        for callback in self.callbacks:
            callback.on_save(trainer, step)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Tell every callback."""
        for callback in self.callbacks:
            callback.on_fit_end(trainer)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Tell every callback."""
        for callback in self.callbacks:
            callback.on_exception(trainer, error)

    def state_dict(self) -> dict[str, Any]:
        """Return the states by class name and place among callbacks of that class."""
        return {key: callback.state_dict() for key, callback in self._keyed()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each callback its own state back; a callback that is new starts fresh."""
        for key, callback in self._keyed():
            if key in states:
                callback.load_state_dict(states[key])

    def _keyed(self) -> list[tuple[str, Callback]]:
        seen: dict[str, int] = {}
        keyed = []
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, -1) + 1
            keyed.append((f"{name}-{seen[name]}", callback))
        return keyed


class EarlyStop(Callback):
    """Stop when a metric has not improved for `patience` evaluations."""

    def __init__(self, config: EarlyStopping) -> None:
        self.config = config
        self.best: float | None = None
        self.stalled = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Stay stopped when a run that had stalled is taken up again with the same patience."""
        self._stop_if_stalled(trainer)

    def on_evaluate_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Compare the watched metric with the best so far."""
        self._look(trainer, metrics, required=True)

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Watch training metrics too, if the metric is one of them."""
        if not self.config.metric.startswith("eval/"):
            self._look(trainer, metrics, required=False)

    def _look(self, trainer: Trainer, metrics: Mapping[str, float], required: bool) -> None:
        name = self.config.metric
        if name not in metrics:
            if required and name.startswith("eval/"):
                from etude.errors import ConfigError

                found = ", ".join(sorted(metrics))
                raise ConfigError(f"training.early_stopping.metric: {name!r} is not evaluated; there are {found}")
            return
        sign = -1 if self.config.mode == "min" else 1
        value = metrics[name]
        if self.best is None or sign * (value - self.best) > self.config.min_delta:
            self.best, self.stalled = value, 0
            return
        self.stalled += 1
        self._stop_if_stalled(trainer)

    def _stop_if_stalled(self, trainer: Trainer) -> None:
        if self.stalled >= self.config.patience:
            name = self.config.metric
            trainer.stop(f"early stopping: {name} has not improved on {self.best:g} in {self.stalled} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and how long it has stood."""
        return {"best": self.best, "stalled": self.stalled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the watch."""
        self.best, self.stalled = state["best"], state["stalled"]


class ShowProgress(Callback):
    """Show what matters, rate and time left: live in a terminal, plain lines elsewhere."""

    def __init__(self, display: ProgressDisplay | None = None) -> None:
        self.display = display
        self._start = (0, 0.0)
        self._shown_s = 0.0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the display."""
        from etude.runs.progress import ProgressDisplay

        self.display = self.display or ProgressDisplay()
        config = trainer.config
        self.display.training = {"best_metric": config.best_metric, "best_mode": config.best_mode}
        if not trainer.session.finished:
            self.display.message(describe_start(trainer))
        self._start = (trainer.progress.step, time.perf_counter())

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Keep a live bar moving between logs; five times a second at most."""
        now = time.monotonic()
        if now - self._shown_s > 0.2:
            self._shown_s = now
            self._show(trainer, trainer.progress.step, {})

    def on_part(self, trainer: Trainer, what: str, done: int, total: int) -> None:
        """Show how far a long step has come."""
        if self.display is not None:
            self.display.update_part(trainer.progress.step, trainer.session.total_steps, f"{what} {done}/{total}")

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Show the training metrics."""
        self._show(trainer, step, {name: value for name, value in metrics.items() if name.startswith("train/")})

    def on_evaluate_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Show the evaluation metrics."""
        self._show(trainer, step, dict(metrics))

    def _show(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if self.display is None:
            return
        total = trainer.session.total_steps
        first, then = self._start
        spent_s = max(1e-9, time.perf_counter() - then)
        # The rate is that of training alone; the time left counts evaluations too.
        rate = (step - first) / max(1e-9, spent_s - trainer.session.evaluated_s)
        eta_s = (total - step) * spent_s / (step - first) if total is not None and step > first else None
        self.display.update(step, total, metrics, rate, eta_s)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Leave the terminal clean."""
        if self.display is not None:
            self.display.close()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Leave the terminal clean."""
        if self.display is not None:
            self.display.close()


def describe_start(trainer: Trainer) -> str:
    """Return one line on what begins: parameters, samples, device and folder, as far as they are known."""
    session = trainer.session
    sizes = [(weight.numel(), weight.requires_grad) for weight in session.policy.parameters()]
    trained, total = sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
    of_all = f" of {total:,}" if trained != total else ""
    dataset = getattr(session.data, "dataset", None)
    samples = f" on {len(dataset):,} samples" if isinstance(dataset, Sized) else ""
    ranks = f", {session.group.world} ranks" if session.group.world > 1 else ""
    folder = session.record.directory
    place = f"into {folder}" if folder is not None else "keeping nothing"
    what = f"{trained:,}{of_all} parameters{samples}, device {session.group.device}{ranks}"
    elsewhere = getattr(session.policy, "trained_at", None)  # the weights are there, and only a stand-in is here
    if isinstance(elsewhere, str):
        what = f"at {elsewhere}{samples}"
    return f"training {what}, {place}"
