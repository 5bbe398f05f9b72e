"""What the tests of rollouts leave behind: nothing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_judge_left() -> Iterator[None]:
    """End the processes of reward functions that a test has not closed, which other tests would take for their own."""
    yield
    for child in multiprocessing.active_children():
        child.terminate()
        child.join(10)
