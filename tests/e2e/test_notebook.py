"""The notebook runs from top to bottom, and stays as it was written: no results are kept in it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/first_hour.ipynb"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_it_is_kept_without_results() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [one for one in cells if one.get("outputs") or one.get("execution_count")] == []


@pytest.mark.filterwarnings("ignore")  # of the notebook's machinery, not of ours
def test_it_runs_from_top_to_bottom(tmp_path: Path, child_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient", reason="nbclient is not installed (extra: dev)")
    pytest.importorskip("metaworld", reason="metaworld is not installed (extra: sim)")
    import nbformat

    for name, value in child_env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{child_env['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    book: Any = nbformat.read(NOTEBOOK, as_version=4)
    asyncio.run(client.NotebookClient(book, timeout=200, resources={"metadata": {"path": tmp_path}}).async_execute())
    printed = "\n".join(part.get("text", "") for one in book.cells for part in one.get("outputs", []))
    assert re.search(r"the plug is pulled\s+goes on from step 100\s+True\s", printed), printed
    assert re.search(r"\d+% of 10 episodes", printed)
    assert "notebook-whole/report.html" in printed
    assert "Error" not in printed
