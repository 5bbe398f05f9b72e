"""Turn an interpolated tree into an `ExperimentConfig`, or say everything that is wrong with it."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from etude.config.compose import COMPONENT_LISTS, COMPONENTS
from etude.config.interpolate import Interpolated, Interpolation
from etude.config.origins import Problem, lookup
from etude.config.params import check_params, find_misfits
from etude.config.schema import SCHEMA_VERSION, Component, ExperimentConfig
from etude.config.wording import explain_errors
from etude.config.yaml12 import Path
from etude.errors import RegistryError
from etude.registry import REGISTRIES, Registry, is_dataset_factory, load_plugins

KINDS = {
    "policy": "policies", "data": "data", "eval_data": "data", "algorithm": "algorithms", "trainer": "trainers",
    "engine": "engines", "loggers": "loggers", "callbacks": "callbacks",
}  # fmt: skip
"""The registry of each key that holds components."""


def validate(tree: Interpolated) -> tuple[ExperimentConfig | None, list[Problem]]:
    """Check sections against the schema and components against their registries."""
    values, stored = tree.values, tree.stored
    version = values.get("schema_version", SCHEMA_VERSION)
    if type(version) is int and version > SCHEMA_VERSION:
        text = f"version {version} is newer than this etude reads ({SCHEMA_VERSION}); upgrade etude"
        return None, [Problem(("schema_version",), text)]
    problems = list(find_misfits(ExperimentConfig, values, stored, ()))
    problems += _load_plugins(values)
    config: ExperimentConfig | None = None
    try:
        config = ExperimentConfig.model_validate(values)
    except ValidationError as error:
        known = {problem.path for problem in problems}
        found = explain_errors(error.errors(include_url=False), values, stored, ())
        problems += [problem for problem in found if problem.path not in known]
    accepted: dict[Path, dict[str, Any]] = {}
    for path, kind in _components(values):
        params, found = _check_component(REGISTRIES[kind], lookup(values, path), lookup(stored, path), path)
        accepted[path] = params
        problems += found
    problems += _check_optimizers(values, stored)
    if config is None or problems:
        return None, problems
    return _with_params(config, accepted), []


def _load_plugins(values: dict[str, Any]) -> list[Problem]:
    problems = []
    plugins = values.get("plugins")
    for index, plugin in enumerate(plugins if isinstance(plugins, list) else []):
        if not isinstance(plugin, str):
            continue  # a wrong type, reported as such
        try:
            load_plugins([plugin])
        except RegistryError as error:
            problems.append(Problem(("plugins", index), str(error)))
    return problems


def _components(values: dict[str, Any]) -> list[tuple[Path, str]]:
    single = [slot for slot in COMPONENTS if isinstance(values.get(slot), dict)]
    found: list[tuple[Path, str]] = [((slot,), KINDS[slot]) for slot in single]
    for slot in COMPONENT_LISTS:
        items = values.get(slot)
        for index, item in enumerate(items if isinstance(items, list) else []):
            if isinstance(item, dict):
                found.append(((slot, index), KINDS[slot]))
    return found


def _check_component(
    registry: Registry[Any], given: dict[str, Any], stored: Any, path: Path
) -> tuple[dict[str, Any], list[Problem]]:
    key, params = given.get("type"), given.get("params")
    params = {} if params is None else params
    if not isinstance(key, str) or not key or not isinstance(params, dict):
        return {}, []  # reported by the schema
    shown = stored.get("type") if isinstance(stored, dict) else stored
    try:
        signature = registry.signature(key)
        component = registry.loaded(key)
    except RegistryError as error:
        hidden = isinstance(shown, Interpolation)
        return {}, [Problem((*path, "type"), f"{shown} names no {registry.noun}" if hidden else str(error))]
    if registry.name == "data" and component is not None and is_dataset_factory(component):
        return dict(params), []  # its `build` takes them as they are; what it leaves unread is refused there
    kept = stored.get("params") if isinstance(stored, dict) else stored
    inner = kept if isinstance(kept, dict) else dict.fromkeys(params, kept)
    return check_params(signature, params, inner, (*path, "params"), registry.supplied)


def _check_optimizers(values: dict[str, Any], stored: dict[str, Any]) -> list[Problem]:
    training = values.get("training")
    if not isinstance(training, dict):
        return []
    sections: list[tuple[Path, str, Any, Any]] = [
        (("training",), "optimizer", training.get("optimizer", "adamw"), training.get("optimizer_params"))
    ]
    several = training.get("optimizers")
    for name, section in several.items() if isinstance(several, dict) else ():
        if isinstance(section, dict):
            inside: Path = ("training", "optimizers", name)
            sections.append((inside, "type", section.get("type", "adamw"), section.get("params")))
    problems = []
    for path, key_name, key, params in sections:
        if not isinstance(key, str):
            continue
        registry = REGISTRIES["optimizers"]
        where = (*path, "optimizer_params" if key_name == "optimizer" else "params")
        given = params if isinstance(params, dict) else {}
        try:
            # Reading torch's source takes 30 ms; without parameters there is nothing to compare with it.
            if key in registry and not given and registry.loaded(key) is None:
                continue
            kept = lookup(stored, where)
            inner = kept if isinstance(kept, dict) else dict.fromkeys(given, kept)
            problems += check_params(registry.signature(key), given, inner, where, registry.supplied)[1]
        except RegistryError as error:
            shown = lookup(stored, (*path, key_name))
            hidden = isinstance(shown, Interpolation)
            problems.append(Problem((*path, key_name), f"{shown} names no optimizer" if hidden else str(error)))
    return problems


def _with_params(config: ExperimentConfig, accepted: dict[Path, dict[str, Any]]) -> ExperimentConfig:
    """Put the checked parameters in place of the written ones."""
    update: dict[str, Any] = {}
    for slot in COMPONENTS:
        component = getattr(config, slot)
        if isinstance(component, Component) and (slot,) in accepted:
            update[slot] = component.model_copy(update={"params": accepted[(slot,)]})
    for slot in COMPONENT_LISTS:
        items = getattr(config, slot)
        update[slot] = [c.model_copy(update={"params": accepted.get((slot, i), c.params)}) for i, c in enumerate(items)]
    return config.model_copy(update=update)
