"""The project files agree: what is asked for is pinned, and nothing is pinned that must not be installed."""

from __future__ import annotations

import os
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
LOCK_LINES = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
PINS = dict(line.split("==") for line in LOCK_LINES if not line.startswith("#"))
ASKED = {*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"], *chain(*EXTRAS.values())}
MAX_CORE_DEPENDENCIES = 12


def test_the_core_is_lean_and_the_extras_are_those_promised() -> None:
    assert len(PROJECT["project"]["dependencies"]) <= MAX_CORE_DEPENDENCIES
    assert set(EXTRAS) >= {"hf", "lightning", "ray", "service", "llm", "sim", "report", "dev", "all"}
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == set(EXTRAS) - {"all"}


@pytest.mark.parametrize("text", sorted(ASKED))
def test_everything_asked_for_is_pinned_within_its_range(text: str) -> None:
    requirement = Requirement(text)
    if requirement.name == "etude":
        assert requirement.extras <= set(EXTRAS)
    else:
        assert requirement.specifier.contains(PINS[requirement.name.lower()])


def test_the_lock_is_exact_sorted_and_free_of_places() -> None:
    pins = [line for line in LOCK_LINES if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", line)] == []
    assert pins == sorted(pins, key=lambda line: line.split("==")[0])


def test_the_lock_never_brings_in_what_breaks_a_cpu_machine() -> None:
    """CUDA packages cost gigabytes; torchvision does not import beside a CPU build of torch."""
    unwanted = re.compile(r"nvidia|cuda|triton|torchvision|torchaudio|timm|llama-cpp")
    assert [name for name in PINS if unwanted.search(name)] == []


def test_continuous_integration_can_start() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert os.access(ROOT / "scripts" / "system-packages.sh", os.X_OK)
