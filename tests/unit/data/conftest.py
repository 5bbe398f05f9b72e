from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_children_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []
