from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("av")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep caches out of the home directory."""
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
