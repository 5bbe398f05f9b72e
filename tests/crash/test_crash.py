from pathlib import Path

import pytest

from tests.crash.__main__ import CASES, run_trials


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(600)
def test_a_run_killed_at_a_random_instant_comes_back_bit_for_bit(tmp_path: Path) -> None:
    results = run_trials(len(CASES), seed=20, root=tmp_path)
    failed = [(case, trial) for case, trial in results if trial.difference is not None]
    assert not failed
    assert sum(trial.kills for _, trial in results) >= len(results) // 2
