"""One step ahead: rollouts that are one version old and say so, and that a killed or stopped run takes up exactly."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

from etude import Callback, Trainer, TrainingConfiguration
from etude.algorithms.grpo import CISPO, DRO, GRPO
from etude.algorithms.policy_gradient import BEHIND_CAP
from etude.algorithms.reinforce import ReMax
from etude.errors import ConfigError, RolloutError
from etude.policies.language import LanguageModel
from etude.rng import STREAM_ROLLOUT, fold
from etude.rollouts.reward_callback import EvaluateRewards
from etude.rollouts.tasks import Task
from etude.rollouts.text import TextRollouts
from etude.runs.checkpoint import CheckpointStore
from etude.types.protocols import Place
from tests.callbacks import DieAt, KeepRows
from tests.crash.harness import compare, differs
from tests.processes import reap, run_ranks, spawn, wait_for

SIZES: dict[str, Any] = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8}


def make(
    run: Any = False, algorithm: Any = None, callbacks: Any = (), engine: str = "torch", lora: int | None = None,
    data: Any = None, config: Mapping[str, Any] | None = None, **options: Any,
) -> Trainer:  # fmt: skip
    torch.set_num_threads(1)
    data = data or TextRollouts(**{"tasks": "digits", "ahead": 1, **SIZES, **options})
    settings = {"lr": 3e-3, "batch_size": 8, "training_steps": 6, "log_every": 1, "ema_decay": 0.9, **(config or {})}
    return Trainer(
        LanguageModel.tiny(seed=0, lora=lora), data, algorithm or GRPO(), config=TrainingConfiguration(**settings),
        run=run, loggers=[], callbacks=callbacks, engine=engine, show_progress=False,
    )  # fmt: skip


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = CheckpointStore(run / "checkpoints").load("last").tree["policy"]
    return found


def threads_ahead() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "etude-ahead"]


class Late(TextRollouts):
    """Draws ahead only once the update beside it has been made."""

    updated: threading.Event

    def draw(self, policy: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if threading.current_thread().name == "etude-ahead":
            assert self.updated.wait(60)
            self.updated.clear()
        return super().draw(policy, *args, **kwargs)


class KeepAll(KeepRows):
    """Keeps the weights before each step and the rollouts that it trained on; says when an update has been made."""

    def __init__(self) -> None:
        super().__init__()
        self.updated = threading.Event()
        self.weights: list[dict[str, torch.Tensor]] = []
        self.rollouts: list[list[Any]] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self._keep(trainer)

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.rollouts.append(trainer.data.rollouts)  # type: ignore[attr-defined]
        self._keep(trainer)
        self.updated.set()

    def _keep(self, trainer: Trainer) -> None:
        self.weights.append({name: value.clone() for name, value in trainer.policy.state_dict().items()})


@pytest.mark.parametrize("lora", [None, 2])
def test_rollouts_are_drawn_with_weights_exactly_one_version_old_and_carry_their_log_probs(lora: int | None) -> None:
    kept, data = KeepAll(), Late("digits", ahead=1, **SIZES)
    data.updated = kept.updated
    make(callbacks=[kept], lora=lora, data=data, config={"lr": 0.05}).fit()
    assert [row["train/rollout/age"] for row in kept.rows] == [0, 1, 1, 1, 1, 1]
    policy, plain = LanguageModel.tiny(seed=0, lora=lora), TextRollouts("digits", **SIZES)
    plain.open(Place(seed=0))
    for step, rollouts in enumerate(kept.rollouts):
        drawn = []
        for version in (max(0, step - 1), step):
            policy.load_state_dict(kept.weights[version])
            found = plain.draw(policy, plain._positions(step), fold(0, STREAM_ROLLOUT, step))
            drawn.append([(one.tokens, one.logprobs) for one in found])
        old, present = drawn
        assert [(one.tokens, one.logprobs) for one in rollouts] == old
        assert step == 0 or old != present


@pytest.mark.parametrize(
    "algorithm", [{"objective": "importance_sampling"}, {}, {"epochs": 2}], ids=["plain", "clip", "clip, two updates"]
)
def test_ratios_are_taken_against_the_policy_that_drew(algorithm: Any) -> None:
    kept = KeepRows()
    seen = []

    class Watched(GRPO):
        def experience(self, policy: Any, batch: Any, *, rows: int | None = None) -> Any:
            drawn, present = batch["old_log_probs"].clone(), policy.log_probs(batch)
            found = super().experience(policy, batch, rows=rows)
            assert torch.equal(found["rollout_log_probs" if self.objective == "clip" else "old_log_probs"], drawn)
            if self.epochs > 1:  # the clip is around the weights at the beginning of the step
                torch.testing.assert_close(found["old_log_probs"], present, rtol=0, atol=1e-5)
            seen.append((present - drawn).abs().max().item())
            return found

    make(algorithm=Watched(**algorithm), callbacks=[kept]).fit()
    assert seen[0] < 1e-5 and min(seen[1:]) > 1e-3
    distance = "train/old_kl" if "objective" in algorithm else "train/drawer_kl"
    assert kept.rows[0][distance] < 1e-9 and all(row[distance] > 1e-6 for row in kept.rows[1:])


def test_the_clip_does_not_forbid_what_the_step_before_has_done() -> None:
    """After a large update the ratio to the weights that drew is far from 1: no token may lose its gradient for it."""
    kept = KeepRows()
    make(callbacks=[kept], config={"lr": 0.05}).fit()
    assert max(row["train/drawer_kl"] for row in kept.rows) > 0.05
    assert all(row["train/clip_fraction"] == 0 for row in kept.rows)
    assert all(0 < row["train/tis_weight"] <= BEHIND_CAP for row in kept.rows)
    for weighs in (CISPO(), DRO()):  # these weigh the distance to whoever drew already
        rows = KeepRows()
        make(algorithm=weighs, callbacks=[rows]).fit()
        assert "train/tis_weight" not in rows.rows[-1]
        assert rows.rows[-1]["train/old_kl"] > 1e-6


def test_without_it_nothing_is_drawn_ahead_kept_or_counted(tmp_path: Path) -> None:
    kept = KeepRows()
    make(tmp_path / "run", callbacks=[kept], ahead=0, config={"training_steps": 2}).fit()
    assert not any("age" in name or "wait" in name for row in kept.rows for name in row)
    assert not CheckpointStore(tmp_path / "run" / "checkpoints").load("last").tree["data"]


def test_the_thread_ends_with_the_run_and_so_does_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    counts = []

    class Count(Callback):
        def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
            counts.append((len(threads_ahead()) <= 1, torch.get_num_threads()))

    trainer = make(callbacks=[Count()], config={"training_steps": 2})
    monkeypatch.setattr("etude.loop.threads.SMALL_POLICY", 0)
    torch.set_num_threads(4)
    try:
        trainer.fit()
        assert counts == [(True, 2)] * 2 and torch.get_num_threads() == 4 and not threads_ahead()
    finally:
        torch.set_num_threads(1)


# ---- exactness -----------------------------------------------------------------------------------------------------


def drawing_reward(task: Task, text: str) -> float:
    """Draw from a global generator: its process is to begin where it did."""
    return sum(character.isdigit() for character in text) + random.random()


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, options",
    [(GRPO(kl_coef=0.1), {"reward": drawing_reward}), (ReMax(), {}), (GRPO(), {"resample": 2, "group_size": 2})],
    ids=["a reward that draws", "greedy completions", "groups that are replaced"],
)
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, algorithm: Any, options: Any) -> None:
    def train(name: str, callbacks: Any = ()) -> None:
        make(tmp_path / name, algorithm, callbacks, config={"save_every": 1, "keep_last": 20}, **options).fit()

    train("whole")
    assert reap(spawn(lambda: train("killed", [DieAt(4)]))) == [-9]
    waits = CheckpointStore(tmp_path / "killed" / "checkpoints").load("last").tree["data"]["ahead"]
    assert waits["step"] == 3 and len(waits["rollouts"]) == 4 * options.get("group_size", 4)
    train("killed")
    assert compare(tmp_path / "killed", tmp_path / "whole") is None


def test_a_finished_run_that_is_made_longer_goes_on_as_one_that_was_long_from_the_start(tmp_path: Path) -> None:
    make(tmp_path / "long", config={"training_steps": 4}).fit()
    make(tmp_path / "grown", config={"training_steps": 2}).fit()
    make(tmp_path / "grown", config={"training_steps": 4}).fit()
    assert compare(tmp_path / "grown", tmp_path / "long") is None


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does_and_are_taken_up_by_any_number(tmp_path: Path) -> None:
    def train(run: str, batch_size: int, callbacks: Any = ()) -> None:
        settings = {"batch_size": batch_size, "training_steps": 4, "save_every": 1, "optimizer": "sgd", "lr": 0.05}
        make(tmp_path / run, callbacks=callbacks, config=settings).fit()

    train("alone", 16)
    assert run_ranks(lambda: train("shared", 8), 2) == [0, 0]
    for run in ("killed", "fewer"):
        first, second = run_ranks(lambda run=run: train(run, 8, [DieAt(3)]), 2)  # type: ignore[misc]
        assert (first, second) in {(-9, -9), (6, -9)}  # while rank 0 writes, its watch may see the other die
    assert run_ranks(lambda: train("killed", 8), 2) == [0, 0]
    train("fewer", 16)
    assert compare(tmp_path / "killed", tmp_path / "shared") is None
    alone = last_weights(tmp_path / "alone")
    for run in ("shared", "fewer"):
        found = last_weights(tmp_path / run)
        assert max((alone[name] - found[name]).abs().max().item() for name in alone) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("engine, module", [("huggingface", "accelerate"), ("lightning", "lightning")])
def test_other_engines_train_on_the_same_rollouts(tmp_path: Path, engine: str, module: str) -> None:
    pytest.importorskip(module)
    for run in ("torch", engine):
        make(tmp_path / run, engine=run, config={"training_steps": 4}).fit()
    assert compare(tmp_path / engine, tmp_path / "torch") is None


def test_evaluations_between_steps_disturb_nothing(tmp_path: Path) -> None:
    evaluation = EvaluateRewards({"type": "digits", "params": {"size": 3}}, every=1)
    make(tmp_path / "plain", config={"training_steps": 4}).fit()
    make(tmp_path / "evaluated", callbacks=[evaluation], config={"training_steps": 4}).fit()
    assert differs(last_weights(tmp_path / "evaluated"), last_weights(tmp_path / "plain"), "policy") is None


@pytest.mark.parametrize("before", [0, 1])
def test_runs_that_were_stored_with_another_setting_go_on(tmp_path: Path, before: int) -> None:
    kept = KeepRows()
    make(tmp_path / "run", ahead=before, config={"training_steps": 2}).fit()
    make(tmp_path / "run", ahead=1 - before, callbacks=[kept], config={"training_steps": 4}).fit()
    assert [row.get("train/rollout/age") for row in kept.rows] == ([0, 1] if before == 0 else [None, None])


def test_rollouts_of_tasks_that_are_gone_are_drawn_anew_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeepRows()
    make(tmp_path / "run", config={"training_steps": 2}).fit()
    with caplog.at_level(logging.WARNING, "etude"):
        other = {"type": "addition", "params": {"size": 8}}
        make(tmp_path / "run", tasks=other, callbacks=[kept], config={"training_steps": 3}).fit()
    assert "rollouts that waited for step 2 are of other tasks" in caplog.text
    assert [row["train/rollout/age"] for row in kept.rows] == [0]


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def fails_later(task: Task, text: str) -> float:
    """Fail on the tasks of the second step."""
    if int(task.id) >= 4:
        raise ValueError("no such answer")
    return float(len(text))


def test_an_error_beside_a_step_is_raised_at_the_next_with_its_sentence_and_loses_nothing(tmp_path: Path) -> None:
    def train(reward: Any) -> Trainer:
        settings = {"shuffle": False, "training_steps": 2, "save_every": 1}
        prompts = [f"{number}: " for number in range(8)]
        return make(tmp_path / "run", tasks=prompts, reward=reward, on_reward_error="stop", config=settings)

    with pytest.raises(RolloutError, match=r"task '4' failed on .*: ValueError: no such answer"):
        train(fails_later).fit()
    assert not threads_ahead()
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").load("last")
    assert saved.step == 1 and saved.tree["data"]["ahead"]["step"] == 1
    # What it was to be drawn with is kept in its place: the initial weights.
    drawn_with = saved.tree["data"]["ahead"]["weights"]
    assert differs(drawn_with, dict(LanguageModel.tiny(seed=0).state_dict()), "weights") is None
    trainer = train(lambda task, text: float(len(text)))
    trainer.fit()
    assert trainer.data.metrics["rollout/age"] == (1.0, 1.0)  # type: ignore[attr-defined]


class Hanging:
    """A reward that waits for ever, once, when it has been called a few times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, task: Task, text: str) -> float:
        marks = len(list(self.folder.iterdir()))
        if marks < 40:
            (self.folder / f"{marks:02}").touch()
        if marks == 39:
            (self.folder / "hangs").touch()
            time.sleep(1000)
        return sum(character.isdigit() for character in text)


