"""`PolicyModule`: what every policy for robots shares, so that a new one only says how actions are made.

Shape letters: B batch, T observation steps, H actions in a chunk, A action.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from etude.errors import ConfigError, DataError
from etude.low_precision import require_low_precision_of
from etude.policies import pretrained
from etude.policies.derived import Derivation, DerivedFeature, choose_features
from etude.policies.executor import Executing
from etude.policies.normalize import BOUNDED, Normalizer, make_origin
from etude.policies.spec import condense, spec_from_json, spec_to_json
from etude.signatures.annotations import understood
from etude.signatures.nested import ParametersOf, find_nested
from etude.types import DataSpec, Feature, Loss

SPEC_KEY = "etude_spec"
"""Where the metadata of a state dictionary holds a policy's spec, so that one without layers can be loaded."""


class PolicyModule(nn.Module, Executing):
    """A policy that takes its shapes from the data, normalises inside, and executes its own chunks.

    A subclass defines `make_layers(spec)`, `forward(batch)` (the loss) and `sample_actions(batch)` (a normalised
    chunk). Its constructor takes plain values only: they are saved, with the spec and the weights, by
    `save_pretrained`.

    Args:
        horizon: Actions in a chunk, the first of them for now.
        n_obs_steps: Observations in a row that the policy sees.
        n_action_steps: Actions executed of each chunk; None is all of them.
        temporal_ensemble_coeff: Weight of the executor's temporal ensembling; None is none.
        latency_steps: Control steps that computing a chunk takes.
        normalization: Mode by role or feature name.
        derived: Features that are computed from the data's, by name; see `DerivedFeature`.
        observed: Names of the features that the layers see; None is all of them.
    """

    default_normalization: ClassVar[Mapping[str, str]] = {}
    """Modes by role in which the policy differs from the defaults of `Normalizer`."""
    takes_relative_actions: ClassVar[bool] = True
    """Whether actions may be normalised relative to what is observed."""
    needs_spec: ClassVar[bool] = True
    """Whether there are no layers without the features of the data."""
    spec: DataSpec
    normalizer: Normalizer
    action_name: str
    action_shape: tuple[int, ...]
    action_dim: int
    _looked_at: Set[str] | None = None
    """Features of the data that the layers see, or that what they see is derived from; None is all of them."""
    _params: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the constructor's parameters, defaults included, for `save_pretrained`."""
        policy = super().__new__(cls)
        # `bind_partial`: copying makes an empty object first and fills it afterwards.
        signature = inspect.signature(cls.__init__)
        bound = signature.bind_partial(policy, *args, **kwargs)
        bound.apply_defaults()
        params = dict(list(bound.arguments.items())[1:])
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given = params.pop(parameter.name, {})
                params = {**_group_defaults(cls.__init__, parameter.annotation), **params, **given}
        object.__setattr__(policy, "_params", params)
        return policy

    def __init__(
        self,
        horizon: int,
        *,
        n_obs_steps: int = 1,
        n_action_steps: int | None = None,
        temporal_ensemble_coeff: float | None = None,
        latency_steps: int = 0,
        normalization: Mapping[str, str | Mapping[str, Any]] | None = None,
        derived: Mapping[str, Any] | None = None,
        observed: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if horizon < 1 or n_obs_steps < 1:
            raise ConfigError(
                f"{type(self).__name__} needs a chunk of at least one action and one observation, "
                f"got {horizon} and {n_obs_steps}"
            )
        self.horizon, self.n_obs_steps = horizon, n_obs_steps
        self.normalization = {**self.default_normalization, **(normalization or {})}
        self.derived = {name: DerivedFeature.of(name, recipe) for name, recipe in (derived or {}).items()}
        self.observed = observed
        self.is_built = False
        self.is_restored = False
        """Whether the weights come from `from_pretrained`, so that layers need not fetch any."""
        self.set_execution(n_action_steps, temporal_ensemble_coeff, latency_steps)

    # ---- for subclasses ----------------------------------------------------------------------------------------------

    def make_layers(self, spec: DataSpec) -> None:
        """Create the layers; `self.normalizer`, `action_name`, `action_shape` and `action_dim` are there."""
        raise NotImplementedError(f"{type(self).__name__} must define make_layers(spec)")

    def sample_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return normalised actions (B, H, action_dim) from normalised observations; in eval mode, without gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define sample_actions(batch)")

    @property
    def clips_actions(self) -> bool:
        """Whether samples are clipped to [-1, 1], which the action's normalisation must then fit."""
        return False

    # ---- windows -----------------------------------------------------------------------------------------------------

    @property
    def observation_delta_indices(self) -> list[int] | None:
        """Distances in frames of the observations in a batch; None is the present one, without a time dimension."""
        return None if self.n_obs_steps == 1 else list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self) -> list[int]:
        """Distances in frames of the actions in a batch."""
        return list(range(self.horizon))

    # ---- building ----------------------------------------------------------------------------------------------------

    def build(self, spec: DataSpec) -> None:
        """Create the layers and the normaliser for the features of a dataset."""
        if self.is_built:
            raise ConfigError(f"{type(self).__name__} is built already; make a new one for other data")
        self.spec = condense(spec)
        name, action = single_action(type(self).__name__, self.spec)
        self.action_name, self.action_shape = name, action.shape
        self.action_dim = math.prod(action.shape)
        derivation = Derivation(self.spec, self.derived, self.n_obs_steps)
        seen = choose_features(self.spec, derivation.features, self.observed)
        own = {key: feature for key, feature in seen.items() if key in self.spec.features}
        origin = make_origin(self.spec, name, self.normalization, self.n_obs_steps)
        if origin is not None and not self.takes_relative_actions:
            raise ConfigError(
                f"{type(self).__name__} looks at actions without what was seen; leave relative_to out of normalization"
            )
        self._looked_at = own.keys() | derivation.sources | (set() if origin is None else origin.sources)
        self.normalizer = Normalizer(DataSpec(own), self.normalization, derivation if self.derived else None, origin)
        mode = self.normalizer.modes.get(name)
        if self.clips_actions and mode not in BOUNDED:
            raise ConfigError(
                f"{type(self).__name__} clips its samples to [-1, 1], which actions under normalization {mode!r} "
                "leave; set normalization: {action: min_max} or do not clip"
            )
        self.make_layers(DataSpec(seen, self.spec.fps))
        self.is_built = True

    def extra_repr(self) -> str:
        """Say whether there are layers yet."""
        return "" if self.is_built else "not built: takes its shapes from the data"

    def __call__(self, batch: Any = None, **parts: Any) -> Any:
        """Call `forward` with a batch, given whole or in parts: `policy(batch)` or `policy(**batch)`."""
        return super().__call__(parts if batch is None else batch)

    # ---- losses ------------------------------------------------------------------------------------------------------

    def targets(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the actions of a batch as (B, steps, action_dim), and where they are real as (B, steps) of 0 and 1."""
        actions = batch[self.action_name]
        if actions.dim() == 1 + len(self.action_shape):
            actions = actions.unsqueeze(1)
        steps = len(self.action_delta_indices)
        if actions.shape[1] != steps or actions.shape[2:] != self.action_shape:
            raise DataError(
                f"{self.action_name} comes as {tuple(batch[self.action_name].shape)}, but {type(self).__name__} wants "
                f"(batch, {steps}, {', '.join(map(str, self.action_shape))}); give the data its action windows"
            )
        actions = actions.reshape(actions.shape[0], steps, -1)
        is_pad = batch.get(f"{self.action_name}_is_pad")
        if is_pad is None:
            return actions, actions.new_ones(actions.shape[:2], dtype=torch.float32)
        return actions, is_pad.logical_not().to(torch.float32)

    # ---- acting ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict_action_chunk(self, batch: Mapping[str, Any]) -> Tensor:
        """Return actions in the data's units, (B, H, *action_shape), the first one for now."""
        self.require_built()
        observation = self.observations(batch)
        with evaluating(self):
            actions = self.sample_actions(self.normalize_observation(observation))
        return self.unnormalize_action(actions.reshape(*actions.shape[:2], *self.action_shape), observation)

    def normalize_observation(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return an observation as `sample_actions` takes it."""
        return self.normalizer.normalize(observation)

    def unnormalize_action(self, actions: Tensor, observation: Mapping[str, Any] | None = None) -> Tensor:
        """Return normalised actions in the data's units; those that are relative need what was seen."""
        return self.normalizer.unnormalize_action(actions, observation)

    def sample_from_noise(self, batch: Mapping[str, Any], noise: Tensor) -> Tensor:
        """Return what `sample_actions` makes of given noise, where `noise_shape` says which."""
        raise NotImplementedError(f"{type(self).__name__} makes no actions from noise")

    @property
    def noise_shape(self) -> tuple[int, ...] | None:
        """Shape of the noise that one chunk is made from; None where none is needed."""
        return None

    @torch.no_grad()
    def select_action(self, observation: Mapping[str, Any], slots: Sequence[int] | None = None) -> Tensor:
        """Return the action for this step, (B, *action_shape), in the data's units.

        Args:
            observation: What each slot sees now, (B, ...), without a time dimension.
            slots: The slot of each row; the row's number unless given.
        """
        self.require_built()
        return self.executor.select(self.observations(observation), self.predict_action_chunk, slots)

    def reset(self, slots: Sequence[int] | None = None) -> None:
        """Forget plans and history at the start of an episode: of some slots, or of all."""
        self.executor.reset(slots)

    def observations(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what the policy looks at of a batch, on the policy's device; name what is missing."""
        names = [name for name, feature in self.spec.features.items() if self.looks_at(name, feature)]
        if missing := [name for name in names if name not in batch]:
            raise DataError(
                f"{type(self).__name__} was built to see {', '.join(missing)}, but the observation has only "
                f"{', '.join(sorted(batch))}"
            )
        device = self.normalizer_device
        return {name: torch.as_tensor(batch[name]).to(device) for name in names}

    def looks_at(self, name: str, feature: Feature) -> bool:
        """Tell whether a feature is part of the observation; a task is, where there are several."""
        is_seen = feature.role != "action" and (feature.role != "task" or (feature.classes or 0) > 1)
        return is_seen and (self._looked_at is None or name in self._looked_at)

    @property
    def normalizer_device(self) -> torch.device:
        """Where the policy lives."""
        return _device_of(self) or torch.device("cpu")

    def require_built(self) -> None:
        """Refuse to act before there are layers."""
        if not self.is_built:
            raise ConfigError(
                f"{type(self).__name__} has no layers yet; train it, call build(spec), or load it with from_pretrained"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Take other types or another device, as every `.to()`, `.half()` and `.bfloat16()` does in the end."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        require_low_precision_of(self)
        return self

    # ---- saving ------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return everything but the weights as JSON values: class, parameters, execution and spec."""
        self.require_built()
        return pretrained.describe(self, self._params)

    @staticmethod
    def from_description(description: Mapping[str, Any], source: str = "the description") -> PolicyModule:
        """Make the policy that `describe` described, built, with weights that are still to be loaded."""
        return pretrained.from_description(PolicyModule, description, source)

    def save_pretrained(self, directory: str | Path) -> None:
        """Save a complete policy: config.json and model.safetensors; no dataset is needed to use it."""
        self.require_built()
        pretrained.save(self, self.describe(), Path(directory))

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Load a policy saved by `save_pretrained`, or from a checkpoint; on `PolicyModule` itself, whichever it is.

        A class that is not registered, such as one of a script of yours, loads what it has saved itself.
        """
        policy: Self = pretrained.load(cls, Path(directory))
        return policy

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *rest: Any, **named: Any
    ) -> None:
        """Make the layers before torch looks for their weights, where the state dictionary knows the spec."""
        if not self.is_built and SPEC_KEY in local_metadata:
            self.is_restored = True
            self.build(spec_from_json(local_metadata[SPEC_KEY]))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest, **named)


def specs_of(module: nn.Module) -> dict[str, Any]:
    """Return the specs of the policies inside a module by name, as JSON values."""
    found = ((name, part) for name, part in module.named_modules() if isinstance(part, PolicyModule))
    return {name: spec_to_json(part.spec) for name, part in found if part.is_built}


def _group_defaults(constructor: Any, annotation: Any) -> dict[str, Any]:
    """Return the defaults of the options that a constructor's `**keywords` are said to be the fields of."""
    said = find_nested(understood(annotation, constructor.__globals__.get))
    if not isinstance(said, ParametersOf):
        return {}
    module, _, name = said.target.partition(":")
    return {field.name: field.default for field in fields(getattr(import_module(module), name))}


def single_action(owner: str, spec: DataSpec) -> tuple[str, Feature]:
    """Return name and feature of the one action in a spec."""
    actions = spec.with_role("action")
    if len(actions) != 1:
        raise DataError(f"{owner} needs one action feature; the data has {sorted(spec.features)}")
    ((name, action),) = actions.items()
    return name, action


def masked_loss(
    errors_BHA: Tensor, valid_BH: Tensor, per_sample_B: Tensor | None = None, metrics: Mapping[str, Any] | None = None
) -> Loss:
    """Return the loss over the real actions of a batch: errors averaged over dimensions, summed over real steps.

    A penalty per sample counts as often as the sample has real steps, so that `total / weight` is the mean error plus
    the mean penalty, and no split of the batch changes the update.
    """
    weight = valid_BH.sum()
    total = (errors_BHA.mean(-1) * valid_BH).sum()
    if per_sample_B is not None:
        total = total + (per_sample_B * valid_BH.sum(1)).sum()
    return Loss(total, weight, metrics or {})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for a while; parts that were in another mode than the whole come back as they were."""
    training = _in_training(model)
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


# A policy that acts asks for its device and its modes at every step. torch's own walks make the name of each part on
# their way: 11 us for the device of a small policy and 5 us for its modes, where these take 1.1 and 1.6.


def _device_of(module: nn.Module) -> torch.device | None:
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter.device
    for part in module._modules.values():
        if part is not None and (device := _device_of(part)) is not None:
            return device
    return None


def _in_training(module: nn.Module) -> list[nn.Module]:
    found = [module] if module.training else []
    for part in module._modules.values():
        if part is not None:
            found += _in_training(part)
    return found
