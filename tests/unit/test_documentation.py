"""What the documentation shows works: every Python block runs as it stands."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import run_forked

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(match.group(1), id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")), start=1)
]


def run_block(source: str) -> None:
    """Run a program as `python -c` does: in a module that is the main one, so that what it defines is found there."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path.insert(0, "")
    exec(compile(source, "<block>", "exec"), vars(module))  # noqa: S102 - it is our documentation


@pytest.mark.slow
@pytest.mark.parametrize("source", BLOCKS)
def test_python_blocks_run(source: str, tmp_path: Path, child_env: dict[str, str]) -> None:
    done = run_forked(lambda: run_block(source), cwd=tmp_path, env=child_env, arguments=["-c"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_readme_runs_in_a_python_of_its_own(tmp_path: Path, child_env: dict[str, str]) -> None:
    (source,) = BLOCK.findall(PAGES[0].read_text(encoding="utf-8"))[:1]
    command = [sys.executable, "-W", "error", "-c", source]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_two_pages_write_one_folder() -> None:
    """Whoever follows two pages in one place must not mix a dataset or a run of the one with the other's."""
    writers: dict[str, set[str]] = {}
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for folder in re.findall(r"""(?:LeRobotWriter\(|\brun=)["']([^"']+)["']""", block):
                writers.setdefault(folder, set()).add(page.name)
    assert len(writers) > 3
    assert {folder: pages for folder, pages in writers.items() if len(pages) > 1} == {}


def _defined(tree: ast.AST, inside: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield inside + node.name
            if isinstance(node, ast.ClassDef):
                yield from _defined(node, f"{node.name}.")


def test_the_page_on_architecture_names_what_there_is() -> None:
    package = ROOT / "src/etude"
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py"))
    defined = {name for tree in trees for name in _defined(tree)}
    words = set(re.findall(r"`([^`\s]+)`", (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")))
    paths = {word for word in words if "/" in word or word.endswith(".py")}
    assert {path for path in paths if not any((root / path).exists() for root in (package, ROOT))} == set()
    assert words - paths - defined == set()
    assert len(paths) > 20 and len(words - paths) > 10
