"""Simulators behind one interface: `make_environment("metaworld/pick-place")`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError

if TYPE_CHECKING:
    from etude.simulation.environments.base import Environment
    from etude.types import DataSpec


def make_environment(name: str, **options: Any) -> Environment:
    """Make an environment: metaworld/TASK, pusht, aloha/TASK, gym:ID, or `key/rest` of a registered one.

    Args:
        name: Key in the environment registry, and after a slash or a colon what it takes as its first argument.
        options: Further parameters of the environment; `etude list environments KEY` shows them.
    """
    from etude.reading.check import check_value
    from etude.reading.suggest import did_you_mean
    from etude.registry import ENVIRONMENT_REGISTRY
    from etude.simulation.environments.rendering import load_triton

    key, rest = split_name(name)
    constructor = ENVIRONMENT_REGISTRY.get(key)
    parameters = {one.name: one for one in ENVIRONMENT_REGISTRY.signature(key).parameters}
    for option, value in options.items():
        if option not in parameters:
            near = did_you_mean(option, parameters)
            raise ConfigError(f"{key} has no option {option!r}{near or ';'} It has {', '.join(parameters)}")
        if isinstance(value, str | bool | int | float):  # from Python other kinds may do as well
            for problem in check_value(parameters[option].annotation, value, value, (option,))[1]:
                raise ConfigError(f"{key}: {'.'.join(map(str, problem.path))}: {problem.message}")
    if isinstance(steps := options.get("max_steps"), int) and steps < 1:
        raise ConfigError(f"{key}: max_steps must be at least 1, got {steps}")
    missing = [one.name for one in parameters.values() if one.required and one.name not in options]
    if not rest and missing:
        raise ConfigError(f"{name!r} does not say which {missing[0]}; write {key}/NAME")
    load_triton()  # a registered environment may open OpenGL by itself
    environment: Environment = constructor(rest, **options) if rest else constructor(**options)
    return environment


def options_for(name: str, spec: DataSpec) -> dict[str, Any]:
    """Return the options with which an environment shows what a policy was trained to see; none where it has none."""
    from etude.registry import ENVIRONMENT_REGISTRY

    fit = getattr(ENVIRONMENT_REGISTRY.get(split_name(name)[0]), "options_for", None)
    return {} if fit is None else dict(fit(spec))


def split_name(name: str) -> tuple[str, str]:
    """Cut `metaworld/pick-place` or `gym:CartPole-v1` into the key of the registry and the rest."""
    places = [name.index(mark) for mark in "/:" if mark in name]
    cut = min(places, default=len(name))
    return name[:cut], name[cut + 1 :]
