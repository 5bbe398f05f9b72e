"""Printing for people in a terminal (rich), for pipes (plain text) and for programs (JSON); secrets never leave."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from etude.reading.plain import map_leaves
from etude.secrets import redact, redact_tree


def in_terminal() -> bool:
    """Tell whether standard output is a terminal that understands more than plain text."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def is_main_rank() -> bool:
    """Tell whether this process is the one that talks, under torchrun or alone."""
    return os.environ.get("RANK", "0") == "0"


# C0 and C1 controls, the marks that turn text around, and lone surrogates: what a terminal obeys instead of showing.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return text with control characters written out (`\\x1b`), so that no name or file can speak to the terminal.

    Tabs and line ends stay.
    """
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def _cleaned(text: str) -> str:
    return visible(redact(text))


class _RedactedLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _cleaned(f"etude: {record.getMessage()}")


def show_log() -> None:
    """Send what Etude logs (a resume, a damaged checkpoint) to standard error, one line each."""
    logger = logging.getLogger("etude")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_RedactedLines())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def say(text: str = "") -> None:
    """Print one line to standard output."""
    sys.stdout.write(_cleaned(text) + "\n")


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(map_leaves(redact_tree(value), _strict), indent=2, default=str, allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    # JSON has no NaN and no infinity; as text they are at least seen.
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print rows under column heads; columns whose index is in `right` are aligned to the right."""
    cleaned = [[_cleaned(cell).replace("\n", "\\n") for cell in row] for row in rows]
    if in_terminal():
        _print_rich(columns, cleaned, right)
        return
    widths = [max(len(row[index]) for row in [columns, *cleaned]) for index in range(len(columns))]
    for row in [columns, *cleaned]:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if index in right else "left",
            style="cyan" if index == 0 else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)
