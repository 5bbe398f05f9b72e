"""What is measured of a session: the means of training, evaluations, and whether one is the best so far."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from etude.config.training import TrainingConfiguration
from etude.data.evaluation import evaluation_batches
from etude.errors import ConfigError
from etude.loop.step import Meter, make_loss_function
from etude.loop.weighing import Account
from etude.rng import STREAM_EVALUATE, fold, seed_everything

if TYPE_CHECKING:
    from etude.loop.session import Session

log = logging.getLogger("etude")


def training_row(session: Session) -> dict[str, float]:
    """Return the means since the last log, with rates, norms and times, and start anew; all ranks call together."""
    row = {f"train/{name}": value for name, value in session.meter.read(session.group).items()}
    row["epoch"] = session.progress.epochs
    for name, optimization in session.optimizations.items():
        row[f"lr/{name}"] = optimization.lr
        if name in session.stepper.norms:
            row[f"grad_norm/{name}"] = session.stepper.norms[name]
    if session.precision.scale is not None:
        row["loss_scale"] = session.precision.scale.value
    step, then = session._lap
    now = time.perf_counter()
    steps = session.progress.step - step
    row["time/step_ms"] = (now - then) * 1000 / max(1, steps)
    row["time/elapsed_s"] = session.progress.seconds
    timings = getattr(session.data, "timings", {})
    row |= {f"time/{name}_ms": timings[name] * 1000 / max(1, steps) for name in timings}
    timings.clear()
    session._lap = (session.progress.step, now)
    return row


def measured(session: Session, evaluate: Callable[[], Mapping[str, float]]) -> tuple[dict[str, float], float]:
    """Return what a function finds of the weights to be shown, and the seconds it took; all ranks call together."""
    began = time.perf_counter()
    session.strategy.synchronise_buffers()
    seed_everything(fold(session.config.seed, STREAM_EVALUATE, session.group.rank))
    session.policy.eval()
    with session.shown_weights(), torch.no_grad():
        found: Any = evaluate()
    session.set_train_mode()
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"evaluate must return a dictionary of numbers, got {type(found).__name__}")
    named = {name if "/" in name else f"eval/{name}": float(value) for name, value in (found or {}).items()}
    # Rank 0 speaks for all: what differs between ranks was summed inside.
    row: dict[str, float] = session.group.gather(named)[0]
    return row, time.perf_counter() - began


def mean_losses(session: Session) -> dict[str, float]:
    """Return the mean loss and metrics over one pass of the evaluation data, over all ranks."""
    meter = Meter()
    key = fold(session.config.seed, STREAM_EVALUATE)
    batches = evaluation_batches(session.trainer.eval_data, session.place, session.config.evaluate_batches)
    loss = make_loss_function(
        session.trainer, session.policy, session.group.device, session.precision, session.normalize
    )
    for number, batch in enumerate(batches):
        session.pulse.enter("evaluate")
        seed_everything(fold(key, number * session.group.world + session.group.rank))
        account = Account(1.0, 1)
        with session.precision.forward():
            account.add(*loss(batch))
        account.read(meter)
    return meter.read(session.group)


def is_better(config: TrainingConfiguration, value: float, best: float | None) -> bool:
    """Tell whether a value of the best metric is better than the best so far, where the best are kept."""
    sign = -1 if config.best_mode == "min" else 1
    return bool(config.keep_best and not math.isnan(value) and (best is None or sign * value > sign * best))


def says_unranked(session: Session, row: Mapping[str, float]) -> bool:
    """Say it if an evaluation lacks what ranks checkpoints, and return whether it does; refuse what was asked for."""
    config, wanted = session.config, session.config.best_metric
    elsewhere = any(wanted in callback.measures for callback in session.callbacks.callbacks)
    if not row or wanted in row or elsewhere:
        return False
    if "best_metric" in config.model_fields_set:
        raise ConfigError(f"training.best_metric: {wanted!r} is not evaluated; there are {', '.join(row)}")
    if session.group.is_main and config.keep_best:
        log.warning(
            "evaluate() returned %s, but checkpoints are ranked by %s: none is kept as the best; return that, or "
            "set training.best_metric and training.best_mode",
            ", ".join(row), wanted,
        )  # fmt: skip
    return True
