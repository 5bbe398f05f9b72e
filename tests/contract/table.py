"""The README's table of guarantees, made from what the probes found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.contract.probes import GUARANTEES
from tests.contract.subjects import COLUMNS, SUBJECTS, Subject

README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- guarantees: made by `python -m tests.contract --write` -->"
END = "<!-- end of guarantees -->"

Found = Mapping[tuple[str, Subject], str]


def render(found: Found) -> str:
    """Return the table in Markdown."""
    rows = ["| guarantee | meaning | " + " | ".join(COLUMNS) + " |", "|---|---" + "|---" * len(COLUMNS) + "|"]
    for name, (meaning, _) in GUARANTEES.items():
        cells = [_cell(found, name, engine) for engine in COLUMNS]
        rows.append(f"| {name} | {meaning} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cell(found: Found, name: str, engine: str) -> str:
    alone, *ranks = (found[name, subject] for subject in SUBJECTS if subject.engine == engine)
    different = [f"{subject.ranks} ranks {text}" for subject, text in
                 zip((s for s in SUBJECTS if s.engine == engine and s.ranks > 1), ranks) if text != alone]  # fmt: skip
    return ", ".join([alone, *different])


def shown() -> str:
    """Return the table that the README shows."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def write(found: Found) -> None:
    """Put the table into the README."""
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{render(found)}\n{END}{after}")
