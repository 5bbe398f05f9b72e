"""Hugging Face with two ranks and Ray with two workers, killed again and again: they end as if left alone."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.contract.subjects import Subject, train
from tests.crash.harness import compare
from tests.crash.workload import WeightedTrainer
from tests.processes import kill, newest_step, reap, spawn

STEPS = 40
LIMIT_S = 240.0
OFTEN = pytest.param(30, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])
KILLS = [pytest.param(3, marks=pytest.mark.timeout(600)), OFTEN]


Start = Callable[[], list[int]]
Choose = Callable[[list[int], random.Random], list[int]]


class Slow(WeightedTrainer):
    """A trainer that takes its time: a kill is to find it at work."""

    def prepare_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        time.sleep(0.01)
        return batch


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill_again_and_again(
    start: Start, victims: Choose, checkpoints: Path, kills: int, rng: random.Random
) -> int:  # fmt: skip
    """Kill a run at random instants of its length, going on each time; return how often that found someone alive."""
    done = 0
    for _ in range(kills):
        before = newest_step(checkpoints)
        target = min(before + rng.randint(1, max(2, (STEPS - before) // 2)), STEPS - 1)
        pids = start()
        deadline = time.monotonic() + LIMIT_S
        while newest_step(checkpoints) < target and all(map(_is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.1))
        chosen = [pid for pid in victims(pids, rng) if _is_alive(pid)]
        kill(chosen)
        done += bool(chosen)
        codes = reap(pids, LIMIT_S)
        assert all(code == 0 for code in codes) or chosen, f"ended by itself with {codes}"
        if all(code == 0 for code in codes):
            break  # it was faster
    return done


def _some_or_all(pids: list[int], rng: random.Random) -> list[int]:
    return pids if rng.random() < 0.5 else [rng.choice(pids)]


def _quietly(work: Callable[[], None], said: Path) -> None:
    sys.stdout = sys.stderr = said.open("a", buffering=1)
    work()


def _disturb(
    kills: int, root: Path, make: Callable[[Path], Start], folder: Callable[[Path], Path],
    victims: Callable[[Path], Choose], differs: Callable[[Path, Path], str | None],
) -> None:  # fmt: skip
    """Kill runs until there were enough kills, end each, and compare each with the one that was left alone."""
    rng, count = random.Random(kills), 0
    straight = root / "straight"
    assert set(reap(make(straight)(), LIMIT_S)) == {0}, (root / "straight.said").read_text()
    for number in range(kills):
        run = root / f"killed-{number}"
        count += _kill_again_and_again(make(run), victims(run), folder(run), min(3, kills - count), rng)
        codes = reap(make(run)(), LIMIT_S)
        assert set(codes) == {0}, run.with_suffix(".said").read_text()
        assert differs(run, straight) is None
        if count >= kills:
            return
    raise AssertionError(f"only {count} of {kills} kills found a process alive")


def _engine(subject: Subject, run: Path, **engine: Any) -> list[int]:
    options: dict[str, Any] = {"training_steps": STEPS, "save_every": 1, "keep_last": 3, "evaluate_every": 10}
    work = partial(train, subject, run, kind=Slow, engine=engine, **options)
    return spawn(partial(_quietly, work, run.with_suffix(".said")), subject.processes)


@pytest.mark.parametrize("kills", KILLS)
def test_the_hugging_face_engine_with_two_ranks(kills: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import etude.engines.huggingface.engine  # noqa: F401 - before anything is forked

    _disturb(
        kills, tmp_path, lambda run: partial(_engine, Subject("huggingface", 2), run), lambda run: run / "checkpoints",
        lambda run: _some_or_all, compare,
    )  # fmt: skip


def _base_trainer(folder: Path) -> None:
    from tests.unit.engines.huggingface.parts import make, weights

    torch.set_num_threads(1)
    trainer = make(folder, save_strategy="steps", save_steps=1, num_train_epochs=-(-STEPS // 3), max_steps=STEPS)
    trainer.train(resume_from_checkpoint=newest_step(folder) > 0)
    if trainer.is_world_process_zero():
        save_file(weights(trainer), folder / "end.safetensors")


def _weights_differ(run: Path, straight: Path) -> str | None:
    ours, theirs = (load_file(folder / "end.safetensors") for folder in (run, straight))
    return None if all(torch.equal(ours[name], theirs[name]) for name in theirs) else "weights"


@pytest.mark.parametrize("kills", KILLS)
def test_base_trainer_with_two_ranks(kills: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import tests.unit.engines.huggingface.parts  # noqa: F401 - before anything is forked

    def make(run: Path) -> Start:
        return lambda: spawn(partial(_quietly, partial(_base_trainer, run), run.with_suffix(".said")), 2)

    _disturb(kills, tmp_path, make, lambda run: run, lambda run: _some_or_all, _weights_differ)


class KilledOften(WeightedTrainer):
    """A trainer that loses a rank, or both, in every step of a plan, the first time that it comes to it."""

    plan: dict[int, list[int]] = {}

    def prepare_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        doomed = self.plan.get(self.progress.step, [])
        if self.rank in doomed and self.run is not None:
            mark = self.run.dir / f"killed-{self.progress.step}-{self.rank}"
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return batch


@pytest.mark.nightly  # the contract kills one worker and the driver; every launch takes 5 to 10 CPU seconds
@pytest.mark.timeout(3600)
def test_ray_with_two_workers(tmp_path: Path, on_ray_cluster: None) -> None:
    kills = int(os.environ.get("ETUDE_RAY_KILLS", "30"))
    draw = random.Random(kills)
    steps = sorted(draw.sample(range(2, STEPS - 1), kills))
    plan = {step: draw.choice([[0], [1], [0, 1]]) for step in steps}
    options: dict[str, Any] = {"training_steps": STEPS, "save_every": 1, "keep_last": 3, "evaluate_every": 10}
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert reap(spawn(partial(train, Subject("torch", 2), alone, **options), 2), LIMIT_S) == [0, 0]
    kind = type("KilledByPlan", (KilledOften,), {"plan": plan})
    work = partial(train, Subject("ray", 2), run, kind=kind, engine={"max_failures": 2 * kills}, **options)
    said = run.with_suffix(".said")
    assert reap(spawn(partial(_quietly, work, said), 1), 3000.0) == [0], said.read_text()
    died = {int(path.name.split("-")[1]) for path in run.glob("killed-*")}
    assert died == set(plan)
    assert compare(run, alone) is None
