"""Write a configuration so that loading it again gives the same configuration, without its secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.config.components import COMPONENT_LISTS, COMPONENTS
from etude.config.schema import ExperimentConfig
from etude.reading import yaml12
from etude.reading.interpolate import Interpolation
from etude.reading.plain import overlay
from etude.registry import REGISTRIES

if TYPE_CHECKING:
    from etude.config.load import Loaded


def to_yaml(loaded: Loaded) -> str:
    """Return the resolved configuration as YAML: every setting, defaults included; `etude train` reproduces the run."""
    return yaml12.write(loaded.stored())


def plain(config: ExperimentConfig, raw: dict[str, Any]) -> dict[str, Any]:
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
        elif name in raw or name in tree:
            ordered[name] = overlay(tree.get(name), raw[name]) if name in raw else tree[name]
    _leave_rates_to_factories(config, ordered["training"])
    return ordered


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
