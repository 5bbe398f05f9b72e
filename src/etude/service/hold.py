"""`ServiceTrainer`: holds a trainer that is made from one configuration, and runs it in our loop.

Three kinds are held, told apart by their base class:

| base class | what it defines | who makes the update |
|---|---|---|
| `SelfHostedTrainer` | `_prepare_batch` | the loop, on micro-batches of what it returned |
| `RemoteApiTrainer` | `_prepare_trajectories` | a service with the calls of the Tinker client, here or over http |
| `BaseTrainer` | `train` | itself |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from etude import errors
from etude.callbacks import Callback
from etude.engines.remote.connection import is_reachable
from etude.engines.remote.engine import RemoteEngine
from etude.engines.remote.policy import RemotePolicy
from etude.engines.torch import TorchEngine
from etude.errors import ConfigError, EtudeError
from etude.loop.optimizers import Optimization, build_optimizer
from etude.loop.schedule import make_schedule
from etude.rng import STREAM_ROLLOUT, fold, generators_kept
from etude.service.base import BaseTrainer
from etude.service.checking import Floats, ask, place_of
from etude.service.experience import PreparedBatches, WholeTrajectories
from etude.service.in_process import InProcessService
from etude.service.loading import load_class, missing_hook
from etude.service.remote import RemoteApiTrainer
from etude.service.self_hosted import SelfHostedTrainer
from etude.service.settings import Settings
from etude.service.wire import WireService
from etude.trainer import Optimizers, Trainer
from etude.types import Result
from etude.types.batch import Batch
from etude.types.trajectory import Trajectory

log = logging.getLogger("etude")
T = TypeVar("T")
_PREPARE = 1 << 20
"""The stream of what is drawn while rollouts are prepared: the same on every rank, for every rank prepares them all."""


class Holder(Trainer):
    """Runs a trainer of `etude.service` in our loop: `inner`, which subclasses set first."""

    inner: BaseTrainer
    service: InProcessService | WireService
    """What makes the updates of a `RemoteApiTrainer`."""

    def __init__(self, policy: Any = None, data: Any = None, algorithm: Any = None, **arguments: Any) -> None:
        """Join the parts.

        Args:
            policy: What is trained.
            data: Where rollouts come from.
            algorithm: The loss of a trainer on batches; None is the one its configuration names.
            **arguments: As those of `Trainer`.
        """
        inner = self.inner
        lacking = missing_hook(type(inner))
        if lacking:
            raise ConfigError(f"{place_of(type(inner))} does not define {lacking}")
        if algorithm is not None and not isinstance(inner, SelfHostedTrainer):
            raise ConfigError(f"algorithm: {type(inner).__name__} makes its update itself; leave the algorithm out")
        adapter: Any = WholeTrajectories(inner)
        if isinstance(inner, SelfHostedTrainer):
            adapter = PreparedBatches(inner, algorithm)
        self._floats = Floats()
        super().__init__(policy, data, adapter, **arguments)
        if self.is_manual and self.eval_data is not None:
            raise ConfigError(
                f"eval_data: {type(inner).__name__} has no loss outside of its update; leave eval_data out, and "
                "evaluate in a callback"
            )
        self.callbacks.append(_NameUnread())

    def fit(self, resume: str | Path = "auto") -> Result:
        """Train to the requested length; on the service whose url is configured, where one answers there.

        Args:
            resume: As for `Trainer.fit`.
        """
        inner = self.inner
        if isinstance(inner, RemoteApiTrainer) and inner._calls_service and is_reachable(str(inner._url)):
            if not (self.engine == "torch" or isinstance(self.engine, TorchEngine | RemoteEngine)):
                raise ConfigError(
                    f"engine: {type(inner).__name__} is trained by the service at {inner._url}; leave the engine out"
                )
            if not isinstance(self.engine, RemoteEngine):
                self.engine = RemoteEngine(str(inner._url), **inner._service_options())
        return super().fit(resume)

    @property
    def is_manual(self) -> bool:
        """Whether the held trainer makes the update, rather than the loop."""
        return not isinstance(self.inner, SelfHostedTrainer)

    def bind(self) -> None:
        """Let the held trainer know who holds it; called once everything is built."""
        inner, session = self.inner, self.session
        inner._holder = self
        if not isinstance(inner, RemoteApiTrainer):
            return
        inner._training_client = None
        if isinstance(self.policy, RemotePolicy):
            self.service = WireService(self.policy.service)
            return
        sampling = getattr(self.data, "sampling", None)
        self.service = InProcessService(
            self.policy, next(iter(self.optimizers.values())), rows=self.config.batch_size,
            temperature=getattr(sampling, "scale", 1.0), rank=session.group.rank, world=session.group.world,
            gather=session.gather,
        )  # fmt: skip
        if inner._url and session.group.is_main:
            level, why = (
                (logging.WARNING, "nothing answers there") if inner._calls_service else (logging.INFO, "backend")
            )
            log.log(level, "train_service.url %s is not called (%s): the service is this process", inner._url, why)

    def configure_optimizers(self) -> Optimizers:
        """Return Adam with the service's parameters where a service is asked, else what the configuration says."""
        if not isinstance(self.inner, RemoteApiTrainer):
            return super().configure_optimizers()
        if self.config.optimizers or self.config.optimizer not in ("adam", "adamw"):
            raise ConfigError(
                f"training.optimizer: {type(self.inner).__name__} is updated by a service, which makes steps of Adam; "
                "leave optimizer and optimizers out"
            )
        config = self.inner._optimizer_options(self.config)
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        return Optimization(build_optimizer(config, trained), make_schedule(config, self.session.total_steps), None)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Let the held trainer make its update of a step's rollouts, or of a batch of given data."""
        trajectories = batch
        if not isinstance(batch, list) or not all(isinstance(one, Trajectory) for one in batch):
            trajectories = self.algorithm.whole(Batch.of(batch).to_trajectories())
        inner = self.inner
        if isinstance(inner, RemoteApiTrainer) and type(inner).train is RemoteApiTrainer.train:
            found = inner.train(trajectories)
        else:
            with generators_kept(self._key):
                found = ask(inner, "train", trajectories)
        if not isinstance(found, Mapping):
            raise errors.DataError(
                f"{place_of(type(inner))}.train must return metrics as a dictionary, got {type(found).__name__}"
            )
        return self._floats(inner, {**inner._take_noted(), **found}, "train")

    def agree(self, prepare: Callable[[], T]) -> T:
        """Return what preparing rollouts gives; where it fails on any rank it fails on all, before an update.

        The run is then saved as it was before the step, so that it goes on from there once the fault is mended.
        """
        session, adapter = self.session, self.algorithm
        before = adapter.snapshot()
        fault: EtudeError | None = None
        found: Any = None
        try:
            with generators_kept(self._key):
                found = prepare()
        except EtudeError as error:
            fault = error
        told = [None if fault is None else [_known(fault), str(fault)]]
        told = session.gather(told[0]) if session.group.world > 1 else told
        first = next((one for one in told if one is not None), None)
        if first is None:
            return found  # type: ignore[no-any-return]
        adapter.restore(before)
        kept = self._keep()
        raise getattr(errors, first[0])(f"{first[1]}. Nothing was updated{kept}") from fault

    def _keep(self) -> str:
        """Save the run as it is before a step that has failed; data with a state of its own has moved on already."""
        session = self.session
        held: Any = getattr(session.data, "state_dict", dict)
        if not session.progress.step or held():
            return ""
        session.save(wait=True)
        return f"; the run is saved at step {session.progress.step}" if session.record.directory is not None else ""

    @property
    def _key(self) -> int:
        return fold(self.config.seed, STREAM_ROLLOUT, self.progress.step, _PREPARE)


