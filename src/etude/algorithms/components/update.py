"""What trainers made from (models, optimizers, loss, device) share: one update of all components a step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from etude.errors import ConfigError

Components = Mapping[str, nn.Module]
"""Models by the names that an experiment gives them; an `nn.ModuleDict` is one."""


class ComponentTrainer:
    """Turn a batch into losses, go back once, clip each component, and step every optimizer.

    A subclass names its components and defines `losses(data, epoch)`, of which `total` is minimised. Metrics stay
    tensors: whoever logs them waits for the device, not every step.

    Args:
        models: The components by name.
        optimizers: Their optimizers by name.
        loss: A module for a part of the loss, or none.
        device: Where everything lives.
        clip_norm: Largest norm of a component's gradient; null leaves gradients as they are.
    """

    required: ClassVar[tuple[str, ...]] = ()
    """Components that there must be."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Endings of the names of those that there may be."""

    def __init__(self, models: Any, optimizers: Any, loss: Any, device: Any, clip_norm: float | None = 1.0) -> None:
        if clip_norm is not None and clip_norm <= 0:
            raise ConfigError(f"clip_norm must be more than 0, or null for none; got {clip_norm}")
        self.check_components(models)
        self.models, self.optimizers, self.loss, self.device = models, optimizers, loss, device
        self.clip_norm = clip_norm

    @classmethod
    def check_components(cls, models: Components) -> None:
        """Refuse components that are missing, and those that would never be used."""
        known = f"{cls.__name__} is made of {', '.join(cls.required)}"
        known += f", and of any *{' or *'.join(cls.optional)}" if cls.optional else ""
        if missing := [name for name in cls.required if name not in models]:
            raise ConfigError(f"{known}; there is no {', '.join(missing)} among {', '.join(models.keys())}")
        used = [name for name in models if name in cls.required or (cls.optional and name.endswith(cls.optional))]
        if strays := [name for name in models if name not in used]:
            raise ConfigError(f"{known}; nothing uses {', '.join(strays)}")

    def losses(self, data: Mapping[str, Any], epoch: int) -> dict[str, Tensor]:
        """Return `total`, which is minimised, and its parts."""
        raise NotImplementedError(f"{type(self).__name__} must define losses(data, epoch)")

    def after_update(self, epoch: int) -> dict[str, Any]:
        """Do what comes after every update, and return further metrics."""
        return {}

    def train_step(self, data: Mapping[str, Any], epoch: int | None = 0, **kwargs: Any) -> dict[str, Any]:
        """Make one update and return the losses, the norm of the gradient and the highest learning rate."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        found = self.losses(data, epoch or 0)
        found["total"].backward()  # type: ignore[no-untyped-call]
        norms = self._clip()
        for optimizer in self.optimizers.values():
            optimizer.step()
        metrics: dict[str, Any] = {name: value.detach() for name, value in found.items()}
        if norms:
            metrics["grad_norm"] = torch.stack(list(norms.values())).norm()
            metrics |= {f"{name} grad_norm": norm for name, norm in norms.items()}
        rates = [group["lr"] for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        metrics["lr"] = float(max(rates, default=0.0))
        return metrics | self.after_update(epoch or 0)

    def _clip(self) -> dict[str, Tensor]:
        norms: dict[str, Tensor] = {}
        for name, model in self.models.items():
            params = [parameter for parameter in model.parameters() if parameter.grad is not None]
            if params:
                limit = self.clip_norm or float("inf")
                norms[name] = nn.utils.clip_grad_norm_(params, limit).detach()
        return norms


def ask(model: nn.Module, offered: Mapping[str, Any]) -> Any:
    """Call a component with what it takes, by name, of what there is."""
    names, needed = inputs_of(model)
    if missing := [name for name in needed if name not in offered]:
        raise ConfigError(
            f"a component takes {', '.join(missing)}, which there is not; there are {', '.join(offered)}: change "
            "`inputs` of its file, or the data"
        )
    return model(**{name: value for name, value in offered.items() if names is None or name in names})


def inputs_of(model: nn.Module) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Return the names a component takes, None for any, and those it cannot do without."""
    plan = getattr(model, "plan", None)  # of a model from YAML
    if plan is not None:
        return frozenset(one.name for one in plan.inputs), tuple(one.name for one in plan.inputs if not one.optional)
    return _parameters_of(type(model).forward)


@cache
def _parameters_of(forward: Any) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    found = list(inspect.signature(forward).parameters.values())[1:]
    named = [one for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = tuple(one.name for one in named if one.default is one.empty)
    is_open = any(one.kind is one.VAR_KEYWORD for one in found)
    return None if is_open else frozenset(one.name for one in named), needed
