"""Turn an interpolated tree into an `ExperimentConfig`, or say everything that is wrong with it."""

from __future__ import annotations

from typing import Any

from etude.builtins import BUILTINS
from etude.config.components import COMPONENT_LISTS, COMPONENTS, KINDS
from etude.config.nested import check_nested
from etude.config.params import check_inside, check_params
from etude.config.schema import SCHEMA_VERSION, Component, ExperimentConfig
from etude.config.training import OptimizerConfiguration
from etude.errors import RegistryError
from etude.reading.check import check_model
from etude.reading.interpolate import Interpolated, Interpolation
from etude.reading.origins import Problem, dotted, lookup
from etude.reading.yaml12 import Path
from etude.registry import REGISTRIES, Registry, load_plugins
from etude.signatures import Signature
from etude.signatures.fit import is_dataset_factory, is_train_step
from etude.signatures.nested import OptionsOf

RATES = ("lr", "weight_decay")
"""What a section says beside an optimizer's parameters, and a registered factory may also take among them."""


def validate(tree: Interpolated) -> tuple[ExperimentConfig | None, list[Problem]]:
    """Check sections against the schema and components against their registries."""
    values, stored = tree.values, tree.stored
    version = values.get("schema_version", SCHEMA_VERSION)
    if type(version) is int and version > SCHEMA_VERSION:
        text = f"version {version} is newer than this etude reads ({SCHEMA_VERSION}); upgrade etude"
        return None, [Problem(("schema_version",), text)]
    plugins = _load_plugins(values)
    config, problems = check_model(ExperimentConfig, tree)
    problems += plugins
    accepted: dict[Path, dict[str, Any]] = {}
    for path, kind in _components(values):
        params, found = _check_component(REGISTRIES[kind], lookup(values, path), lookup(stored, path), path)
        accepted[path] = params
        problems += found
    problems += _check_optimizers(values, stored)
    problems += _check_loss(values)
    problems += _check_online(values, stored)
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
    own = registry.is_builtin(key)  # a factory of ours has a constructor that says what its `build` takes
    if registry.name == "data" and component is not None and is_dataset_factory(component) and not own:
        return dict(params), []  # its `build` takes them as they are; what it leaves unread is refused there
    kept = stored.get("params") if isinstance(stored, dict) else stored
    inner = kept if isinstance(kept, dict) else dict.fromkeys(params, kept)
    return check_params(signature, params, inner, (*path, "params"), registry.supplied_to(key))


def _check_loss(values: dict[str, Any]) -> list[Problem]:
    """Refuse a loss that nobody would be given."""
    if not isinstance(values.get("loss"), dict):
        return []
    if values.get("algorithm") is not None:
        return [Problem(("loss",), "stands beside an algorithm, which makes the loss; leave one of them out")]
    trainer = values.get("trainer")
    key = trainer.get("type") if isinstance(trainer, dict) else "trainer"
    registry = REGISTRIES["trainers"]
    if isinstance(key, str) and key in registry and key != "trainer":
        if registry.is_builtin(key) or is_train_step(registry.get(key)):
            return []
    elif isinstance(trainer, dict) and key != "trainer":
        return []  # the trainer is what is wrong
    return [Problem(("loss",), "is for a trainer made from (models, optimizers, loss, device); name it as trainer")]


def _check_online(values: dict[str, Any], stored: dict[str, Any]) -> list[Problem]:
    """Ask for data where nothing is played, and look into the options of the environment."""
    online = values.get("online")
    if online is None and values.get("data") is None:
        return [Problem(("data",), "required, and missing")]
    if not isinstance(online, dict) or not isinstance(online.get("options"), dict):
        return []
    kept, path = lookup(stored, ("online", "options")), ("online", "options")
    return check_nested(OptionsOf("env"), online["options"], kept, path, online, check_inside)


def _check_optimizers(values: dict[str, Any], stored: dict[str, Any]) -> list[Problem]:
    training = values.get("training")
    if not isinstance(training, dict):
        return []
    sections: list[tuple[Path, str, dict[str, Any]]] = [(("training",), "optimizer", training)]
    several = training.get("optimizers")
    for name, section in several.items() if isinstance(several, dict) else ():
        if isinstance(section, dict):
            sections.append((("training", "optimizers", name), "type", section))
    problems = []
    for path, key_name, section in sections:
        key = section.get(key_name, "adamw")
        if not isinstance(key, str):
            continue
        registry = REGISTRIES["optimizers"]
        field = "optimizer_params" if key_name == "optimizer" else "params"
        where, params = (*path, field), section.get(field)
        given = params if isinstance(params, dict) else {}
        try:
            # Reading torch's source takes 30 ms; without parameters there is nothing to compare with it.
            if not given and key in registry and registry.loaded(key) is None and key not in BUILTINS["optimizers"]:
                continue
            kept = lookup(stored, where)
            inner = kept if isinstance(kept, dict) else dict.fromkeys(given, kept)
            signature = registry.signature(key)
            if not registry.is_builtin(key):
                problems += _check_rates(key, signature, section, given, path, where)
                signature = signature.without(name for name in RATES if name not in given)
            problems += check_params(signature, given, inner, where, registry.supplied_to(key))[1]
        except RegistryError as error:
            shown = lookup(stored, (*path, key_name))
            hidden = isinstance(shown, Interpolation)
            problems.append(Problem((*path, key_name), f"{shown} names no optimizer" if hidden else str(error)))
    return problems


def _check_rates(
    key: str, signature: Signature, section: dict[str, Any], given: dict[str, Any], path: Path, where: Path
) -> list[Problem]:
    """Find a rate that is said twice, and one that a factory would not take."""
    problems = []
    for name in RATES:
        if name in section and name in given:
            problems.append(Problem((*where, name), f"is said twice; leave it out here or at {dotted((*path, name))}"))
        elif name in section and signature.get(name) is None and not signature.open:
            # What runs of before have stored says every default, so a default that nobody takes is no mistake.
            default = OptimizerConfiguration.model_fields[name].default
            if section[name] != default:
                takes = ", ".join(p.name for p in signature.parameters) or "none"
                problems.append(Problem((*path, name), f"would do nothing: optimizer {key!r} takes {takes}"))
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