class ServiceTrainer(Holder):
    """Trains with a class that is made from one configuration: a custom trainer, or a ready one."""

    def __init__(
        self,
        policy: Any = None,
        data: Any = None,
        algorithm: Any = None,
        *,
        class_name: str,
        module_path: str | Path | None = None,
        settings: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """Load the class, make it from its settings, and hold it.

        Args:
            policy: What is trained.
            data: Where rollouts come from.
            algorithm: The loss of a trainer on batches; None is the one its settings name.
            class_name: The class in `module_path`, or a ready one: its class name, or its type such as
                `self_hosted_grpo`.
            module_path: The Python file of a custom trainer.
            settings: What the trainer is made from: `algorithm`, `train_service`, and whatever else it reads.
            **arguments: As those of `Trainer`.
        """
        kind = load_class(class_name, module_path)
        given = Settings.of(settings)
        try:
            inner = kind(given)
        except EtudeError as error:
            raise ConfigError(f"{place_of(kind)}: {error}") from error
        except Exception as error:
            said = errors.one_line(error)
            raise ConfigError(f"{place_of(kind)} cannot be made: {type(error).__name__}: {said}") from error
        if getattr(inner, "_config", None) is None:
            raise ConfigError(f"{place_of(kind)}: __init__ must call super().__init__(config)")
        self.inner = inner
        super().__init__(policy, data, algorithm, **arguments)


class GivenTrainer(Holder):
    """Trains with a trainer that Python has made already."""

    def __init__(self, inner: BaseTrainer, policy: Any, data: Any, **arguments: Any) -> None:
        """Hold `inner`; the rest is as for `Trainer`."""
        self.inner = inner
        super().__init__(policy, data, **arguments)


class _NameUnread(Callback):
    """Names, once, what of the `algorithm` section nobody has read by the end of the first step."""

    def __init__(self) -> None:
        self._said = False

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Look after the first step."""
        if self._said or not isinstance(trainer, Holder):
            return
        self._said = True
        unread = trainer.inner._config.section("algorithm").unread()
        if unread and trainer.rank == 0:
            log.warning(
                "%s never read %s: a misspelt name, or one that means nothing to it",
                place_of(type(trainer.inner)), ", ".join(unread),
            )  # fmt: skip


def _known(error: EtudeError) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
