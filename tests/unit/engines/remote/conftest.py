"""One service for all tests of the remote engine."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator

import pytest

from tests.served import KEY, Served


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("remote") / "state").start()
    yield found
    assert found.stop() == 0


@pytest.fixture(autouse=True)
def quiet_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the client its key, and close what it leaves open without complaint."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", os.environ.get("TINKER_TELEMETRY", "0"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()
