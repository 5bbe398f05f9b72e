"""`RemoteApiTrainer`: override `_prepare_trajectories`, and a training service learns from what it sets.

The service is one object with the calls of the Tinker client: this process (`etude.service.in_process`), on the policy
that the `Trainer` holds, or one that `train_service.url` names (`etude.service.wire`).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from etude.algorithms.metrics import log_rollout_metrics
from etude.config.training import OptimizerConfiguration
from etude.errors import ConfigError
from etude.service.base import BaseTrainer
from etude.service.checking import ask, check_trajectories
from etude.service.datums import AdamParams, Datum, as_datums
from etude.service.in_process import LOSSES
from etude.service.settings import Settings, train_service
from etude.types.trajectory import Trajectory

log = logging.getLogger("etude")
_CONFIG = frozenset(
    ["loss_fn", "learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm", "entropy_coeff"]
)
_OF_TEACHERS = frozenset({"kl_penalty_coef", "kl_discount_factor"})


def group_by(trajectories: Sequence[Trajectory], key: str = "group_id") -> dict[Hashable, list[Trajectory]]:
    """Return trajectories by a field, in the order in which its values appear; without the field, each is alone.

    `group_id` names the prompt, `run_id` the attempt at it (0, 1, ... for every prompt alike): completions that are to
    be compared share their `group_id`.
    """
    found: dict[Hashable, list[Trajectory]] = {}
    for index, trajectory in enumerate(trajectories):
        found.setdefault(trajectory.get(key, ("row", index)), []).append(trajectory)
    return found


class RemoteApiTrainer(BaseTrainer):
    """Define `_prepare_trajectories(trajectories, metrics) -> trajectories`; a training service makes the update.

    What it sets is trained on: `advantage` (one number), `token_advantages` (one for each token, or for each that
    counts), `weights` for cross-entropy. `train_service.config` says the loss and the parameters of Adam.
    """

    default_loss = "importance_sampling"
    """The loss where `train_service.config.loss_fn` names none."""

    def __init__(self, config: Any = None) -> None:
        """Keep the configuration."""
        super().__init__(config)
        self._training_client: Any = None

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        """Return the trajectories with what is trained on; add to `metrics` what is to be logged."""
        raise NotImplementedError(f"{type(self).__name__} defines no _prepare_trajectories(trajectories, metrics)")

    group_by = staticmethod(group_by)

    # ---- the update --------------------------------------------------------------------------------------------------

    def train(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Prepare the trajectories, let the service learn from them, and return metrics."""
        metrics: dict[str, Any] = {}
        log_rollout_metrics(trajectories, metrics)
        prepared = self._held("policy").agree(lambda: self._prepared(list(trajectories), metrics))
        loss_fn, client = self._loss_fn, self._client()
        data = self._with_log_probs(as_datums(prepared, by_advantage=self._by_advantage))
        done = client.forward_backward(data, loss_fn, self._loss_config)
        stepped = client.optim_step(self._adam_params())
        for name, value in {**done.result().metrics, **stepped.result().metrics}.items():
            metrics[f"training/{name.replace(':', '_')}"] = value
        counted = sum(float(datum.loss_fn_inputs["mask"].sum()) for datum in data)
        loss = metrics["training/loss_sum"] / max(counted, 1.0)
        return {"loss": loss, "training/batch_size": len(trajectories), "training/num_datums": len(data), **metrics}

    def _prepared(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        found = ask(self, "_prepare_trajectories", trajectories, metrics)
        return check_trajectories(self, found, self._loss_fn, by_advantage=self._by_advantage)

    def _client(self) -> Any:
        if self._training_client is None:
            self._training_client = self._held("service").service.create_training_client()
        return self._training_client

    def _with_log_probs(self, data: list[Datum]) -> list[Datum]:
        """Return datums with the sampler's log-probabilities; where none were recorded, those of the policy now."""
        lacking = [index for index, datum in enumerate(data) if "logprobs" not in datum.loss_fn_inputs]
        if not self._by_advantage or not lacking:
            return data
        ones = [Datum(data[index].model_input, _to_be_read(data[index])) for index in lacking]
        for index, found in zip(lacking, self._client().forward(ones).result().loss_fn_outputs, strict=True):
            data[index] = Datum(
                data[index].model_input, {**data[index].loss_fn_inputs, "logprobs": found["logprobs"]}
            )  # fmt: skip
        return data

    # ---- configuration -----------------------------------------------------------------------------------------------

    @property
    def _service_config(self) -> Settings:
        config = train_service(self._config).section("config")
        strange = [name for name in config if name not in _CONFIG | _OF_TEACHERS and name not in _loss_options()]
        if strange:
            raise ConfigError(
                f"train_service.config.{strange[0]} is not known; it takes {', '.join(sorted(_CONFIG))}, and the "
                f"options of losses: {', '.join(sorted(_loss_options()))}"
            )
        return config

    @property
    def _loss_fn(self) -> str:
        name = self._service_config.get("loss_fn", self.default_loss)
        if name not in LOSSES:
            raise ConfigError(f"train_service.config.loss_fn {name!r} is not known; choose from {', '.join(LOSSES)}")
        return str(name)

    @property
    def _by_advantage(self) -> bool:
        return self._loss_fn != "cross_entropy"

    @property
    def _loss_config(self) -> dict[str, float]:
        config, known = self._service_config, {*LOSSES[self._loss_fn], "entropy_coeff"}
        return {name: float(config[name]) for name in config if name in known}

    def _adam_params(self) -> AdamParams:
        """Return the parameters of Adam for this step; the rate follows the schedule of the training section."""
        config = self._service_config
        return AdamParams(
            learning_rate=self.optimizer.param_groups[0]["lr"],
            beta1=float(config.get("beta1", 0.9)),
            beta2=float(config.get("beta2", 0.95)),
            eps=float(config.get("eps", 1e-8)),
            weight_decay=float(config.get("weight_decay", 1e-2)),
            grad_clip_norm=float(config.get("grad_clip_norm", 1.0)),
        )

    def _optimizer_options(self, training: Any) -> OptimizerConfiguration:
        """Return what the optimizer is built with: Adam, at the service's rate or else the training section's."""
        config = self._service_config
        for name, theirs in {"weight_decay": "weight_decay", "clip_norm": "grad_clip_norm"}.items():
            if getattr(training, name) != type(training).model_fields[name].default:
                raise ConfigError(
                    f"training.{name}: the update is the service's; say train_service.config.{theirs} instead"
                )
        schedule: Mapping[str, Any] = {
            name: getattr(training, name) for name in ("schedule", "warmup_steps", "min_lr_ratio")
        }
        return OptimizerConfiguration(lr=float(config.get("learning_rate", training.lr)), clip_norm=None, **schedule)

    @property
    def _calls_service(self) -> bool:
        """Whether the configuration names a service over http that the Tinker client can use."""
        backend = train_service(self._config).get("backend", "tinker")
        return backend == "tinker" and str(self._url or "").startswith(("http://", "https://"))

    def _service_options(self) -> dict[str, Any]:
        """Return what the service is to be asked for, beside its url."""
        section, names = train_service(self._config), ("base_model", "lora_rank", "api_key", "seed", "timeout_s")
        return {name: section[name] for name in names if section.get(name) is not None}

    @property
    def _url(self) -> str | None:
        found = train_service(self._config).get("url")
        return None if found is None else str(found)


def _loss_options() -> set[str]:
    return {name for options in LOSSES.values() for name in options}


def _to_be_read(datum: Datum) -> dict[str, Any]:
    return {name: datum.loss_fn_inputs[name] for name in ("target_tokens", "mask")}
