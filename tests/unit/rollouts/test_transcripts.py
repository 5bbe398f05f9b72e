"""What is kept of what a model wrote: chosen by (seed, step), bounded, the same on any ranks and after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

import torch

from etude import Callback, GRPOTrainer, Trainer, TrainingConfiguration
from etude.algorithms.advantages import grpo
from etude.data import Digits
from etude.policies import MLP
from etude.rollouts.conversation import Turn
from etude.rollouts.graph import Graph, Node
from etude.rollouts.tasks import Task
from etude.rollouts.transcripts import FOLLOWED, LONGEST_TEXT, Transcripts, holds_text, last_shown, shortened
from etude.runs.metrics import read_rows
from etude.secrets import register_secret
from etude.types.trajectory import Trajectory
from tests.callbacks import DieAt
from tests.crash.harness import compare
from tests.processes import reap, run_ranks, spawn

SMALL = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, "lr": 3e-3, "ema_decay": 0.9}
QUIET: dict[str, Any] = {"loggers": [], "show_progress": False}


def train(run: Any, steps: int = 6, reward: Any = None, tasks: Any = "digits", **options: Any) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    trainer = GRPOTrainer("tiny", reward, tasks, training_steps=steps, run=run, **{**SMALL, **QUIET, **options})
    trainer.train()
    return [] if run is False else read_rows(Path(run) / "transcripts.jsonl")


class KeepRollouts(Callback):
    def __init__(self) -> None:
        self.steps: list[list[Trajectory]] = []

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        self.steps.append(list(trainer.data.rollouts))


def test_steps_that_are_shown_grow_with_the_logarithm_of_the_length() -> None:
    shown = [step for step in range(1, 1001) if last_shown(step) == step]
    assert shown[:14] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24]
    assert len(shown) < 40
    assert sum(last_shown(step) == step for step in range(1, 2**20)) < 80
    assert all(last_shown(step) <= step and last_shown(last_shown(step)) == last_shown(step) for step in shown)


def test_best_worst_and_random_are_kept_with_the_advantage_they_were_trained_with(tmp_path: Path) -> None:
    notes = KeepRollouts()
    rows = train(tmp_path / "run", steps=3, callbacks=[notes])
    for step, rollouts in enumerate(notes.steps, 1):
        rewards = torch.tensor([rollout.reward for rollout in rollouts])
        advantages = grpo(rewards, [rollout.group_id for rollout in rollouts])
        found = {(r.task.prompt, r.text): (r.reward, float(a)) for r, a in zip(rollouts, advantages, strict=True)}
        kept = {name: row for row in rows for name in row["chosen"] if row["step"] == step}
        assert kept["best"]["reward"] == max(r.reward for r in rollouts)
        assert kept["worst"]["reward"] == min(r.reward for r in rollouts)
        assert kept.keys() >= {"best", "worst", "random"}
        for row in kept.values():
            assert (row["reward"], row["advantage"]) == pytest.approx(found[row["prompt"], row["text"]])


def test_a_few_prompts_are_followed_whenever_they_come_by(tmp_path: Path) -> None:
    """Of 16 tasks 4 come by in each step: a prompt returns every fourth step or so."""
    notes = KeepRollouts()
    rows = [row for row in train(tmp_path / "run", 20, callbacks=[notes]) if "followed" in row["chosen"]]
    prompts = {row["prompt"] for row in rows if row["step"] == 1}
    assert len(prompts) == FOLLOWED and {row["prompt"] for row in rows} == prompts
    for prompt in prompts:
        seen = [row["step"] for row in rows if row["prompt"] == prompt]
        came = [step for step, drawn in enumerate(notes.steps, 1) if any(r.task.prompt == prompt for r in drawn)]
        first = {last_shown(step): step for step in reversed(came)}  # the first visit of each stretch
        assert set(first.values()) <= set(seen) <= {*first.values(), 20} and len(seen) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("death", [2, 5, 8])
def test_a_killed_run_leaves_the_file_of_an_undisturbed_one(tmp_path: Path, death: int) -> None:
    options = {"save_every": 3, "keep_last": 20, "steps": 9}
    whole, killed = train(tmp_path / "whole", **options), tmp_path / "killed"
    assert reap(spawn(lambda: train(killed, callbacks=[DieAt(death)], **options))) == [-9]
    rows = read_rows(killed / "transcripts.jsonl")
    assert rows[-1]["step"] == death
    lost = [row | {"text": "stale"} if row["step"] > death // 3 * 3 else row for row in rows]
    (killed / "transcripts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lost) + '{"step": 9, "torn')
    assert train(killed, **options) == whole
    assert compare(killed, tmp_path / "whole") is None


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_keep_what_one_process_keeps(tmp_path: Path, world: int) -> None:
    """Four ranks fetch their first step twice."""
    alone = train(tmp_path / "alone", steps=3)
    assert run_ranks(lambda: train(tmp_path / "shared", steps=3), world) == [0] * world
    shared = read_rows(tmp_path / "shared" / "transcripts.jsonl")
    assert [row.pop("advantage") for row in shared] == pytest.approx([row.pop("advantage") for row in alone])
    assert shared == alone


@pytest.mark.parametrize("engine", ["huggingface", "lightning"])
@pytest.mark.slow
def test_every_engine_keeps_the_same(tmp_path: Path, engine: str) -> None:
    pytest.importorskip({"huggingface": "transformers"}.get(engine, engine), reason=f"{engine} is not installed")
    assert train(tmp_path / engine, steps=2, engine=engine) == train(tmp_path / "torch", steps=2)


def test_a_run_without_text_leaves_no_file(tmp_path: Path) -> None:
    config = TrainingConfiguration(training_steps=2)
    Trainer(MLP(hidden=[4]), Digits(), config=config, run=tmp_path / "run", **QUIET).fit()
    assert not (tmp_path / "run" / "transcripts.jsonl").exists()
    assert not holds_text([Trajectory(None, [1, 1], 1.0)], policy=None)


class Guessing:
    """A partner that says higher, twice."""

    def __init__(self, task: Task) -> None:
        self.turns = 0

    def respond(self, text: str) -> Turn:
        self.turns += 1
        return Turn(" higher ", float(len(text)), done=self.turns == 3)


def test_a_conversation_is_kept_turn_by_turn(tmp_path: Path) -> None:
    rows = train(tmp_path / "run", steps=1, conversation=Guessing, max_new_tokens=4)
    for row in rows:
        assert [who for who, _ in row["turns"]] == ["model", "other", "model", "other", "model"]
        assert row["turns"][1][1] == " higher " and row["turns"][-1][1].startswith(row["text"])


def test_trees_of_turns_are_kept_where_they_are_text() -> None:
    def tree(number: int) -> Graph:
        turns = [Node(f"start {number}", f"probe {number}.{i}", "reply", number + i / 10) for i in range(3)]
        turns[0].children.append(Node(f"start {number} probe reply", "later", "reply", 0.5))
        return Graph(f"start {number}", turns)

    rows = Transcripts(0).choose(1, [tree(0), tree(1)], None, None, lambda value: [value])
    kept = {name: row for row in rows for name in row["chosen"]}
    assert (kept["best"]["text"], kept["worst"]["text"]) == ("probe 1.2", "probe 0.0")
    assert kept["best"]["turns"] == [["model", "probe 1.2"], ["other", "reply"]]
    assert kept["best"]["advantage"] is None
    assert {row["prompt"] for row in rows if "followed" in row["chosen"]} == {"start 0", "start 1"}
    other = [Graph(0.5, [Node(0.5, 0.1, 0.2, 1.0)])]
    assert Transcripts(0).choose(1, other, None, None, lambda value: [value]) == []


def test_long_texts_are_cut_in_the_middle_and_secrets_left_out(tmp_path: Path) -> None:
    assert shortened("a" * 30 + "b" * 30, 20) == "aaaaaaaaaa [... 40 characters ...] bbbbbbbbbb"
    assert shortened("a" * LONGEST_TEXT) == "a" * LONGEST_TEXT
    register_secret("battery-staple")
    rows = train(tmp_path / "run", 1, lambda task, text: 1.0, ["say battery-staple: "])
    assert rows and all("battery" not in row["prompt"] for row in rows)
