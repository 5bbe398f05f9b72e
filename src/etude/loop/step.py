"""One optimizer step, the same on every engine: losses of the micro-batches, guard, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from etude.loop import guard
from etude.loop.distributed import Group
from etude.loop.ema import EMA
from etude.loop.optimizers import Optimization
from etude.loop.precision import Precision
from etude.loop.strategy import Strategy
from etude.loop.watchdog import Pulse
from etude.loop.weighing import Account
from etude.rng import STREAM_STEP, fold, seed_everything
from etude.types import Updates, split_loss


@dataclass(slots=True)
class Meter:
    """Weighted means since the last log; part of the checkpoint, so that a resumed run logs the same numbers."""

    sums: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: Any, weight: float) -> None:
        """Add a mean over `weight` things; tensors on an accelerator stay there until they are read."""
        if isinstance(value, Tensor):
            value = value.item() if value.device.type == "cpu" else value.detach()
        self.sums[name] = self.sums.get(name, 0.0) + value * weight
        self.weights[name] = self.weights.get(name, 0.0) + weight

    def read(self, group: Group) -> dict[str, float]:
        """Return the means over all ranks and start anew; all ranks must call together."""
        names = sorted(self.sums)
        if group.world > 1:
            names = sorted({name for other in group.gather(names) for name in other})
        sums = group.sum([float(self.sums.get(name, 0.0)) for name in names])
        weights = group.sum([self.weights.get(name, 0.0) for name in names])
        self.sums, self.weights = {}, {}
        return {name: s / w for name, s, w in zip(names, sums, weights, strict=True) if w}

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return what was added since the last reading, on this rank."""
        return {"sums": {name: float(value) for name, value in self.sums.items()}, "weights": dict(self.weights)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on adding where the state was made."""
        self.sums, self.weights = dict(state["sums"]), dict(state["weights"])

    def take_over(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Add what another rank had added, that is no longer there."""
        for name, total in state["sums"].items():
            self.sums[name] = self.sums.get(name, 0.0) + total
            self.weights[name] = self.weights.get(name, 0.0) + state["weights"][name]


@dataclass(frozen=True, slots=True)
class Totals:
    """What one step summed over all ranks."""

    loss: float
    """Mean loss of the global batch."""
    weight: float
    stop_signal: int
    seconds: float
    """Rank 0's clock, so that all ranks agree on the time."""
    env_steps: int

    def plus(self, later: Totals) -> Totals:
        """Return the totals of two updates of one step."""
        weight = self.weight + later.weight
        loss = (self.loss * self.weight + later.loss * later.weight) / weight if weight else 0.0
        return replace(self, loss=loss, weight=weight)


class Stepper:
    """Takes optimizer steps. Holds no state but references: everything that changes lives in what it was given."""

    def __init__(
        self,
        strategy: Strategy,
        optimizations: Mapping[str, Optimization],
        names: Mapping[nn.Parameter, str],
        precision: Precision,
        ema: EMA | None,
        pulse: Pulse,
        *,
        seed: int,
        batch_size: int,
        accumulate: int,
        ids: Callable[[int], Sequence[Any]],
    ) -> None:
        self.strategy, self.group, self.precision, self.ema, self.pulse = (
            strategy,
            strategy.group,
            precision,
            ema,
            pulse,
        )
        self.optimizations, self.names, self.ids = optimizations, names, ids
        self.key = fold(seed, STREAM_STEP)
        self.nominal = batch_size * accumulate
        self.params = [p for optimization in optimizations.values() for p in optimization.params]
        self.meter = Meter()
        self.norms: dict[str, float] = {}
        self._updated = False
        self._seeds: dict[tuple[float, torch.dtype], Tensor] = {}

    def run(
        self, step: int, micros: Sequence[Any] | Updates, stop_signal: int, seconds: float, env_steps: int
    ) -> Totals:
        """Turn the micro-batches of one step into one update (or one for each group), or raise before it is made."""
        self._updated = False
        totals = self._run_groups(step, micros, stop_signal, seconds, env_steps)
        if self._updated:  # once a step, as schedules of the configuration go, however many updates it has
            for optimization in self.optimizations.values():
                optimization.step_scheduler()
        return totals

    def _run_groups(
        self, step: int, micros: Sequence[Any] | Updates, stop_signal: int, seconds: float, env_steps: int
    ) -> Totals:
        if not isinstance(micros, Updates):
            return self._run_group(step, 0, micros, stop_signal, seconds, env_steps)
        # No group at all is a step too: the ranks still agree on time and signals.
        first, *rest = micros.groups or [[]]
        totals = self._run_group(step, 0, first, stop_signal, seconds, env_steps)
        for index, group in enumerate(rest, 1):
            totals = totals.plus(self._run_group(step, index, group, 0, 0.0, 0))
        return totals

    def _run_group(
        self, step: int, update: int, micros: Sequence[Any], stop_signal: int, seconds: float, env_steps: int
    ) -> Totals:
        account, finding = self._backward(step, update, micros)
        if self.group.world > 1:
            self.pulse.enter("sync")
        clock = seconds if self.group.is_main else 0.0
        more = [float(stop_signal), clock, float(env_steps), float(finding is not None)]
        signal, clock, taken, findings = account.sum(self.group, more)
        if findings or not account.is_finite:
            at_fault = account.first_bad()
            guard.stop(self.group, step, finding or (at_fault and at_fault[1]), self.ids(step))
        if micros:
            self._update(step, account.correction(self.group.world))
        return Totals(account.mean, account.weight, int(signal), clock, int(taken))

    def _backward(self, step: int, update: int, micros: Sequence[Any]) -> tuple[Account, str | None]:
        group, pulse, strategy = self.group, self.pulse, self.strategy
        last, finding = len(micros) - 1, None
        account = Account(self.nominal, len(micros))
        pulse.enter("loss")
        for i, micro in enumerate(micros):
            # By place in the global batch, not by rank: the same micro-batch meets the same dropout on any split.
            place = i * group.world + group.rank
            seed_everything(fold(self.key, step, place, update) if update else fold(self.key, step, place))
            strategy.begin(i == last)
            finding = finding or guard.check_rewards(micro, i)
            if self.precision.casts:
                with self.precision.forward():
                    share = strategy.loss(micro)
            else:
                share = strategy.loss(micro)
            if i == last and group.world > 1:
                pulse.enter("sync")
            self._differentiate(share[0], account.add(*share))
        account.read(self.meter)
        return account, finding

    def _differentiate(self, root: Tensor, start: float) -> None:
        if self.precision.scale is not None:
            start *= self.precision.scale.value
        if start == 1.0:
            root.backward()  # type: ignore[no-untyped-call]
            return
        seed = self._seeds.get((start, root.dtype))
        if seed is None:
            seed = self._seeds[start, root.dtype] = torch.tensor(start, dtype=root.dtype, device=root.device)
        root.backward(seed)  # type: ignore[no-untyped-call]

    def _update(self, step: int, scale: float) -> None:
        self.pulse.enter("update")
        loss_scale = self.precision.scale
        if loss_scale is not None:
            scale /= loss_scale.value
        pending = {}
        for name, optimization in self.optimizations.items():
            grads, norm = optimization.grad_norm(scale, self.group.sum)
            pending[name] = (grads, norm)
            self.norms[name] = norm
        if not all(math.isfinite(norm) for norm in self.norms.values()):
            if loss_scale is None or not loss_scale.overflowed():
                guard.stop(self.group, step, guard.check_gradients(self.names, self.params), self.ids(step))
        else:
            for name, optimization in self.optimizations.items():
                optimization.set_rate(step)
                optimization.apply(*pending[name], scale)
            self._updated = True
            if loss_scale is not None:
                loss_scale.held()
            if self.ema is not None:
                self.ema.update(step)
        for param in self.params:
            param.grad = None


def make_loss_function(
    trainer: Any,
    policy: nn.Module,
    device: torch.device,
    precision: Precision,
    normalize: Callable[[Any], Any] | None = None,
) -> Callable[[Any], tuple[Tensor, int, Any, Any]]:
    """Return the function from a batch to (root, factor, weight, metrics), with no step that is not needed."""
    from etude.data.device import to_device

    moves = device.type != "cpu"
    doubles = precision.name == "float64"
    prepares = trainer.prepares_batches
    prepare, compute = trainer.prepare_batch, trainer.compute_loss

    def loss(batch: Any) -> tuple[Tensor, int, Any, Any]:
        if normalize is not None:
            batch = normalize(batch)
        if moves:
            batch = to_device(batch, device)
        if doubles:
            batch = precision.cast_batch(batch)
        if prepares:
            with torch.no_grad():
                batch = prepare(batch)
        return split_loss(compute(policy, batch), batch)

    return loss
