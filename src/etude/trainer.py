"""The Trainer: joins a policy, data, an algorithm and an engine. This is the class to subclass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from etude.algorithms.function import as_algorithm, ask_policy
from etude.callbacks import Callback
from etude.config.training import TrainingConfiguration
from etude.data.coerce import as_data, held_out
from etude.errors import ConfigError, as_path
from etude.loop.adopted import adopt, early_optimizer, replacement
from etude.loop.kept import Kept, of_rank, tensors_of, warn_left_out, with_ranks
from etude.loop.manual import wanted_arguments
from etude.loop.measuring import mean_losses
from etude.loop.optimizers import Optimization, assign_parameters, build_optimizer
from etude.loop.precision import cast_floating
from etude.loop.schedule import make_schedule
from etude.loop.session import Session
from etude.rollouts.experience import join_sampler
from etude.rollouts.updates import is_experience
from etude.runs.directory import Run
from etude.types import Result
from etude.types.duration import Progress
from etude.types.protocols import Data, Engine, Logger, TrainStep

if TYPE_CHECKING:
    from etude.rollouts.harness import Harness

log = logging.getLogger("etude")
Optimizers = Optimizer | Optimization | Mapping[str, Optimizer | Optimization]


class Trainer:
    """Trains a policy on data with an algorithm, on any engine.

    Override a hook to change one thing: `compute_loss` for the objective, `prepare_batch` for what needs no gradient,
    `configure_optimizers` for who updates what, `evaluate` for what counts as good. Define `train_step(batch)` to take
    the whole update into your own hands.
    """

    harness: Harness | None = None
    """What makes the experience, for trainers with a sampler."""
    _optimizer: Optimizer | None = None

    def __init__(
        self,
        policy: Any = None,
        data: Any = None,
        algorithm: Any = None,
        *,
        engine: str | Engine = "torch",
        config: TrainingConfiguration | None = None,
        sampler: Any = None,
        environment: Any = None,
        run: str | Path | Run | Literal[False] | None = None,
        callbacks: Sequence[Callback] = (),
        loggers: str | Sequence[Logger | str] | None = None,
        eval_data: Any = None,
        name: str | None = None,
        run_root: str | Path = "runs",
        run_config: Mapping[str, Any] | None = None,
        show_progress: bool = True,
    ) -> None:
        """Join the parts; nothing is built, read or written before `fit`.

        `Trainer(config, sampler, algorithm)` trains what the sampler's system trains; steps are then experiences.

        Args:
            policy: What is trained. A policy that takes its shapes from the data is built when training starts.
            data: A dataset, a DataLoader, an iterable, a dictionary of tensors, a pair (X, Y), or an `etude.Data`.
            algorithm: How a batch becomes a loss; None asks the policy (`policy(batch)`). A function of these will do.
            engine: How a loss becomes an update: a key of the engine registry, or an engine.
            config: Length, optimisation, cadence and safety.
            sampler: Makes rollouts to learn from, in place of policy and data.
            environment: Another name for `sampler`.
            run: Directory or name of the run; None makes a new one, `runs/<name>` or by the time, False writes nothing.
            callbacks: What else happens around the loop.
            loggers: Where metrics go beside metrics.jsonl: loggers, or their keys in the registry such as "wandb"; None
                means TensorBoard.
            eval_data: What `evaluate` measures the loss on; None is what a data module holds out, False nothing.
            name: What a new run is called; the second of that name is `<name>-2`.
            run_root: Where runs without a directory of their own go.
            run_config: What to store as the run's configuration instead of the training section alone.
            show_progress: Show live progress in a terminal, plain lines elsewhere.
        """
        sampler = environment if sampler is None else sampler
        if isinstance(policy, TrainingConfiguration):  # Trainer(config, sampler, algorithm)
            policy, data, config, sampler = None, None, policy, data if sampler is None else sampler
        self.config = TrainingConfiguration() if config is None else config
        _check(self.config, run)
        if sampler is not None:
            self.harness, policy, data, algorithm = join_sampler(self.config, sampler, algorithm, policy, data)
        if not isinstance(policy, nn.Module):
            raise ConfigError(_explain_policy(policy, data))
        self.policy = policy
        self.data: Data = as_data(data)
        self.algorithm, self.engine = as_algorithm(algorithm) if self._asks_algorithm else algorithm, engine
        self.run: Run | None = run if isinstance(run, Run) else None
        self.callbacks, self.run_request = list(callbacks), run
        self.eval_data = held_out(data) if eval_data is None else None if eval_data is False else eval_data
        self.name, self.run_root, self.show_progress = name, run_root, show_progress
        self.session: Session
        self._run_config, self._loggers = run_config, None if loggers is None else _as_loggers(loggers)

    # -- hooks --------------------------------------------------------------------------------------------------

    def prepare_batch(self, batch: Any) -> Any:
        """Turn a raw batch into what `compute_loss` needs, without gradient: normalise, advantages, old log-probs.

        Rows of rollouts have been through the algorithm's `experience`, and come back as they are.
        """
        prepare = getattr(self.algorithm, "prepare", None)
        return batch if prepare is None or is_experience(batch) else prepare(self.policy, batch)

    def compute_loss(self, policy: Any, batch: Any) -> Any:
        """Return a `Loss`, or `{"loss": mean, ...}`, or a scalar mean."""
        return ask_policy(policy, batch) if self.algorithm is None else self.algorithm.loss(policy, batch)

    def configure_optimizers(self) -> Optimizers:
        """Return named optimizers, or one; the default follows `config.optimizer` or `config.optimizers`.

        An `Optimization` adds a schedule and a clip norm to a plain torch optimizer.
        """
        if self._optimizer is not None:
            return adopt(self, self._optimizer)
        configs = self.config.named_optimizers()
        steps = self.session.total_steps
        return {
            name: Optimization(
                build_optimizer(configs[name], params), make_schedule(configs[name], steps), configs[name].clip_norm
            )
            for name, params in assign_parameters(self.policy, configs).items()
        }

    def evaluate(self) -> Mapping[str, float]:
        """Return evaluation metrics: by default the mean loss over `eval_data`.

        Runs in eval mode without gradient, with averaged weights if there are any, on a random stream of its own.
        Every rank calls it; what rank 0 returns is recorded.
        """
        return {} if self.eval_data is None else mean_losses(self.session)

    # -- running ------------------------------------------------------------------------------------------------

    def fit(self, resume: str | Path = "auto") -> Result:
        """Train to the requested length.

        Args:
            resume: "auto" goes on from the run's newest good checkpoint if it has one, "never" starts afresh in a
                directory of its own, a path goes on from that checkpoint or run.
        """
        engine = self.engine
        if isinstance(engine, str):
            from etude.registry import ENGINE_REGISTRY

            engine = self.engine = ENGINE_REGISTRY.get(engine)()
        result: Result = engine.run(self, resume)
        return result

    def train(self) -> Result:
        """Train; another name for `fit()`."""
        return self.fit()

    def stop(self, reason: str) -> None:
        """Ask training to end after this step, for a reason that the result will give."""
        self.session.stopping = reason

    # -- what engines ask ---------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far training has come."""
        return self.session.progress if hasattr(self, "session") else Progress()

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self.session.group.rank

    @property
    def world(self) -> int:
        """How many ranks train together."""
        return self.session.group.world

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The torch optimizers by name, for trainers with their own `train_step`."""
        return {name: optimization.optimizer for name, optimization in self.session.optimizations.items()}

    @property
    def optimizer(self) -> Optimizer:
        """The one optimizer, before training and while it goes on: to change, to replace or to attach a scheduler to.

        Kept as an attribute of the trainer, a scheduler of torch is stepped once a step, and saved.
        """
        if self._optimizer is None and hasattr(self, "session") and hasattr(self.session, "optimizations"):
            return next(iter(self.optimizers.values()))
        if self._optimizer is None:
            self._optimizer = early_optimizer(self)
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self._optimizer = replacement(self, optimizer)

    @property
    def loggers(self) -> Sequence[Logger]:
        """The loggers of the run."""
        if self._loggers is None:
            from etude.runs.loggers import TensorBoardLogger

            self._loggers = [TensorBoardLogger()]
        return self._loggers

    @property
    def is_manual(self) -> bool:
        """Whether this trainer makes the update itself, in `train_step`."""
        return hasattr(self, "train_step")

    @property
    def _asks_algorithm(self) -> bool:
        return not self.is_manual and type(self).compute_loss is Trainer.compute_loss

    @property
    def prepares_batches(self) -> bool:
        """Whether `prepare_batch` does anything."""
        return type(self).prepare_batch is not Trainer.prepare_batch or hasattr(self.algorithm, "prepare")

    @property
    def can_evaluate(self) -> bool:
        """Whether `evaluate` has anything to measure."""
        return self.eval_data is not None or type(self).evaluate is not Trainer.evaluate

    def make_optimizations(self) -> dict[str, Optimization]:
        """Return what `configure_optimizers` gives, as named `Optimization`s."""
        given = self.configure_optimizers()
        if isinstance(given, Optimizer | Optimization):
            given = {"policy": given}
        if not isinstance(given, Mapping) or not given:  # type: ignore[redundant-expr]
            raise ConfigError(
                "configure_optimizers must return an optimizer, an Optimization or a dictionary of them, "
                f"got {type(given).__name__}"
            )
        plain = self.config.clip_norm
        made = {n: o if isinstance(o, Optimization) else Optimization(o, None, plain) for n, o in given.items()}
        if self._optimizer is not None and all(o.optimizer is not self._optimizer for o in made.values()):
            raise ConfigError(
                "trainer.optimizer was made or set before training, but configure_optimizers returns another; "
                "return self.optimizer, or leave it alone"
            )
        return made

    def run_train_step(self, batch: Any) -> Any:
        """Call the trainer's own `train_step` with a prepared batch on the right device."""
        from etude.data.device import to_device

        if self.session.normalize is not None:
            batch = self.session.normalize(batch)
        batch = self.session.precision.cast_batch(batch) if self.config.precision == "float64" else batch
        return self.train_step(self.prepare_batch(to_device(batch, self.session.group.device)))  # type: ignore[attr-defined]

    def describe(self) -> Mapping[str, Any]:
        """Return the configuration to store with the run."""
        return self._run_config or {"training": self.config.model_dump(mode="json")}


