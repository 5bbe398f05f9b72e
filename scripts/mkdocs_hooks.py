"""Fill the reference pages from the source, so that help, schema and documentation are one text."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from pydantic_core import PydanticUndefined

_FIELDS = re.compile(r"^::: ([\w.]+):(\w+)$", re.MULTILINE)
_COMPONENT = re.compile(r"^::: component (\w+) (\w+)$", re.MULTILINE)
_PUBLIC = re.compile(r"^::: public ([\w.]+)$", re.MULTILINE)
_ANNOTATED = re.compile(r"^Annotated\[(.*), BeforeValidator\(\w+\)\]$")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace directives by tables made from the source.

    `::: module:Class` becomes the fields of a configuration section, `::: component KIND KEY` the parameters of a
    registered component, `::: exit-codes` the errors and their codes, and `::: public PACKAGE` a `::: PACKAGE.NAME`
    for each public name of a package, whose docstrings mkdocstrings then shows.
    """
    markdown = _PUBLIC.sub(lambda match: _public_names(match.group(1)), markdown)
    markdown = _COMPONENT.sub(lambda match: _parameter_table(match.group(1), match.group(2)), markdown)
    markdown = _FIELDS.sub(lambda match: _field_table(match.group(1), match.group(2)), markdown)
    return markdown.replace("::: exit-codes", _exit_code_table()) if "::: exit-codes" in markdown else markdown


def _public_names(package: str) -> str:
    names = sorted(importlib.import_module(package).__all__, key=str.lower)
    return "\n\n".join(f"::: {package}.{name}" for name in names)


def _field_table(module: str, name: str) -> str:
    section = getattr(importlib.import_module(module), name)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    texts = section.help_texts()
    for key, field in section.model_fields.items():
        kind = _ANNOTATED.sub(r"\1", str(section.__annotations__[key]))
        kind = kind.replace("DurationField", "duration").replace("|", "\\|")
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else "null" if default is None else str(default)
        meaning = texts.get(key, "").replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{key}` | {kind} | {shown} | {meaning} |")
    return "\n".join(rows)


def _parameter_table(kind: str, key: str) -> str:
    described = importlib.import_module("etude.registry").REGISTRIES[kind].describe(key)
    rows = [described.summary, "", "| parameter | type | default | meaning |", "|---|---|---|---|"]
    for parameter in described.parameters:
        default = "required" if parameter.required else f"`{parameter.default}`"
        type_text, meaning = (text.replace("|", "\\|") for text in (parameter.type, parameter.help))
        rows.append(f"| `{parameter.name}` | {type_text} | {default} | {meaning} |")
    return "\n".join(rows)


def _exit_code_table() -> str:
    errors = importlib.import_module("etude.errors")
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and hasattr(value, "exit_code")]
    rows = ["| code | error | when |", "|---|---|---|"]
    for error in sorted(classes, key=lambda error: error.exit_code):
        rows.append(f"| {error.exit_code} | `{error.__name__}` | {inspect.getdoc(error)} |")
    rows.append("| 130, 143 | `Interrupted` | SIGINT or SIGTERM: the run was saved, and `etude resume` goes on. |")
    return "\n".join(rows)
