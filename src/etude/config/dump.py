"""Write a configuration so that loading it again gives the same configuration, without its secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.config import yaml12
from etude.config.compose import COMPONENT_LISTS, COMPONENTS
from etude.config.interpolate import Interpolation, escape
from etude.config.schema import ExperimentConfig
from etude.registry import REGISTRIES

if TYPE_CHECKING:
    from etude.config.load import Loaded


def to_yaml(loaded: Loaded) -> str:
    """Return the resolved configuration as YAML: every setting, defaults included; `etude train` reproduces the run."""
    return yaml12.write(loaded.stored())


def plain(config: ExperimentConfig, raw: dict[str, Any], *, escaped: bool = True) -> dict[str, Any]:
    """Return the defaults of the schema with what was given laid over them, as plain values."""
    components = {*COMPONENTS, *COMPONENT_LISTS, "plugins"}
    tree = config.model_dump(mode="json", exclude=components)
    ordered: dict[str, Any] = {}
    for name in type(config).model_fields:
        if name in components:
            given = raw.get(name)
            ordered[name] = _component(given) if name in COMPONENTS else [_component(item) for item in given or []]
            if isinstance(given, Interpolation):
                ordered[name] = given
        else:
            ordered[name] = _overlay(tree[name], raw[name]) if name in raw else tree[name]
    _leave_rates_to_factories(config, ordered["training"])
    cleaned: dict[str, Any] = _clean(ordered, escaped)
    return cleaned


def _leave_rates_to_factories(config: ExperimentConfig, training: Any) -> None:
    """Leave unsaid what an optimizer factory decides by itself: written out, our default would replace its own."""
    known = REGISTRIES["optimizers"]
    if isinstance(training, dict):
        sections: list[tuple[Any, str, Any]] = [(config.training, config.training.optimizer, training)]
        for name, section in config.training.optimizers.items():
            sections.append((section, section.type, (training.get("optimizers") or {}).get(name)))
        for section, kind, written in sections:
            for name in {"lr", "weight_decay"} - section.model_fields_set:
                if isinstance(written, dict) and not known.is_builtin(kind):
                    written.pop(name, None)


def _component(given: Any) -> Any:
    if isinstance(given, dict) and "params" in given and given["params"] is None:
        return {**given, "params": {}}
    return given


def _overlay(base: Any, given: Any) -> Any:
    if given is None and isinstance(base, dict):
        return base  # an empty section
    if isinstance(base, dict) and isinstance(given, dict):
        return {key: _overlay(base[key], given[key]) if key in given else base[key] for key in base} | {
            key: value for key, value in given.items() if key not in base
        }
    return given


def _clean(value: Any, escaped: bool) -> Any:
    if isinstance(value, dict):
        return {key: _clean(item, escaped) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item, escaped) for item in value]
    if isinstance(value, Interpolation) or not isinstance(value, str):
        return str(value) if isinstance(value, str) else value
    return escape(value) if escaped and "${" in value else value


def show_value(value: Any) -> str:
    """Return one value as text on one line."""
    if isinstance(value, str):
        return value if value and "\n" not in value else repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(show_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
