"""Pages: one HTML file each, from templates that lie beside the modules that fill them; nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from jinja2 import Environment

PACKAGE = Path(__file__).parents[1]
T = TypeVar("T")


def render(template: str, **values: Any) -> str:
    """Fill a template, named by its path in the package; what is not marked `safe` in it is escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(PACKAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.globals.update(**scripts("runs/page.js"), style=styles("runs/page.css"))
    made.globals.update(now=now, interval_text=format_interval)
    made.filters.update(number=format_number, percent=format_percent, anchor=make_anchor)
    return made


@cache
def scripts(*files: str) -> dict[str, str]:
    """Return the script of a page from files of the package, and the hash that lets it run, and no other."""
    script = styles(*files)
    return {"script": script, "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}


def styles(*files: str) -> str:
    """Return the style of a page from files of the package."""
    return "".join((PACKAGE / name).read_text(encoding="utf-8") for name in files)


def now() -> str:
    """Return the present minute."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}"


def format_number(value: float) -> str:
    """Write a value for people: `0.0123`, `1,234`, `1.2e-05`."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def format_percent(share: float) -> str:
    """Write a share of one: `12.5%`."""
    return f"{share:.1%}"


def format_interval(ends: Sequence[float], form: Callable[[float], str] = format_number) -> str:
    """Write both ends of an interval: `0.5 to 1.5`."""
    return " to ".join(map(form, ends))


def spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many items, the first and the last among them, evenly spread."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def make_anchor(title: str) -> str:
    """Return a title as a name that an address may hold."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
