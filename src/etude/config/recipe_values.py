"""Checks of single values in recipes; each raises ValueError with what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.config.moving import text
from etude.config.recipe_keys import TRAINERS

LOGGERS = ("console", "wandb", "mlflow", "tensorboard", "trackio")


def refusing(why: str, allowed: Sequence[Any] = ()) -> Callable[[Any], None]:
    """Return a check that refuses everything but what asks for nothing, and what is allowed."""

    def refuse(value: Any) -> None:
        if value not in (False, None, *allowed):
            raise ValueError(why)

    return refuse


def one_of(*names: str, instead: Mapping[str, str] | None = None) -> Callable[[Any], str]:
    """Return a check that a value is one of some names; `instead` says more of others."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            told = (instead or {}).get(value) if isinstance(value, str) else None
            raise ValueError(told or f"expected {' or '.join(names)}, got {value!r}")
        return value

    return check


def only(allowed: bool, why: str) -> Callable[[Any], bool]:
    """Return a check that lets one truth value pass."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, got {value!r}")
        if value is not allowed:
            raise ValueError(why)
        return value

    return check


def count(value: Any) -> int:
    """Require a whole number, at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"expected a whole number, at least 1, got {value!r}")
    return value


def count_from_zero(value: Any) -> int:
    """Require a whole number, at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a whole number, at least 0, got {value!r}")
    return value


def number(value: Any) -> float:
    """Require a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"expected a number, got {value!r}")
    return value


def clip(value: Any) -> float | None:
    """Require a norm to clip gradients at; 0 does not clip."""
    if number(value) < 0:
        raise ValueError(f"expected a norm, or 0 for none, got {value!r}")
    return value or None


def every(value: Any) -> int | None:
    """Require how often something is done, in steps; 0 and -1 never do it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise ValueError(f"expected a whole number of steps, or 0 for never, got {value!r}")
    return value if value > 0 else None


def rank(value: Any) -> int | None:
    """Require the rank of adapters; 0 trains all weights."""
    return count_from_zero(value) or None


def run_name(value: Any) -> str:
    """Require the name of a run: a folder, not a path."""
    if text(value) in (".", "..") or os.sep in value:
        raise ValueError(f"names a run, and cannot be a path; got {value!r}")
    return str(value)


def trainer_type(value: Any) -> str:
    """Require the name of a trainer that needs no file."""
    if not isinstance(value, str) or value not in TRAINERS:
        raise ValueError(
            f"{value!r} is no trainer; known: {', '.join(TRAINERS)}; one of your own: custom_trainer_module_path"
        )
    return value


def loggers(value: Any) -> None:
    """Require the names of loggers."""
    for name in value if isinstance(value, list) else [value]:
        if name not in LOGGERS:
            raise ValueError(f"{name!r} is no logger; known: {', '.join(LOGGERS)}")
