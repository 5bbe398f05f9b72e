"""Manual optimisation: the trainer's own `train_step(data)` makes the update; seeds, guard and group stay ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from etude.engines import guard
from etude.engines.sharding import local_tensor
from etude.engines.step import Totals
from etude.engines.strategy import Replicated
from etude.errors import ConfigError
from etude.rng import STREAM_STEP, fold, seed_everything
from etude.types import batch_length

if TYPE_CHECKING:
    from etude.engines.session import Session


class ManualStepper:
    """Calls `train_step`; before each optimizer's own step, gradients are averaged over ranks and must be finite."""

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
        for name, optimization in session.optimizations.items():
            optimization.optimizer.register_step_pre_hook(self._make_hook(name))

    def _make_hook(self, name: str) -> Any:
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            session = self.session
            optimization = session.optimizations[name]
            finding = guard.check_gradients(session.names, optimization.params)
            if isinstance(session.strategy, Replicated):
                session.pulse.enter("sync")
                session.group.average_([p.grad for p in optimization.params if p.grad is not None])
            _, self.norms[name] = optimization.grad_norm(1.0, session.group.sum)
            if not math.isfinite(self.norms[name]):
                guard.stop(session.group, self._step, finding, session.data.ids(self._step))
            session.pulse.enter("update")

        return before_step

    def take(self, step: int, micros: Sequence[Any], stop_signal: int, seconds: float, env_steps: int) -> Totals:
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
        loss = reported.pop("loss", 0.0)
        session.pulse.enter("sync")
        local = [loss * weight, weight, float(stop_signal), seconds if group.is_main else 0.0, float(env_steps)]
        total = group.sum(local)
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
