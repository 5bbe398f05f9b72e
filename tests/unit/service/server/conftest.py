"""A service, and the official client of it, for each file of tests that makes none of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.served import RUNNING, Served, connected


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with the options that a file names, or one that runs already and that the environment names."""
    if RUNNING in os.environ:
        yield Served.running(os.environ[RUNNING])
        return
    options = getattr(request.module, "SERVE_OPTIONS", ())
    found = Served(tmp_path_factory.mktemp("service") / "state", *options).start()
    yield found
    assert found.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with connected(served) as found:
        yield found
