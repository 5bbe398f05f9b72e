"""2N steps equal N steps, SIGKILL, resume, N steps: in cells where all properties meet, bit for bit; nightly in all."""

from __future__ import annotations

import itertools
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from etude import Callback, Trainer
from tests.crash.harness import compare
from tests.crash.workload import Case, train
from tests.processes import run_ranks

HALF = 4
BATCH = 4


class KillAfter(Callback):
    """Die without a word in the middle of the step after the save."""

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.progress.step == HALF + 1:
            trainer.session.record.wait()
            trainer.session.group.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def cells() -> list[Case]:
    """Return the full product; epoch edge: the save falls exactly on the end of an epoch, or inside one."""
    product = itertools.product([True, False], [True, False], [1, 2], [0, 2], [True, False], [True, False], [1, 2])
    found = []
    for dropout, augment, accumulate, workers, two_optimizers, edge, ranks in product:
        samples = HALF * BATCH * accumulate * ranks if edge else 37
        found.append(
            Case(dropout, augment, accumulate, workers, two_optimizers, ranks, samples, save_every=HALF, steps=2 * HALF)
        )
    return found


def check(case: Case, root: Path) -> str | None:
    assert run_ranks(partial(train, case, root / "straight"), case.ranks) == [0] * case.ranks
    killed = run_ranks(partial(train, case, root / "killed", [KillAfter()]), case.ranks)
    assert killed == [-signal.SIGKILL] * case.ranks
    assert run_ranks(partial(train, case, root / "killed"), case.ranks) == [0] * case.ranks
    return compare(root / "killed", root / "straight")


def every_triple(every: list[Case]) -> list[Case]:
    """Return 16 of the 128 cells in which any three of the seven properties meet in all their combinations.

    Four properties are free, and each of the others is the parity of three of them: an orthogonal array of strength 3.
    """
    found = []
    for number, case in enumerate(every):
        a, b, c, d, e, f, g = (number >> place & 1 for place in range(7))
        if (e, f, g) == (a ^ b ^ c, a ^ b ^ d, a ^ c ^ d):
            found.append(case)
    return found


def test_three_properties_meet_in_every_combination() -> None:
    chosen = every_triple(cells())
    traits = [
        (c.dropout, c.augment, c.accumulate, c.workers, c.two_optimizers, c.samples == 37, c.ranks) for c in chosen
    ]
    assert len(chosen) == 16
    for triple in itertools.combinations(range(7), 3):
        assert len({tuple(trait[place] for place in triple) for trait in traits}) == 8


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [16, pytest.param(128, marks=pytest.mark.nightly)])
def test_half_a_run_killed_and_resumed_equals_the_whole_in_every_cell(tmp_path: Path, count: int) -> None:
    mine = cells() if count == 128 else every_triple(cells())
    assert len(mine) == count
    differing = {str(case): found for n, case in enumerate(mine) if (found := check(case, tmp_path / str(n)))}
    assert not differing


def test_three_ranks_resume_bit_for_bit_too(tmp_path: Path) -> None:
    # With more than two ranks the order of a sum depends on where a gradient lies in its reduction bucket.
    case = Case(ranks=3, save_every=HALF, steps=2 * HALF)
    assert check(case, tmp_path) is None
