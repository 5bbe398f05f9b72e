"""A session: everything that is alive while one rank trains, from the first look at the run directory to the last save.

Engines own the outer loop; a session gives them its parts: `open`, `take_step` until `finished`, `close`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from etude.callbacks import Callback, CallbackGroup, EarlyStop, ShowProgress
from etude.data.histories import choose_windows
from etude.data.statistics import NormStats
from etude.errors import CheckpointError, ConfigError, Interrupted, RankError, ShortRunError, exits_refused, one_line
from etude.loop import guard, measuring, provenance, state
from etude.loop.distributed import Group
from etude.loop.ema import EMA
from etude.loop.manual import ManualStepper
from etude.loop.optimizers import Optimization, freeze, shown_weights
from etude.loop.precision import Precision
from etude.loop.record import Record
from etude.loop.sharding import local_tensor
from etude.loop.signals import StopSignals
from etude.loop.step import Meter, Stepper, make_loss_function
from etude.loop.strategy import Strategy, count_parameters
from etude.loop.threads import choose_threads
from etude.loop.watchdog import Pulse, Watchdog
from etude.low_precision import require_low_precision, require_low_precision_of
from etude.policies.normalize import act_in_data_units
from etude.policies.origin import PolicyOrigin, set_origin
from etude.rng import STREAM_INIT, STREAM_ROLLOUT, fold, seed_everything
from etude.rollouts.measures import timed
from etude.rollouts.updates import learn_from
from etude.types import Result, Rollouts, Updates
from etude.types.duration import Duration, Progress
from etude.types.protocols import Place

if TYPE_CHECKING:
    from etude.trainer import Trainer

log = logging.getLogger("etude")


class Session:
    """One rank's part in one call of `fit`."""

    def __init__(
        self, trainer: Trainer, group: Group, strategy: Strategy, stepper: Callable[[Session], Stepper] | None = None
    ) -> None:
        self.trainer, self.config, self.group, self.strategy = trainer, trainer.config, group, strategy
        self._own_stepper = stepper
        self.progress = Progress()
        self.meter = Meter()
        self.pulse = Pulse()
        self.signals = StopSignals()
        self.stopping: str | None = None
        self.metrics: dict[str, float] = {}
        self.best: float | None = None
        self._evaluated_at = self._ranked_at = self._saved_at = -1
        self._is_best = self._said_unranked = False
        self.evaluated_s = 0.0
        """Seconds of this session that went into evaluating, which rates of training leave out."""
        self._exits = ExitStack()
        self.is_open = False

    # -- life ---------------------------------------------------------------------------------------------------

    def open(self, resume: str | Path) -> None:
        """Build everything, take up the newest good checkpoint if there is one, and start the watch."""
        trainer, config, group = self.trainer, self.config, self.group
        trainer.session = self
        self.is_open = True
        watchdog = Watchdog(group.rank, group.world, self.pulse, config.hang_timeout_s)
        self.watchdog = self._exits.enter_context(watchdog)
        self._exits.enter_context(self.signals)
        self.record = self._exits.enter_context(Record(trainer, group, resume, self.strategy.is_sharded))
        checkpoint = self.record.find_checkpoint(resume)
        if checkpoint is None and (missing := getattr(trainer.policy, "unloaded", "")):
            raise CheckpointError(f"{missing}, and no checkpoint that would have the weights")
        self.place = Place(
            config.seed, group.rank, group.world, config.batch_size, config.gradient_accumulation_steps,
            config.num_workers, config.shuffle, state.order_version(checkpoint), config.prefetch_factor,
            config.pin_memory,
        )  # fmt: skip
        self.data = trainer.data
        choose_windows(trainer.policy, self.data, trainer.eval_data)
        self.data.open(self.place)
        self._exits.callback(self.data.close)
        self._build_policy()
        self._build_callbacks()
        self._odd = guard.odd_from_the_start(self.policy)
        self.provenance = provenance.describe_trainer(trainer) if group.is_main else {}
        changed: list[str] = []
        if checkpoint is not None:
            state.restore(self, checkpoint)
            if group.is_main:
                changed = provenance.changes(checkpoint["session"].get("provenance"), self.provenance)
        idle = checkpoint is not None and self.finished
        self.record.start(self.progress, count_parameters(self.policy), changed, idle=idle)
        if self.statistics is not None and not idle:
            self.record.write_statistics(self.statistics.to_json())
        if not trainer.is_manual and not self.finished:
            self._settle()
        self.callbacks.on_fit_start(trainer)
        if checkpoint is not None and self.finished:
            self.record.say_finished(self.progress, self.stopping or f"reached its {self.length}")
        self._clock = time.perf_counter() - self.progress.seconds
        self._lap = (self.progress.step, time.perf_counter())
        self._first_step = self.progress.step

    def _build_policy(self) -> None:
        trainer, config = self.trainer, self.config
        self.policy: nn.Module = trainer.policy
        require_low_precision(config.precision, self.group.device)  # before any layer calculates
        seed_everything(fold(config.seed, STREAM_INIT))
        if getattr(self.policy, "is_built", True) is False:
            if self.data.spec is None and getattr(self.policy, "needs_spec", True):
                raise ConfigError(
                    "the policy takes its shapes from the data, but the data has no spec; give the policy's shapes"
                )
            self.strategy.build(self.policy, self._make_policy)
        self.precision = Precision(config.precision, self.group.device)
        self.precision.convert(self.policy)
        require_low_precision_of(self.policy)
        before = choose_threads(self.policy, config.num_threads, self.group.device)
        self._exits.callback(torch.set_num_threads, before)
        self.frozen = freeze(self.policy, config.freeze)
        if config.compile:
            self.policy.compile()
        self._use_statistics()
        loss = make_loss_function(trainer, self.policy, self.group.device, self.precision, self.normalize)
        self.strategy.spread(self.policy, loss, manual=trainer.is_manual)
        self.ema = EMA(self.policy, config.ema_decay) if config.ema_decay else None
        self.names: dict[nn.Parameter, str] = {parameter: name for name, parameter in self.policy.named_parameters()}
        self.optimizations: dict[str, Optimization] = trainer.make_optimizations()
        self.stepper = self._make_stepper()
        self.set_train_mode()
        attached: list[Any] = [trainer.algorithm, self.data, trainer.eval_data]
        for part in attached:
            if hasattr(part, "attach"):
                part.attach(trainer)

    def _make_policy(self) -> None:
        seed_everything(fold(self.config.seed, STREAM_INIT))
        self.policy.build(self.data.spec)  # type: ignore[operator]

    def _use_statistics(self) -> None:
        """Normalise batches by the statistics that came with the data, unless the policy normalises by itself."""
        given = getattr(self.data, "norm_stats", None)
        inside = hasattr(self.policy, "normalizer")
        own: NormStats | None = getattr(self.policy, "statistics", None)  # those of the spec
        self.statistics = NormStats.from_any(given) if given is not None and not inside else own
        self.normalize = None if self.statistics is None else self.statistics.normalize
        if self.statistics is not None:
            act_in_data_units(self.policy, self.statistics)

    def _make_stepper(self) -> Stepper | ManualStepper:
        config = self.config
        if self._own_stepper is not None:
            return self._own_stepper(self)
        if self.trainer.is_manual:
            return ManualStepper(self)
        stepper = Stepper(
            self.strategy, self.optimizations, self.names, self.precision, self.ema, self.pulse, seed=config.seed,
            batch_size=config.batch_size, accumulate=config.gradient_accumulation_steps, ids=self.data.ids,
        )  # fmt: skip
        stepper.meter = self.meter
        return stepper

    def _settle(self) -> None:
        if self.group.world > 2:
            parts: list[Any] = [part for part in (self.data, self.trainer.algorithm) if hasattr(part, "state_dict")]
            kept = [part.state_dict() for part in parts]
            micros = self._fetch(self.progress.step)
            for part, state_before in zip(parts, kept, strict=True):
                part.load_state_dict(state_before)
            seed_everything(fold(self.config.seed, STREAM_INIT, self.group.rank))
            # A step may have no update, as long as there is too little to learn from.
            if first := next(iter(micros), []) if isinstance(micros, Updates) else micros:
                with self.precision.forward():
                    self.strategy.settle(first[0])

    def _build_callbacks(self) -> None:
        stopping = self.config.early_stopping
        callbacks: list[Callback] = [*self.trainer.callbacks, *([EarlyStop(stopping)] if stopping is not None else [])]
        if self.group.is_main and self.trainer.show_progress:
            callbacks.append(ShowProgress())
        self.callbacks = CallbackGroup(callbacks)

    def at_exit(self, function: Callable[[], Any]) -> None:
        """Have something done when the session ends, however it does."""
        self._exits.callback(function)

    def close(self, error: BaseException | None) -> None:
        """End the session; `error` says why, if it did not end well. What goes wrong here never hides that."""
        self.is_open = False
        ends: list[Callable[[], Any]] = [lambda: self._exits.__exit__(type(error) if error else None, error, None)]
        if hasattr(self, "record"):
            ends.insert(0, lambda: self.record.finish(self.progress, error, self.stopping))
        if error is not None and hasattr(self, "callbacks"):
            ends.insert(0, lambda: self.callbacks.on_exception(self.trainer, error))
        failure: BaseException | None = None
        for end in ends:
            try:
                end()
            except BaseException as later:  # noqa: BLE001 - a callback may raise anything, and the rest must end too
                failure = failure or later
        if failure is not None and error is None:
            raise failure
        if failure is not None:
            log.warning("ending the run failed too: %s: %s", type(failure).__name__, one_line(failure))

    @contextmanager
    def running(self, resume: str | Path) -> Iterator[Session]:
        """Open the session, close it however the block ends, and turn a peer's death into a clear error."""
        failure: BaseException | None = None
        try:
            with exits_refused(lambda: f"step {self.progress.step}, before the requested {self.length}"):
                self.open(resume)
                yield self
        except BaseException as error:
            failure = error
            fault = self.watchdog.explain(error) if hasattr(self, "watchdog") else None
            if fault:
                failure = RankError(f"{fault}; ending rank {self.group.rank}")
                raise failure from error
            raise
        finally:
            self.close(failure)

    # -- time ---------------------------------------------------------------------------------------------------

    @property
    def length(self) -> Duration:
        """The requested length of the run."""
        return self.config.length

    @property
    def total_steps(self) -> int | None:
        """The length in optimizer steps, if it can be known beforehand."""
        length = self.length
        if length.unit == "steps":
            return int(length.value)
        if length.unit == "epochs":
            per_step = self.data.epochs(1) or self.data.epochs(1000) / 1000
            return math.ceil(length.value / per_step) if per_step else None
        return None

    def counters(self) -> dict[str, float | None]:
        """Return the epoch that is under way, how many there are to be if that is known, and the steps made."""
        per_step, steps = self.data.epochs(1000) / 1000, self.total_steps
        length = self.length
        total = length.value if length.unit == "epochs" else None if steps is None else steps * per_step
        epochs = math.ceil(total - 1e-9) if total else None
        # A hair is added because the end of an epoch is a sum of fractions.
        return {"epoch": int(self.progress.epochs + 1e-9), "total_epochs": epochs, "iterations": self.progress.step}

    @property
    def finished(self) -> bool:
        """Whether the requested length is reached, or something asked to stop for a reason."""
        return self.stopping is not None or self.length.reached(self.progress)

    def take_step(self) -> None:
        """Take one optimizer step and whatever is due after it: log, evaluate, save, stop."""
        before, config = self.progress, self.config
        step = before.step
        self.pulse.step = step
        micros = self._fetch(step)
        for part in (self.data, self.trainer.algorithm):
            reported = getattr(part, "metrics", None)
            for name, (mean, weight) in reported.items() if isinstance(reported, Mapping) else ():
                self.meter.add(name, mean, weight)
        totals = self.stepper.run(
            step, micros, self.signals.received, time.perf_counter() - self._clock, getattr(self.data, "env_steps", 0)
        )
        now = self.progress = Progress(
            step + 1, self.data.epochs(step + 1), before.tokens + totals.weight, totals.env_steps, totals.seconds
        )
        self.pulse.longest_step_s = max(self.pulse.longest_step_s, now.seconds - before.seconds)
        if before.step == self._first_step and config.save_every is not None:
            self.record.reserve(state.collect(self))
        if self.callbacks.watch_steps:
            self.callbacks.on_step_end(self.trainer, {"loss": totals.loss})
        if config.log_every.due(before, now):
            self.log_training()
        if config.evaluate_every is not None and config.evaluate_every.due(before, now):
            self.evaluate()
        if self.finished:
            self._wrap_up()
        elif self._is_best or (config.save_every is not None and config.save_every.due(before, now)):
            self.save()
        if totals.stop_signal:
            self._interrupt(totals.stop_signal)

    def _fetch(self, step: int) -> Any:
        """Return the micro-batches of a step: those of the data, or what the algorithm makes of its rollouts.

        Both are made on a random stream of their own where the policy has a part in them.
        """
        self.pulse.enter("data")
        if hasattr(self.data, "attach"):
            seed_everything(fold(self.config.seed, STREAM_ROLLOUT, step, self.group.rank))
        taken: Any = self.data.take(step)
        if not isinstance(taken, Rollouts):
            return taken
        # In the arithmetic of the loss, or the rounding of one would pass for a ratio of probabilities.
        with timed(getattr(self.data, "timings", {}), "prepare"), self.precision.forward():
            return learn_from(
                taken, self.trainer.algorithm, self.policy, self.place, step, self.gather, self.group.device,
                lambda experience: self.record.transcribe(self, step + 1, taken, experience),
            )  # fmt: skip

    def gather(self, value: Any) -> list[Any]:
        """Return the plain value, or the bytes, of every rank, in order; waiting for one does not count as hanging."""
        phase = self.pulse.phase
        self.pulse.enter("sync")
        found = self.group.gather_bytes(value) if isinstance(value, bytes) else self.group.gather(value)
        self.pulse.enter(phase)
        return found

    def tell(self, what: str, done: int, total: int) -> None:
        """Let callbacks know how far a long step has come."""
        self.callbacks.on_part(self.trainer, what, done, total)

    def written_tensors(self) -> list[Tensor]:
        """Return what training writes to: weights, their averages, and what optimizers remember."""
        found: list[Any] = [p for p in self.policy.parameters() if p.requires_grad]
        found += [v for o in self.optimizations.values() for kept in o.optimizer.state.values() for v in kept.values()]
        found += self.ema.shadow.values() if self.ema is not None else []
        return [local_tensor(value) for value in found if isinstance(value, Tensor)]

    def heed_signals(self, patience_s: float = 2.0) -> None:
        """Save and leave a step that nothing has come of yet, if it does not end by itself after a stop signal.

        For whoever waits while a step is fetched. Ranks that train together go on to where they all see the signal.
        """
        if self.group.world == 1 and self.signals.is_pressing(patience_s):
            self._interrupt(self.signals.received)

    def _interrupt(self, signum: int) -> None:
        # Ranks may each have got a signal; the sum says only that one did.
        received = max(int(number) for number in self.group.gather(self.signals.received))
        self.save(wait=True)
        raise Interrupted(received or signum)

    def _wrap_up(self) -> None:
        """Log and evaluate what the cadence left over, then save: nothing is left to do after the last checkpoint."""
        if self.meter.sums:
            self.log_training()
        if self._evaluated_at != self.progress.step and self.trainer.can_evaluate:
            self.evaluate()
        self.save(wait=True)

    def finish(self) -> Result:
        """End a run that has reached its length; never return short of it."""
        if not self.finished:
            raise ShortRunError(f"training ended at step {self.progress.step}, before the requested {self.length}")
        for optimization in self.optimizations.values():
            optimization.set_mode(training=False)
        if self.record.directory is not None:
            set_origin(self.policy, PolicyOrigin(self.record.directory, self.progress.step))
        self.callbacks.on_fit_end(self.trainer)
        return Result(
            self.progress.step, dict(self.metrics), self.record.directory, self.record.best, self.record.last,
            self.stopping or "finished", self._first_step, tuple(self.record.changes),
        )  # fmt: skip

    # -- what is due --------------------------------------------------------------------------------------------

    def log_training(self) -> None:
        """Write the means since the last log, with rates and norms."""
        self.pulse.enter("sync")
        row = measuring.training_row(self)
        self.write(row)
        self.callbacks.on_log(self.trainer, self.progress.step, row)

    def write(self, row: dict[str, float]) -> None:
        """Record metrics of this step."""
        self.metrics.update(row)
        self.record.log(self.progress.step, row)

    def evaluate(self) -> None:
        """Let the trainer evaluate the policy as it is now."""
        row = self.measure(self.trainer.evaluate)
        self._evaluated_at = self.progress.step
        if not self._said_unranked:
            self._said_unranked = measuring.says_unranked(self, row)

    def measure(self, evaluate: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Record what a function finds: with averaged weights if there are any, on a random stream of its own.

        Every rank must call; what rank 0 finds counts.
        """
        self.pulse.enter("evaluate")
        row, spent_s = measuring.measured(self, evaluate)
        self.evaluated_s += spent_s
        self._lap = (self._lap[0], self._lap[1] + spent_s)  # what evaluating takes is no part of a step
        if row:
            self.write({**row, "time/evaluate_s": spent_s})
            if self.config.best_metric in row:
                self._ranked_at = self.progress.step
                if measuring.is_better(self.config, row[self.config.best_metric], self.best):
                    self.best, self._is_best = row[self.config.best_metric], True
            self.callbacks.on_evaluate_end(self.trainer, self.progress.step, row)
        return row

    @contextmanager
    def shown_weights(self) -> Iterator[None]:
        """Context with the weights to evaluate and export in place of the trained ones, where they differ."""
        with ExitStack() as stack:
            stack.enter_context(shown_weights(self.optimizations.values()))
            if self.ema is not None:
                stack.enter_context(self.ema.applied())
            yield

    def save(self, *, wait: bool = False) -> None:
        """Save everything that the next step depends on; once per step, whoever asks."""
        self.pulse.enter("save")
        self._is_best = False
        if self._saved_at != self.progress.step:
            self.strategy.synchronise_buffers()
            tree = state.collect(self)
            is_sharded = self.strategy.is_sharded
            guard.require_finite(self.group, self.progress.step, tree, self._odd, self.record.last, is_sharded)
            ranked = self._ranked_at == self.progress.step
            metric = self.metrics.get(self.config.best_metric) if ranked else None
            self.record.save(tree, self.progress.step, metric)
            self._saved_at = self.progress.step
            with shown_weights(self.optimizations.values()):
                self.callbacks.on_save(self.trainer, self.progress.step)
        if wait:
            fault = self.group.gather(self.record.wait())[0]
            if fault:
                raise CheckpointError(fault)

    def set_train_mode(self) -> None:
        """Put the policy in train mode, except for what is frozen."""
        self.policy.train()
        for module in self.frozen:
            module.eval()
        for optimization in self.optimizations.values():
            optimization.set_mode(training=True)
