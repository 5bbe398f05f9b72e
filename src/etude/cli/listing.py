"""`etude list`: what a config can name, and the parameters each takes, read without importing torch."""

from __future__ import annotations

from typing import Any

from etude.cli.output import print_json, print_table, say
from etude.config.presets import describe_preset, presets
from etude.errors import RegistryError
from etude.reading.suggest import did_you_mean
from etude.registry import REGISTRIES, Registry, load_plugins

PRESETS = "presets"


def print_components(kind: str | None, key: str | None, *, plugins: list[str], as_json: bool) -> None:
    """Print the kinds, the names of one kind, or the parameters of one name."""
    load_plugins(plugins)
    if kind is None:
        _print_kinds(as_json)
        return
    if kind == PRESETS:
        _print_presets(key, as_json)
        return
    registry = _find_kind(kind)
    if key is None:
        _print_keys(kind, registry, as_json)
    else:
        _print_parameters(kind, registry, key, as_json)


def _find_kind(kind: str) -> Registry[Any]:
    if kind in REGISTRIES:
        return REGISTRIES[kind]
    near = did_you_mean(kind, [PRESETS, *REGISTRIES])
    known = ", ".join([PRESETS, *REGISTRIES])
    raise RegistryError(f"unknown kind {kind!r}{near + ' Known' if near else '; known'}: {known}")


def _print_kinds(as_json: bool) -> None:
    names = {PRESETS: list(presets()), **{kind: registry.keys() for kind, registry in REGISTRIES.items()}}
    if as_json:
        print_json(names)
        return
    print_table(("kind", "names"), [(kind, ", ".join(keys) or "-") for kind, keys in names.items()])
    say("etude list KIND shows what each is for, etude list KIND NAME its parameters.")


def _print_presets(key: str | None, as_json: bool) -> None:
    known = presets()
    if key is not None and key not in known:
        near = did_you_mean(key, known)
        raise RegistryError(f"unknown preset {key!r}{near + ' Known' if near else '; known'}: {', '.join(known)}")
    if key is not None and as_json:
        print_json({"name": key, "path": str(known[key]), "text": known[key].read_text(encoding="utf-8")})
    elif key is not None:
        say(known[key].read_text(encoding="utf-8").rstrip("\n"))
    elif as_json:
        print_json(
            [{"name": name, "summary": describe_preset(path), "path": str(path)} for name, path in known.items()]
        )
    else:
        print_table((PRESETS, "what it is"), [(name, describe_preset(path)) for name, path in known.items()])
        say("etude train NAME trains one, etude list presets NAME prints it, to be kept as a file and changed.")


def _print_keys(kind: str, registry: Registry[Any], as_json: bool) -> None:
    described = [registry.describe(key) for key in registry]
    if as_json:
        print_json([{"name": one.key, "summary": one.summary} for one in described])
    elif described:
        print_table((kind, "what it is"), [(one.key, one.summary) for one in described])
    else:
        say(f"no {kind} are registered; list a plugin module under `plugins:` or pass --plugin MODULE")


def _print_parameters(kind: str, registry: Registry[Any], key: str, as_json: bool) -> None:
    described = registry.describe(key)
    if as_json:
        parameters = [
            {
                "name": one.name,
                "type": one.type,
                "required": one.required,
                "default": None if one.required else one.default,
                "help": one.help,
            }
            for one in described.parameters
        ]
        print_json({"kind": kind, "name": key, "summary": described.summary, "parameters": parameters})
        return
    say(f"{key}: {described.summary}" if described.summary else key)
    say()
    if not described.parameters:
        say("It takes no parameters.")
        return
    rows = [(one.name, one.type, "required" if one.required else one.default, one.help) for one in described.parameters]
    print_table(("parameter", "type", "default", "help"), rows)
