"""Secret values that must appear in no output: register them where they enter, redact wherever text leaves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "***"
MIN_LENGTH = 4  # Shorter values would turn ordinary text into stars.
_ORDINARY = re.compile(r"(?i)true|false|null|none|[-+.0-9e_]{1,7}")  # `1e-4` from the environment is no secret
_MIN_LENGTH_INSIDE = 8  # Shorter ones ("root") occur inside innocent text ("/root/runs"); refusing that helps nobody.

# Every spelling of every secret, longest first, so that a secret that contains another is masked whole.
# Replaced as a whole on registration: readers in other threads see the old or the new tuple, never a half.
_spellings: tuple[str, ...] = ()


def register_secret(value: Any) -> None:
    """Remember a secret (text, or anything with `get_secret_value`) that `redact` must hide from now on."""
    global _spellings
    reveal = getattr(value, "get_secret_value", None)
    text = str(reveal() if callable(reveal) else value)
    if len(text.strip()) < MIN_LENGTH or _ORDINARY.fullmatch(text.strip()) or _is_path(text):
        return
    forms = {text, text.strip(), json.dumps(text)[1:-1], repr(text)[1:-1], quote(text, safe=""), quote_plus(text)}
    _spellings = tuple(sorted({*_spellings, *forms}, key=lambda form: (-len(form), form)))


def known_secrets() -> tuple[str, ...]:
    """Return what `redact` hides, for a process that is to hide the same."""
    return _spellings


def _is_path(text: str) -> bool:
    """Tell whether a value names something on this disk: `${env:DATA_DIR}` is no secret."""
    return os.path.isabs(text) and "\0" not in text and os.path.exists(text)


def redact(text: str) -> str:
    """Return `text` with every registered secret replaced by stars."""
    for spelling in _spellings:
        if spelling in text:
            text = text.replace(spelling, MASK)
    return text


def redact_tree(value: Any) -> Any:
    """Return nested mappings, lists and tuples with the secrets in their texts and numbers replaced by stars."""
    if isinstance(value, Mapping):
        return {redact_tree(key): redact_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [redact_tree(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, str):
        return redact(value)
    return MASK if holds_secret(value) else value


def holds_secret(value: Any) -> bool:
    """Tell whether one value is a registered secret, or contains one of eight or more characters."""
    text = str(value)
    return any(text == form or (len(form) >= _MIN_LENGTH_INSIDE and form in text) for form in _spellings)
