"""A trainer that is killed and a service that goes away: the run ends where an undisturbed one does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from etude import Trainer
from etude.algorithms.grpo import GRPO
from etude.callbacks import Callback
from etude.engines.remote.engine import RemoteEngine
from etude.errors import CheckpointError, ServiceError
from tests.processes import free_port
from tests.served import Served
from tests.unit.engines.remote.apart import (
    STEADY,
    adapted,
    difference,
    digits,
    quick,
    quiet_client,
    rows_of,
    weights_on,
)

pytest.importorskip("tinker")
pytest.importorskip("peft")

pytestmark = pytest.mark.slow
STEPS = 5


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, work: Any) -> None:
        self._step, self._work = step, work

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if trainer.progress.step == self._step:
            self._work()


def train(run: Path, url: str, *callbacks: Callback, **options: Any) -> Any:
    trainer = Trainer(
        adapted(), digits(), GRPO(), engine=RemoteEngine(url, **{"timeout_s": 60.0, **options}), run=run, loggers=[],
        config=quick(**STEADY, training_steps=STEPS, save_every=2), callbacks=callbacks, show_progress=False,
    )  # fmt: skip
    return trainer.fit()


def die(run: str, url: str) -> None:
    """Train until a kill after the third step, whose update no checkpoint has."""
    train(Path(run), url, At(3, lambda: os.kill(os.getpid(), signal.SIGKILL)))


@pytest.fixture(scope="module")
def undisturbed(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    with quiet_client():
        assert train(run, served.url).steps == STEPS
    return run


def test_a_killed_trainer_goes_on_from_what_the_service_saved(
    served: Served, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    program = "import sys; from tests.unit.engines.remote.test_faults import die; die(*sys.argv[1:])"
    ended = subprocess.run([sys.executable, "-c", program, str(run), served.url], timeout=110, check=False)
    assert ended.returncode == -signal.SIGKILL
    result = train(run, served.url)
    assert (result.first_step, result.steps) == (2, STEPS)
    assert difference(weights_on(served, run), weights_on(served, undisturbed)) < 1e-5
    rewards = [row["train/reward"] for row in rows_of(run)]
    assert len(rewards) == STEPS and rewards == [row["train/reward"] for row in rows_of(undisturbed)]


def test_a_service_that_goes_away_is_waited_for(
    served: Served, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def restart() -> None:
        served.kill()
        starting.append(threading.Thread(target=served.start))
        starting[0].start()

    starting: list[threading.Thread] = []
    with caplog.at_level(logging.WARNING, "etude"):
        train(tmp_path / "run", served.url, At(3, restart))
    starting[0].join()
    assert difference(weights_on(served, tmp_path / "run"), weights_on(served, undisturbed)) < 1e-5
    said = [record.message for record in caplog.records if record.name == "etude"]
    assert sum("the run waits for it" in one for one in said) == sum("is back" in one for one in said) <= 1


def test_a_service_that_stays_away_ends_the_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"gave no answer to asking what is offered within 3 s; run again"):
        train(tmp_path / "run", f"http://127.0.0.1:{free_port()}", timeout_s=3.0)


def test_weights_of_another_engine_are_no_state_of_a_service(served: Served, tmp_path: Path) -> None:
    trainer = Trainer(
        adapted(), digits(), GRPO(), run=tmp_path / "run", loggers=[], config=quick(training_steps=1),
        show_progress=False,
    )  # fmt: skip
    trainer.fit()
    with pytest.raises(CheckpointError, match="goes on from what a service has saved"):
        train(tmp_path / "run", served.url)
