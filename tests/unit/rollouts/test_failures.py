"""A rollout that fails is dropped, retried, replaced from another try of its group, or ends the run: within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

from etude import Trainer, TrainingConfiguration
from etude.algorithms.grpo import GRPO
from etude.errors import ConfigError, RolloutError
from etude.policies.language import LanguageModel
from etude.rollouts.conversation import Turn
from etude.rollouts.llm import LLM
from etude.rollouts.tasks import Task
from etude.rollouts.text import TextRollouts
from etude.types.protocols import Place
from tests.callbacks import DieAt, KeepRows
from tests.crash.harness import compare
from tests.processes import reap, spawn


def picky(task: Task, text: str) -> float:
    """Refuse every text whose first character is of one kind."""
    if ord(text[:1] or "a") % 2:
        raise ValueError("odd")
    return float(len(text))


class PickyAgent:
    """Fails by the luck of its draw, after a completion that is lost with it."""

    def run(self, task: Task, llm: LLM) -> float:
        reply = llm.complete(task.prompt)
        if llm.seed % 2:
            raise OSError("no luck")
        return float(len(reply.text))


class PickyPartner:
    def __init__(self, task: Task) -> None:
        pass

    def respond(self, text: str) -> Turn:
        return Turn(reward=picky(Task(""), text), done=True)


KINDS: dict[str, dict[str, Any]] = {
    "completions": {"reward": picky}, "agents": {"agent": PickyAgent}, "conversations": {"conversation": PickyPartner},
}  # fmt: skip


def make_data(kind: str, **options: Any) -> TextRollouts:
    settings: dict[str, Any] = {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 5, "reward_timeout_s": None}
    return TextRollouts([f"{number}: " for number in range(6)], **{**settings, **KINDS[kind], **options})


def collect(kind: str, **options: Any) -> list[Any]:
    data = make_data(kind, **options)
    data.open(Place())
    return data.collect(LanguageModel.tiny(seed=0), data._positions(0), 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_error", ["retry", "refill"])
def test_what_failed_is_drawn_again_in_its_place_and_what_succeeded_stays(kind: str, on_error: Any) -> None:
    before = collect(kind)
    lost = [one.reward is None for one in before]
    assert any(lost) and not all(lost)
    after = collect(kind, on_error=on_error, retries=30)
    assert [(one.group_id, one.run_id) for one in after] == [(one.group_id, one.run_id) for one in before]
    assert all(one.reward is not None and one.error is None for one in after)
    for one, other, was_lost in zip(before, after, lost, strict=True):
        assert was_lost or one == other
        assert one.task == other.task
    assert after == collect(kind, on_error=on_error, retries=30)


@pytest.mark.parametrize("on_error, tries", [("drop", 1), ("retry", 4), ("refill", 4)])
def test_tries_are_bounded_and_counted(on_error: Any, tries: int) -> None:
    asked: list[str] = []

    def agent(task: Task, llm: LLM) -> float:
        llm.complete(task.prompt)
        if task.prompt == "0: ":
            asked.append(task.prompt)
            raise OSError("never")
        return 1.0

    data = make_data("agents", agent=agent, on_error=on_error, retries=3, prompts_per_step=2, group_size=2)
    notes = KeepRows()
    train(data, callbacks=[notes], training_steps=1, shuffle=False)
    assert len(asked) == 2 * tries
    (row,) = notes.rows
    assert row["train/rollout/failed"] == 0.5
    assert row.get("train/rollout/retried", 0.0) == (0.0 if on_error == "drop" else 2 * 3 / 4)
    assert [one.error for one in data.rollouts] == ["the agent failed: OSError: never"] * 2 + [None] * 2


def test_a_group_is_filled_from_what_another_try_of_it_gave() -> None:
    before, after = collect("agents"), collect("agents", on_error="refill", retries=1)
    lost = {(one.group_id, one.run_id) for one in before if one.reward is None}
    filled = [one for one in after if (one.group_id, one.run_id) in lost and one.reward is not None]
    retried = collect("agents", on_error="retry", retries=1)
    again = [one for one in retried if (one.group_id, one.run_id) in lost and one.reward is not None]
    # A try of the whole group has at least as many that succeed as one of the failed alone.
    assert len(filled) >= len(again) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_stops_at_the_first_failure_if_asked_to(kind: str) -> None:
    with pytest.raises(RolloutError, match=r"odd|no luck"):
        collect(kind, on_error="stop")
    with pytest.raises(ConfigError, match="retries at least 0"):
        make_data(kind, retries=-1)


def train(data: TextRollouts, run: Any = False, callbacks: Any = (), **config: Any) -> None:
    torch.set_num_threads(1)
    settings = {"lr": 3e-3, "batch_size": 8, "training_steps": 4, "log_every": 1, "ema_decay": 0.9}
    Trainer(
        LanguageModel.tiny(seed=0), data, GRPO(), config=TrainingConfiguration(**{**settings, **config}), run=run,
        loggers=[], callbacks=callbacks, show_progress=False,
    ).fit()  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pool", [None, {"batch_size": 16, "group_size": 4, "key_list": ["group_id"]}])
def test_a_killed_run_tries_again_as_it_would_have(tmp_path: Path, pool: Any) -> None:
    def run(name: str, callbacks: Any = ()) -> None:
        data = make_data("completions", on_error="retry", retries=1, pool=pool, reward_timeout_s=10.0)
        train(data, tmp_path / name, callbacks, save_every=1, keep_last=20)

    run("whole")
    assert reap(spawn(lambda: run("killed", [DieAt(3)]))) == [-9]
    run("killed")
    assert compare(tmp_path / "killed", tmp_path / "whole") is None
