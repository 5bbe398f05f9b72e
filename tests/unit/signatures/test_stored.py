"""The stored signatures are those of the sources, and a start parses none of Etude's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from scripts.signatures import generate, spell

from etude.signatures.nested import ParametersOf
from etude.signatures.stored import FILE, read_stored, read_type


def test_stored_signatures_are_fresh() -> None:
    stored = FILE.read_text(encoding="utf-8").splitlines()
    stale = sorted({line.split('"')[1] for line in set(stored) ^ set(generate().splitlines())})
    assert not stale, f"stored signatures are stale; run .venv/bin/python scripts/signatures.py: {stale}"
    assert stored == sorted(stored)


def test_a_shipped_config_parses_no_source_of_etude() -> None:
    # In a process of its own: what other tests have imported is read from the live objects.
    program = (
        "from etude.config.load import load; from etude.config.presets import presets;"
        "from etude.signatures.source import SOURCES;"
        "[load(preset, []) for preset in presets().values()];"
        "print(sorted(module for module in SOURCES if module.startswith('etude.')))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip() == "[]"


def test_what_other_packages_say_is_not_stored() -> None:
    assert read_stored("torch.optim.adam:Adam") is None
    assert read_stored("etude.engines.lightning.engine:LightningEngine") is None  # takes what Lightning's Trainer takes


@pytest.mark.parametrize(
    "kind",
    [
        int | None,
        Any,
        Literal["b", "a", 1, False, None],
        dict[str, list[float]] | str | Path,
        tuple[int, ...] | tuple[float, None],
        Annotated[dict[str, Any], ParametersOf("a:b")] | bool,
    ],
)
def test_a_type_is_read_as_it_is_spelled(kind: Any) -> None:
    assert read_type(spell(kind)) == kind


def test_a_type_without_a_plain_spelling_is_refused() -> None:
    for kind in (Annotated[int, Field(gt=0)], bytes):
        with pytest.raises(TypeError, match="no plain spelling"):
            spell(kind)
