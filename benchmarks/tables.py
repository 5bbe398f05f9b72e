"""Tables of results: lines that appear one by one, and the same for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """The columns of a table, and how wide each is: negative ones begin at the left."""

    columns: tuple[str, ...]
    widths: tuple[int, ...]

    def print_line(self, values: Sequence[str]) -> None:
        """Print one line, as soon as it is known."""
        pairs = zip(values, self.widths, strict=True)
        padded = (f"{value:{'<' if width < 0 else '>'}{abs(width)}}" for value, width in pairs)
        print(" ".join(padded).rstrip(), flush=True)

    def print_markdown(self, rows: Iterable[Sequence[str]]) -> None:
        """Print all of it for the documentation."""
        print("| " + " | ".join(self.columns) + " |")
        print("|" + "|".join("---" if width < 0 else "---:" for width in self.widths) + "|")
        for row in rows:
            print("| " + " | ".join(row) + " |")
