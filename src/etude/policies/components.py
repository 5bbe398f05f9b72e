"""`ComponentPolicy`: named models from YAML that train together, and act through the trainer that trained them.

Shape letters: B batch, H actions in a chunk, A action.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import types
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from etude.data.statistics import PICKLED, NormStats
from etude.errors import CheckpointError, ConfigError, one_line
from etude.policies import pretrained
from etude.policies.base import PolicyModule, single_action
from etude.policies.graph.build import build_model, plain_config
from etude.policies.graph.tree import NAME
from etude.policies.initialize import initialize_weights
from etude.policies.spec import condense
from etude.registry import TRAINER_REGISTRY
from etude.rng import STREAM_INIT, fold, generators_kept
from etude.types import DataSpec

log = logging.getLogger("etude")


class ComponentPolicy(PolicyModule, nn.ModuleDict):
    """Models by name, each described in a file of its own; `models["decoder"]` is one of them.

    A trainer made from (models, optimizers, loss, device) gets the policy as `models`. Batches are normalised in the
    loop. The policy acts where that trainer's class has a static method `sample_actions(models, batch, **params)`,
    which gives a normalised chunk (B, H, A) for normalised observations; one that takes `noise` (B, H, A) can be
    exported as a graph.

    Args:
        configs: Where each component is described: a file for `etude.policies.graph`, or its content.
        build: By component: `init` draws its weights anew (Xavier, Kaiming), `freeze` keeps them as they are.
        load_dir: A directory with `{component}.safetensors` or `{component}.pt`, or a checkpoint, to take weights from.
        seed: Decides the initial weights; None leaves that to the training seed.
        actor: The trainer, by registry key, whose `sample_actions` chooses actions, with parameters for it.
        horizon: Actions in a chunk; None leaves windows to the data, and then the policy does not act.
        n_obs_steps: Observations in a row that the policy sees.
        image_obs_steps: Pictures in a row, where they are not as many.
        n_action_steps: Actions executed of each chunk; None is all of them.
        temporal_ensemble_coeff: Weight of the executor's temporal ensembling; None is none.
        latency_steps: Control steps that computing a chunk takes.
    """

    needs_spec: ClassVar[bool] = False

    def __init__(
        self,
        configs: Mapping[str, Any],
        build: Mapping[str, Mapping[str, bool]] | None = None,
        load_dir: str | None = None,
        seed: int | None = None,
        actor: Mapping[str, Any] | None = None,
        *,
        horizon: int | None = None,
        n_obs_steps: int = 1,
        image_obs_steps: int | None = None,
        n_action_steps: int | None = None,
        temporal_ensemble_coeff: float | None = None,
        latency_steps: int = 0,
    ) -> None:
        self._image_obs_steps = n_obs_steps if image_obs_steps is None else image_obs_steps
        if self._image_obs_steps < 1:
            raise ConfigError(f"image_obs_steps must be at least 1, got {image_obs_steps}")
        super().__init__(
            1 if horizon is None else horizon,
            n_obs_steps=n_obs_steps,
            n_action_steps=None if horizon is None else n_action_steps,
            temporal_ensemble_coeff=temporal_ensemble_coeff,
            latency_steps=0 if horizon is None else latency_steps,
        )
        self.statistics: NormStats | None = None
        """What batches are normalised by, and actions brought back with."""
        self.unloaded = ""
        """What is missing where weights were not loaded, because a checkpoint is to bring them."""
        self._has_horizon = horizon is not None
        self._actor, self._sampler = _find_actor(actor)
        self.build_options = _checked_options(configs, build or {})
        self.component_configs = {name: plain_config(source) for name, source in configs.items()}
        for name in configs:
            with _seeded(seed, name, 0):
                self._add(name, build_model(configs[name]))
        absent = set(self) if load_dir is None else set(load_components(self, load_dir))
        for name, component in self.items():
            if self._wants(name, "init") and name in absent:
                with _seeded(seed, name, 1):
                    initialize_weights(component)
            if self._wants(name, "freeze"):
                freeze_component(component)

    def _add(self, name: str, component: nn.Module) -> None:
        try:
            # Annotated are those that are there only later, such as the spec; names are those of files too.
            if name in PolicyModule.__annotations__ or not NAME.fullmatch(name):
                raise KeyError(name)
            self.add_module(name, component)
        except KeyError:
            raise ConfigError(f"a component cannot be called {name!r}; choose another name") from None

    def _wants(self, name: str, option: str) -> bool:
        return bool(self.build_options.get(name, {}).get(option, False))

    @property
    def frozen_components(self) -> list[str]:
        """Names of the components that are not trained."""
        return [name for name in self if self._wants(name, "freeze")]

    # ---- training ----------------------------------------------------------------------------------------------------

    def build(self, spec: DataSpec | None) -> None:
        """Take note of what the data holds, so that the policy can act; the components are there already."""
        if self.is_built:
            raise ConfigError("the components policy is built already; make a new one for other data")
        self.is_built = True
        condensed = None if spec is None else condense(spec)
        if condensed is not None and len(condensed.with_role("action")) == 1:
            self.spec = condensed
            self.action_name, action = single_action("components", condensed)
            self.action_shape, self.action_dim = action.shape, math.prod(action.shape)
        if condensed is not None and self.statistics is None:
            self.statistics = _statistics_of(condensed)

    def forward(self, batch: Any) -> Any:
        """Refuse: what a batch becomes is the trainer's affair."""
        raise ConfigError(
            "a policy made of components has no loss of its own; set trainer to one made from (models, optimizers, "
            "loss, device), which says how its components train together"
        )

    def use_statistics(self, statistics: NormStats) -> None:
        """Act in the units of the data that these statistics were taken from."""
        self.statistics = statistics

    @property
    def observation_delta_indices(self) -> list[int] | None:
        """Distances in frames of the observations that acting keeps: of numbers and pictures, the longer history."""
        return _frames(max(self.n_obs_steps, self._image_obs_steps))

    @property
    def windows(self) -> dict[str, list[int] | None]:
        """What batches hold, as distances in frames, by kind."""
        return {
            "observation": _frames(self.n_obs_steps),
            "images": _frames(self._image_obs_steps),
            "action": self.action_delta_indices,
        }

    @property
    def action_delta_indices(self) -> list[int] | None:  # type: ignore[override]  # None: the data knows
        """Distances in frames of the actions in a batch; None leaves windows to the data."""
        return list(range(self.horizon)) if self._has_horizon else None

    # ---- acting ------------------------------------------------------------------------------------------------------

    def require_built(self) -> None:
        """Refuse to act where it is not known what the policy sees or how it chooses, and say which it is."""
        if self._sampler is None:
            who = "no trainer is named as its actor" if self._actor is None else f"{self._actor['type']!r} has none"
            raise ConfigError(f"this policy does not act: that takes a trainer with sample_actions, and {who}")
        if not self._has_horizon:
            raise ConfigError("this policy does not act: say how long its chunks are, policy.params.horizon")
        super().require_built()
        if not hasattr(self, "spec"):
            raise ConfigError(
                "this policy does not act: the data it was trained on has no features (a spec) with one action, so "
                "it cannot know what it sees"
            )

    def normalize_observation(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return an observation as batches come in training."""
        seen = {name: self._recent(name, value) for name, value in observation.items()}
        if self.statistics is None:
            return seen
        normal: dict[str, Any] = self.statistics.normalize(seen, complete=False)
        return normal

    def _recent(self, name: str, value: Any) -> Any:
        """Return as many of the latest frames as batches hold of this feature, where more are kept for another."""
        feature = self.spec.features.get(name)
        if feature is None or not isinstance(value, Tensor) or value.dim() != 2 + len(feature.shape):
            return value
        steps = self._image_obs_steps if feature.role == "image" else self.n_obs_steps
        return value[:, -1] if steps == 1 else value[:, -steps:]

    def unnormalize_action(self, actions: Tensor, observation: Mapping[str, Any] | None = None) -> Tensor:
        """Return actions in the data's units."""
        return actions if self.statistics is None else self.statistics.unnormalize(self.action_name, actions)

    def sample_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the normalised chunk that the trainer's class chooses."""
        return self._sample(batch)

    def sample_from_noise(self, batch: Mapping[str, Any], noise: Tensor) -> Tensor:
        """Return the chunk that the trainer's class makes of this noise."""
        return self._sample(batch, noise=noise)

    def _sample(self, batch: Mapping[str, Any], **given: Tensor) -> Tensor:
        assert self._sampler is not None
        assert self._actor is not None
        actions = self._sampler(self, batch, **self._actor["params"], **given)
        if actions.dim() != 3 or actions.shape[1:] != (self.horizon, self.action_dim):
            raise ConfigError(
                f"sample_actions of {self._actor['type']!r} gave {tuple(actions.shape)}, not (batch, {self.horizon}, "
                f"{self.action_dim}); is policy.params.horizon what the components were made for?"
            )
        return actions

    @property
    def noise_shape(self) -> tuple[int, ...] | None:
        """Shape of the noise that a chunk is made from, where it can be given."""
        takes = self._sampler is not None and "noise" in inspect.signature(self._sampler).parameters
        return (self.horizon, self.action_dim) if takes else None

    # ---- saving ------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return everything but the weights: the description of every component included, so that no file is needed."""
        frozen = {name: {"freeze": True} for name in self.frozen_components}
        params = {**self._params, "configs": self.component_configs, "build": frozen, "load_dir": None, "seed": None}
        described = pretrained.describe(self, params)
        if self.statistics is not None:
            described["norm_stats"] = self.statistics.to_json()
        return described


def _frames(steps: int) -> list[int] | None:
    return None if steps == 1 else list(range(1 - steps, 1))


def _seeded(seed: int | None, name: str, purpose: int) -> AbstractContextManager[None]:
    """Return a context in which random numbers follow from a seed and a component's name; None leaves them alone."""
    if seed is None:
        return nullcontext()
    return generators_kept(fold(seed, STREAM_INIT, zlib.crc32(name.encode()), purpose))


def freeze_component(component: nn.Module) -> None:
    """Keep a model as it is: no gradients, and evaluation mode whatever mode it is asked to take."""
    component.requires_grad_(False)
    component.eval()
    setattr(component, "train", types.MethodType(_stay_in_eval, component))  # noqa: B010 - mypy allows no other


def _stay_in_eval(component: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(component, False)


def _find_actor(actor: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, Callable[..., Tensor] | None]:
    """Return the actor's key and parameters, and the function that samples actions, if its class has one."""
    if actor is None:
        return None, None
    unknown = sorted(set(actor) - {"type", "params"})
    if unknown or not isinstance(actor.get("type"), str):
        raise ConfigError(f"actor is {{type: key of a trainer, params: {{...}}}}, got {dict(actor)}")
    found = {"type": actor["type"], "params": dict(actor.get("params") or {})}
    sampler = getattr(TRAINER_REGISTRY.get(found["type"]), "sample_actions", None)
    if sampler is not None:
        try:
            inspect.signature(sampler).bind(None, None, **found["params"])
        except TypeError as error:
            raise ConfigError(f"actor: sample_actions of {found['type']!r}: {error}") from None
    return found, sampler


def _checked_options(configs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    if not configs:
        raise ConfigError("configs names no component; a policy needs at least one")
    for name, flags in options.items():
        if name not in configs:
            raise ConfigError(f"build: there is no component {name!r}; there are {', '.join(configs)}")
        for flag, value in (flags or {}).items():
            if flag not in ("init", "freeze") or not isinstance(value, bool):
                raise ConfigError(f"build.{name}: init and freeze are true or false, got {flag}: {value!r}")
    return {name: dict(flags or {}) for name, flags in options.items()}


def _statistics_of(spec: DataSpec) -> NormStats | None:
    """Return the statistics of a spec's states and actions, for data that comes without `norm_stats`."""
    found = {
        name: feature.stats
        for name, feature in spec.features.items()
        if feature.role in ("state", "environment", "action") and feature.classes is None
        if feature.stats and "mean" in feature.stats and "std" in feature.stats
    }
    return NormStats(found) if found else None


# ---- weights from elsewhere --------------------------------------------------------------------------------------


def load_components(models: nn.ModuleDict, source: str | Path) -> list[str]:
    """Load the weights of each component that a directory has; return and name those that it has not.

    Args:
        models: The components.
        source: A directory of `{component}.safetensors` or `{component}.pt` files, a checkpoint, or a run.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"load_dir: there is no directory {folder.absolute()}")
    states = _component_states(models, folder)
    absent = [name for name in models if name not in states]
    if not states:
        raise CheckpointError(f"load_dir: {folder} has no weights of {', '.join(absent)}")
    for name, state in states.items():
        if all(key.startswith("module.") for key in state):  # as DDP writes them
            state = {key.removeprefix("module."): value for key, value in state.items()}
        try:
            models[name].load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(
                f"load_dir: the weights of {name} in {folder} do not fit: {one_line(error)}"
            ) from None
    if os.environ.get("RANK", "0") != "0":  # which have the same to say
        return absent
    pickled = folder / "dataset_stats.pkl"
    if pickled.exists() and not pickled.with_suffix(".json").exists():
        log.warning("%s %s", pickled, PICKLED)
    if absent:
        rest = (
            "it begins with those it was made with" if len(absent) == 1 else "they begin with those they were made with"
        )
        log.warning("%s has no weights of %s: %s", folder, ", ".join(absent), rest)
    return absent


def _component_states(models: nn.ModuleDict, folder: Path) -> dict[str, dict[str, Tensor]]:
    from etude.runs.checkpoint import CheckpointStore, acting_weights
    from etude.runs.manifest import MANIFEST_NAME
    from etude.runs.tensor_file import read_tensor_file

    if (folder / MANIFEST_NAME).is_file() or (folder / "checkpoints").is_dir():
        tree = CheckpointStore(folder / "checkpoints").load(folder).tree
        weights = acting_weights(tree)
        mine = {
            name: {k.partition(".")[2]: v for k, v in weights.items() if k.split(".")[0] == name} for name in models
        }
        return {name: state for name, state in mine.items() if state}
    found: dict[str, dict[str, Tensor]] = {}
    for name in models:
        safe, pickled = folder / f"{name}.safetensors", folder / f"{name}.pt"
        try:
            if safe.is_file():
                found[name] = read_tensor_file(safe)
            elif pickled.is_file():
                found[name] = torch.load(pickled, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
            raise CheckpointError(
                f"load_dir: cannot read the weights of {name} in {folder}: {one_line(error)}"
            ) from None
    return found
