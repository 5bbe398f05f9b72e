"""Plain functions and modules in the places of algorithms and policies, and clear words where they do not fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from etude.errors import ConfigError

_PREDICTIONS = frozenset(
    ["input", "inputs", "prediction", "predictions", "pred", "preds", "y_pred", "output", "outputs", "logits"]
)
"""What losses of (prediction, target) call their first argument."""


class FunctionAlgorithm:
    """An algorithm made of a function: of (policy, batch), or of (prediction, target) where batches are pairs.

    Args:
        function: The function; a loss module of torch is one of (prediction, target).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compares = _compares(function)
        """Whether the function compares a prediction with a target."""

    def loss(self, policy: Any, batch: Any) -> Any:
        """Return what the function makes of a batch."""
        if not self.compares:
            return self.function(policy, batch)
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise ConfigError(
                f"{_name(self.function)} compares a prediction with a target, which needs batches that are pairs "
                f"(x, y); got {describe_batch(batch)}; give data as (X, Y), or a function of (policy, batch)"
            )
        return self.function(policy(batch[0]), batch[1])


def as_algorithm(given: Any) -> Any:
    """Return an algorithm; a function becomes one, and what cannot be one is refused."""
    if given is None or (not isinstance(given, type) and callable(getattr(given, "loss", None))):
        return given
    if isinstance(given, type):
        raise ConfigError(f"algorithm is the class {given.__name__}, not an object; write {given.__name__}(...)")
    if isinstance(given, str):
        raise ConfigError(f"algorithm is the text {given!r}; in Python give the object, in a file the name")
    if not callable(given):
        raise ConfigError(
            f"algorithm must have loss(policy, batch) or be a function of them, got {type(given).__name__}"
        )
    return FunctionAlgorithm(given)


def ask_policy(policy: Any, batch: Any) -> Any:
    """Return the loss that a policy makes of a batch; say so if its forward cannot take one."""
    try:
        return policy(batch)
    except (TypeError, AttributeError) as error:
        # A module of torch's own knows nothing of losses; in one of the user's, the fault may lie anywhere.
        if _takes_one(policy) and not type(policy).__module__.startswith("torch."):
            raise
        raise ConfigError(
            f"the forward of {type(policy).__name__} does not take a batch ({describe_batch(batch)}); define "
            "forward(self, batch) to return a loss, give an algorithm such as a function of (policy, batch), or "
            f"override compute_loss: {error}"
        ) from error


def describe_batch(batch: Any) -> str:
    """Return what a batch is in a few words."""
    if isinstance(batch, Mapping):
        return f"a dictionary with {', '.join(map(str, batch))}"
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    return f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else type(batch).__name__


def _takes_one(policy: Any) -> bool:
    try:
        inspect.signature(getattr(policy, "forward", policy)).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C: it cannot be asked
        return True
    return True


def _compares(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(getattr(function, "forward", function)).parameters.values())
    except (TypeError, ValueError):
        return isinstance(function, nn.Module)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    loose = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [p for p in parameters if p.default is p.empty and p.name in names]
    if not loose and (len(names) < 2 or len(required) > 2):
        raise ConfigError(
            f"{_name(function)} cannot be an algorithm: it takes ({', '.join(names)}), not (policy, batch) or "
            "(prediction, target)"
        )
    return isinstance(function, nn.Module) or (bool(names) and names[0] in _PREDICTIONS)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
