"""The signatures of Etude's own components, from the file that `scripts/signatures.py` writes.

Parsing the sources instead took 25 of 260 ms of `etude check`. What is not in the file is parsed.
"""

from __future__ import annotations

import ast
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from etude.signatures.annotations import interpret
from etude.signatures.values import Parameter, Signature

FILE = Path(__file__).with_name("builtin.jsonl")
"""One component a line, in order: target, summary, whether it is open, and its parameters."""


def read_stored(target: str) -> Signature | None:
    """Return the stored signature of `module:attribute`; None if there is none."""
    line = _lines().get(target)
    return None if line is None else from_line(line)


@lru_cache(maxsize=1)
def _lines() -> dict[str, list[Any]]:
    try:
        text = FILE.read_text(encoding="utf-8")
    except FileNotFoundError:  # as it is made for the first time
        return {}
    return {line[0]: line for line in map(json.loads, text.splitlines())}


def from_line(line: list[Any]) -> Signature:
    """Return the signature that a line of the file holds."""
    _, summary, is_open, parameters = line
    return Signature(tuple(_parameter(*fields) for fields in parameters), is_open, summary)


def _parameter(name: str, written: str, default: str, text: str = "", meant: str = "") -> Parameter:
    return Parameter(name, written, read_type(meant or written), default, not default, text)


@lru_cache(maxsize=256)
def read_type(text: str) -> Any:
    """Return the type that an annotation stands for by itself, without the names of its module."""
    return interpret(ast.parse(text, mode="eval").body, {"Path": Path}.get) if text else Any