@pytest.mark.slow
def test_a_stop_signal_is_answered_while_a_reward_hangs_beside_the_training(tmp_path: Path) -> None:
    def train(run: str) -> None:
        (tmp_path / f"{run}-marks").mkdir(exist_ok=True)
        make(tmp_path / run, reward=Hanging(tmp_path / f"{run}-marks"), reward_timeout_s=500.0).fit()

    (tmp_path / "whole-marks").mkdir()
    for number in range(40):
        (tmp_path / "whole-marks" / f"{number:02}").touch()
    train("whole")
    pids = spawn(lambda: train("stopped"))
    wait_for(tmp_path / "stopped-marks" / "hangs")
    os.kill(pids[0], signal.SIGTERM)
    assert reap(pids) == [128 + signal.SIGTERM]
    saved = CheckpointStore(tmp_path / "stopped" / "checkpoints").load("last")
    assert saved.tree["data"]["ahead"]["step"] == saved.step and "weights" in saved.tree["data"]["ahead"]
    train("stopped")
    assert compare(tmp_path / "stopped", tmp_path / "whole") is None


class Endpoint:
    """A generator of the user's."""

    def generate(self, *_: Any, **__: Any) -> list[Any]:
        raise AssertionError("nothing is to be drawn")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ahead": 2}, "ahead must be 0, or 1"),
        ({"generator": Endpoint()}, "weights that are not known here"),
        ({"reward_timeout_s": None}, "cannot be called in place"),
    ],
)
def test_what_cannot_be_drawn_ahead_is_refused_before_anything_is_drawn(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options).fit()
