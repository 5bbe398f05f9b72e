"""One service for all tests of the remote engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served import Served
from tests.unit.engines.remote.apart import quiet_client


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("remote") / "state").start()
    yield found
    assert found.stop() == 0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_client():
        yield
