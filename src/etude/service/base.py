"""`BaseTrainer`: a trainer that is made from one configuration, and that a `Trainer` of ours holds and runs.

Constructing one opens no file, no tokenizer and no connection. Steps, rollouts, metrics, checkpoints and resume belong
to the `Trainer` that holds it (`etude.service.hold`); what it keeps in attributes is saved with the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etude.config.training import TrainingConfiguration
from etude.errors import ConfigError
from etude.service.settings import Settings

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from etude.service.hold import Holder
    from etude.types import Result, Trajectory


class _FromOneConfiguration(type):
    """Hands constructors `Settings`, whatever kind of configuration was given: `config.algorithm.x` always works."""

    def __call__(cls, config: Any = None, *args: Any, **options: Any) -> Any:
        return super().__call__(Settings.of(config), *args, **options)


class BaseTrainer(metaclass=_FromOneConfiguration):
    """The whole update is yours: define `train(trajectories)`.

    It gets the rollouts of a step, those of all ranks, and returns metrics; `self.policy` and `self.optimizer` are what
    is trained, and by what. On several ranks every one of them gets all rollouts and makes the same update.
    """

    def __init__(self, config: Any = None) -> None:
        """Keep the configuration: OmegaConf's, a dictionary, or ours."""
        self._config = Settings.of(config)
        self._holder: Holder | None = None
        self._pad: int | None = None
        self._noted: dict[str, Any] = {}
        """Metrics of this step from the helpers."""

    def train(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Any]:
        """Make one update of the rollouts of a step and return metrics, the loss as `loss`."""
        raise NotImplementedError(f"{type(self).__name__} defines no train(trajectories)")

    def fit(
        self,
        policy: Any,
        data: Any,
        *,
        run: Any = None,
        training: TrainingConfiguration | Mapping[str, Any] | None = None,
        engine: Any = "torch",
        **arguments: Any,
    ) -> Result:
        """Train a policy on rollouts, and return what `Trainer.fit` returns.

        Args:
            policy: What is trained.
            data: Where rollouts come from, such as `etude.rollouts.text.TextRollouts`.
            run: Directory or name of the run; None makes one, False writes nothing.
            training: Length, optimisation and cadence; None takes `total_train_steps` of the configuration.
            engine: Who calls the loop.
            **arguments: Further arguments of `etude.Trainer`.
        """
        from etude.service.hold import GivenTrainer

        config = self._training(training)
        return GivenTrainer(self, policy, data, run=run, config=config, engine=engine, **arguments).fit()

    def _training(self, given: TrainingConfiguration | Mapping[str, Any] | None) -> TrainingConfiguration:
        if isinstance(given, TrainingConfiguration):
            return given
        said = dict(given or {})
        steps = self._config.get("total_train_steps")
        if steps is not None and not said.keys() & {"training_steps", "duration"}:
            said["training_steps"] = steps
        return TrainingConfiguration(**said)

    # ---- what it is held by ------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Any:
        """What is trained."""
        return self._held("policy").policy

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name."""
        return self._held("optimizers").optimizers

    @property
    def optimizer(self) -> Optimizer:
        """The one optimizer, or the first."""
        return next(iter(self.optimizers.values()))

    @property
    def rank(self) -> int:
        """This process's place in the group; 0 before training."""
        return self._holder.session.group.rank if self._runs else 0  # type: ignore[union-attr]

    @property
    def world(self) -> int:
        """How many ranks train together; 1 before training."""
        return self._holder.session.group.world if self._runs else 1  # type: ignore[union-attr]

    @property
    def _train_step(self) -> int:
        """The steps made so far."""
        return 0 if self._holder is None else self._holder.progress.step

    @property
    def _pad_token_id(self) -> int:
        """The token that fills rows up: the one that was set, else the policy's, and 0 before there is one."""
        if self._pad is not None:
            return self._pad
        return int(getattr(self._holder.policy, "pad_token_id", 0)) if self._holder is not None else 0

    @_pad_token_id.setter
    def _pad_token_id(self, token: int) -> None:
        self._pad = int(token)

    @property
    def _runs(self) -> bool:
        return self._holder is not None and hasattr(self._holder, "session")

    def _held(self, what: str) -> Holder:
        if self._holder is None:
            raise ConfigError(
                f"{type(self).__name__} has no {what} yet: it gets one from fit(policy, data), or from the recipe"
            )
        return self._holder

    def _take_noted(self) -> dict[str, Any]:
        noted, self._noted = self._noted, {}
        return noted
