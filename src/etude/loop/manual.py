"""Manual optimisation: the trainer's own `train_step(data)` makes the update; seeds, guard and group stay ours."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from etude.errors import ConfigError
from etude.loop import guard
from etude.loop.exchange import GradientExchange
from etude.loop.sharding import local_tensor
from etude.loop.step import Totals
from etude.loop.strategy import Replicated
from etude.rng import STREAM_INIT, STREAM_STEP, fold, seed_everything
from etude.types import batch_length

if TYPE_CHECKING:
    from etude.loop.session import Session


COUNTERS = ("epoch", "total_epochs", "iterations")
"""What a `train_step(data, **kwargs)` may ask for beside the batch."""


def wanted_arguments(train_step: Callable[..., Any]) -> list[str]:
    """Return the counters that a `train_step` takes by name."""
    parameters = list(inspect.signature(train_step).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(COUNTERS)
    return [p.name for p in parameters if p.name in COUNTERS]


class ManualStepper:
    """Calls `train_step`; gradients are averaged over ranks, and must be finite before each optimizer's own step."""

    def __init__(self, session: Session) -> None:
        config = session.config
        if config.gradient_accumulation_steps != 1:
            raise ConfigError(
                "training.gradient_accumulation_steps: a trainer with its own train_step accumulates by itself; use 1"
            )
        if config.precision == "fp16":
            raise ConfigError(
                "training.precision: fp16 needs a loss scale, which train_step would bypass; use bf16 or float32"
            )
        self.session = session
        self.norms: dict[str, float] = {}
        self._step = 0
        self._exchange: GradientExchange | None = None
        if isinstance(session.strategy, Replicated):
            self._exchange = GradientExchange(session.group, session.optimizations, session.names, session.pulse)
            session.at_exit(self._exchange.close)
        for name, optimization in session.optimizations.items():
            optimization.optimizer.register_step_pre_hook(self._make_hook(name))

        start = getattr(session.trainer, "start_manual", None)
        if start is not None:
            seed_everything(fold(config.seed, STREAM_INIT, 2))
            start()

    def _make_hook(self, name: str) -> Any:
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            session = self.session
            optimization = session.optimizations[name]
            if self._exchange is not None:
                self._exchange.before_step(name)
            _, self.norms[name] = optimization.grad_norm(1.0, session.group.sum)
            if not math.isfinite(self.norms[name]):
                if self._exchange is not None:
                    finding = self._exchange.finding
                else:
                    finding = guard.check_gradients(session.names, optimization.params)
                guard.stop(session.group, self._step, finding, session.data.ids(self._step))
            session.pulse.enter("update")

        return before_step

    def run(self, step: int, micros: Sequence[Any], stop_signal: int, seconds: float, env_steps: int) -> Totals:
        """Run the trainer's own step and collect what it reports."""
        session, group = self.session, self.session.group
        (batch,) = micros
        self._step = step
        finding = guard.check_rewards(batch, 0)
        for optimization in session.optimizations.values():
            optimization.set_rate(step)
        seed_everything(fold(session.config.seed, STREAM_STEP, step, group.rank))
        session.pulse.enter("loss")
        if finding is None:
            with session.precision.forward():
                reported = self._plain(session.trainer.run_train_step(batch))
        else:
            reported = {"loss": math.nan}
        for optimization in session.optimizations.values():
            optimization.step_scheduler()
        if session.ema is not None:
            session.ema.update(step)
        weight = float(batch_length(batch))
        # A trainer that reports no `loss` may report the `total` of several.
        loss = reported.pop("loss") if "loss" in reported else reported.get("total", 0.0)
        session.pulse.enter("sync")
        local = [loss * weight, weight, float(stop_signal), seconds if group.is_main else 0.0, float(env_steps)]
        total = group.sum(local) if self._exchange is None else self._exchange.end_step(local)
        if not math.isfinite(total[0]):
            guard.stop(group, step, finding or guard.check_losses([loss]), session.data.ids(step))
        for name, value in {"loss": loss, **reported}.items():
            session.meter.add(name, value, weight)
        return Totals(total[0] / total[1] if total[1] else 0.0, total[1], int(total[2]), total[3], int(total[4]))

    @staticmethod
    def _plain(reported: Any) -> dict[str, float]:
        if isinstance(reported, Tensor | float | int):
            reported = {"loss": reported}
        if not isinstance(reported, Mapping):
            raise ValueError(f"train_step must return a dictionary of numbers, got {type(reported).__name__}")
        numbers = {
            str(key): local_tensor(v).item() if isinstance(v, Tensor) and v.numel() == 1 else v
            for key, v in reported.items()
        }
        return {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}