def _check(config: Any, run: Any) -> None:
    if not isinstance(config, TrainingConfiguration):
        given = f"the class {config.__name__} itself" if isinstance(config, type) else type(config).__name__
        raise ConfigError(f"config must be a TrainingConfiguration(...), got {given}")
    if run is not None and run is not False and not isinstance(run, Run):
        as_path(run, "run")


def _explain_policy(policy: Any, data: Any) -> str:
    given = type(policy).__name__
    if callable(getattr(data, "rollout", None)):
        return f"Trainer(config, sampler, algorithm): config must be a TrainingConfiguration(...), got {given}"
    return f"policy must be a torch.nn.Module, got {given}"


def _as_loggers(given: str | Sequence[Logger | str]) -> Sequence[Logger]:
    """Return loggers, made by their keys where only those were given."""
    from etude.registry import LOGGER_REGISTRY

    made = [LOGGER_REGISTRY.get(one)() if isinstance(one, str) else one for one in _listed(given)]
    for logger in made:
        if isinstance(logger, type) or not callable(getattr(logger, "log", None)):
            found = f"the class {logger.__name__}" if isinstance(logger, type) else f"a {type(logger).__name__}"
            known = ", ".join(LOGGER_REGISTRY.keys())
            raise ConfigError(f"loggers takes objects with start, log and close, or names ({known}); got {found}")
    return made


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def wrap_train_step(kind: Callable[..., TrainStep], params: Mapping[str, Any]) -> type[Trainer]:
    """Return a Trainer that leaves the update to a class made from (models, optimizers, loss, device)."""

    class StepTrainer(Trainer):
        """Runs the `train_step` of a class that knows nothing of Etude, and saves what that class keeps."""

        inner: TrainStep

        def start_manual(self) -> None:
            """Make the inner trainer: before a checkpoint is taken up, with the same random numbers on every rank."""
            device = self.session.group.device
            models: Any = self.policy if isinstance(self.policy, nn.ModuleDict) else {"policy": self.policy}
            optimizers, loss = self.optimizers, self.algorithm
            if self.eval_data is not None and loss is not None and not hasattr(loss, "loss"):
                raise ConfigError(
                    f"eval_data: {kind.__name__} has no loss outside of its train_step; leave eval_data out, and "
                    "evaluate in a callback"
                )
            if isinstance(loss, nn.Module):
                loss.to(device)
            self.inner = kind(models, optimizers, loss, device, **params)
            self._kept = Kept(self.inner, [models, optimizers, loss, *optimizers.values(), *tensors_of(self.policy)])
            self._wanted = wanted_arguments(self.inner.train_step)
            if self.session.group.is_main:
                warn_left_out(self._kept, kind.__name__)

        def train_step(self, batch: Any) -> Mapping[str, Any]:
            """Pass the batch on, with what the inner trainer asks for of epoch, total_epochs and iterations."""
            if self.config.precision != "float64":  # which has been cast to already
                batch = cast_floating(batch, torch.float32)
            counters = self.session.counters() if self._wanted else {}
            return self.inner.train_step(batch, **{name: counters[name] for name in self._wanted})

        def state_dict(self) -> dict[str, Any]:
            """Return what the inner trainer keeps, on each rank; every rank must call."""
            return with_ranks(self._kept.state_dict(), self.session.gather)

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            """Give the inner trainer back what it kept."""
            self._kept.load_state_dict(of_rank(state, self.rank))

    return StepTrainer
