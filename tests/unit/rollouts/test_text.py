"""Text rollouts: drawn by the policy as it is, rewarded, trained on; exact when resumed, whole groups on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

from etude import Trainer, TrainingConfiguration
from etude.algorithms.grpo import GRPO, DrGRPO
from etude.algorithms.ppo import PPO
from etude.algorithms.reinforce import RLOO, ReinforcePlusPlus, ReMax
from etude.errors import ConfigError, RolloutError
from etude.policies.language import LanguageModel
from etude.rollouts.conversation import Turn
from etude.rollouts.tasks import Task
from etude.rollouts.text import TextRollouts
from etude.rollouts.updates import learn_from
from etude.runs.checkpoint import CheckpointStore
from etude.runs.metrics import read_metrics
from etude.types.protocols import Place
from tests.callbacks import DieAt, KeepRows
from tests.crash.harness import compare
from tests.processes import reap, run_ranks, spawn


def make(
    run: Any = False, algorithm: Any = None, callbacks: Any = (), value_head: bool = False, data: Any = None,
    **config: Any,
) -> Trainer:  # fmt: skip
    torch.set_num_threads(1)
    policy = LanguageModel.tiny(seed=0, value_head=value_head)
    data = data or TextRollouts("digits", prompts_per_step=4, group_size=4, max_new_tokens=8)
    settings = {"lr": 3e-3, "batch_size": 8, "training_steps": 6, "log_every": 1, "ema_decay": 0.9}
    return Trainer(
        policy, data, algorithm or GRPO(), config=TrainingConfiguration(**{**settings, **config}), run=run, loggers=[],
        callbacks=callbacks, show_progress=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [GRPO(), RLOO(), PPO(epochs=2, minibatches=2)], ids=lambda a: type(a).__name__)
def test_a_tiny_model_learns_to_say_digits(algorithm: Any) -> None:
    notes = KeepRows()
    make(algorithm=algorithm, callbacks=[notes], value_head=isinstance(algorithm, PPO), training_steps=40).fit()
    assert notes.rows[0]["train/reward"] < 0.4
    assert sum(row["train/reward"] for row in notes.rows[-5:]) / 5 > 0.75


def test_a_step_counts_where_its_time_went_and_what_came_of_it() -> None:
    notes = KeepRows()
    make(callbacks=[notes], training_steps=1).fit()
    (row,) = notes.rows
    assert row["train/rollout/failed"] == 0
    assert 0 < row["train/rollout/tokens"] <= 8
    assert {"time/generate_ms", "time/reward_ms", "time/prepare_ms"} <= row.keys()


def test_epochs_and_minibatches_make_several_updates_of_one_experience() -> None:
    trainer = make(algorithm=GRPO(epochs=2, minibatches=4), training_steps=1)
    trainer.fit()
    session = trainer.session
    rollouts: Any = trainer.data.take(0)
    updates = learn_from(
        rollouts, trainer.algorithm, trainer.policy, session.place, 0, session.gather, session.group.device
    )
    assert len(updates) == 8
    assert [sum(len(micro) for micro in group) for group in updates] == [4] * 8


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [GRPO(kl_coef=0.1), PPO(epochs=2, minibatches=2)], ids=lambda a: type(a).__name__)
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, algorithm: Any) -> None:
    def train(name: str, callbacks: Any = ()) -> None:
        head = isinstance(algorithm, PPO)
        make(tmp_path / name, algorithm, callbacks, head, save_every=1, keep_last=20).fit()

    train("whole")
    assert reap(spawn(lambda: train("killed", [DieAt(4)]))) == [-9]
    train("killed")
    assert compare(tmp_path / "killed", tmp_path / "whole") is None


def even_tasks_only(task: Task, text: str) -> float:
    """Fail on every other prompt, so that one of two ranks may be left with nothing."""
    if int(task.id) % 2:
        raise ValueError("odd")
    return text.count("1") + 0.1 * len(text)


MADE = {
    "GRPO": GRPO,
    "DrGRPO, several updates": lambda: DrGRPO(epochs=2, minibatches=3),
    "REINFORCE++": ReinforcePlusPlus,
    "PPO, several updates": lambda: PPO(epochs=2, minibatches=2),
    "RLOO with an adaptive KL": lambda: RLOO(kl_coef=0.1, kl_in="reward", kl_target=0.01, kl_horizon=100.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, world, reward",
    [
        ("GRPO", 2, None),
        ("DrGRPO, several updates", 2, None),
        ("REINFORCE++", 2, None),
        ("REINFORCE++", 2, even_tasks_only),
        ("PPO, several updates", 2, None),
        ("RLOO with an adaptive KL", 3, None),
    ],
)
def test_ranks_train_as_one_process_does(tmp_path: Path, name: str, world: int, reward: Any) -> None:
    def train(run: str, batch_size: int) -> None:
        tasks: Any = "digits" if reward is None else [f"say {number}: " for number in range(6)]
        data = TextRollouts(tasks, reward, prompts_per_step=6, group_size=4, max_new_tokens=8)
        settings = {"batch_size": batch_size, "training_steps": 3, "optimizer": "sgd", "shuffle": reward is None}
        make(tmp_path / run, MADE[name](), value_head=name.startswith("PPO"), data=data, lr=0.05, **settings).fit()

    train("alone", 24)
    assert run_ranks(lambda: train("shared", 24 // world), world) == [0] * world
    logged = [read_metrics(tmp_path / run / "metrics.jsonl") for run in ("alone", "shared")]
    assert len(logged[0]) == 3 and "train/reward_std" in logged[0][0]
    for one, other in zip(*logged, strict=True):
        for key in (key for key in one if key.startswith("train/")):
            assert one[key] == pytest.approx(other[key], abs=2e-5), key
        assert one["train/reward_std"] == pytest.approx(other["train/reward_std"], abs=1e-12)
    one, other = (CheckpointStore(tmp_path / run / "checkpoints").load("last").tree for run in ("alone", "shared"))
    assert one["algorithm"]["kl_coef"] == pytest.approx(other["algorithm"]["kl_coef"], rel=1e-6)
    moved = LanguageModel.tiny(seed=0).state_dict()
    assert max((one["policy"][key] - moved[key]).abs().max().item() for key in moved) > 1e-4
    assert max((one["policy"][key] - other["policy"][key]).abs().max().item() for key in one["policy"]) < 1e-6


def test_the_completions_of_a_prompt_stay_on_one_rank_whatever_the_number_of_ranks() -> None:
    for world in (1, 2, 3):
        seen: list[int] = []
        for rank in range(world):
            data = TextRollouts("digits", prompts_per_step=6, group_size=2, max_new_tokens=2)
            data.open(Place(rank=rank, world=world))
            drawn = data.draw(LanguageModel.tiny(seed=0), data._positions(step=5), seed=1)
            assert [rollout.group_id for rollout in drawn] == [str(place) for place in data._positions(5) for _ in "ab"]
            seen += data._positions(5)
        assert sorted(seen) == list(range(30, 36))


def test_a_rollout_whose_reward_fails_is_dropped_and_the_others_trained_on() -> None:
    calls = []

    def reward(task: Task, text: str) -> float:
        calls.append(text)
        if len(calls) % 3 == 0:
            raise ValueError("no such answer")
        return float(len(text))

    notes = KeepRows()
    data = TextRollouts("digits", reward, prompts_per_step=2, group_size=3, max_new_tokens=4)
    make(data=data, callbacks=[notes], training_steps=2).fit()
    assert [row["train/rollout/failed"] for row in notes.rows] == pytest.approx([1 / 3, 1 / 3])
    assert sum(rollout.error is not None for rollout in data.rollouts) == 2


@pytest.mark.parametrize("on_error, message", [("drop", "all 6 rollouts of step 0 failed"), ("stop", "no such answer")])
def test_if_all_rewards_fail_the_run_ends_with_the_reason(on_error: Any, message: str) -> None:
    def reward(task: Task, text: str) -> float:
        raise ValueError("no such answer")

    data = TextRollouts("digits", reward, 2, 3, 4, on_reward_error=on_error)
    with pytest.raises(RolloutError, match=message) as failed:
        make(data=data).fit()
    assert "ValueError: no such answer" in str(failed.value)


class Guessing:
    """A partner that says higher or lower."""

    def __init__(self, task: Task) -> None:
        self.turns = 0

    def respond(self, text: str) -> Turn:
        self.turns += 1
        return Turn(" higher ", 0.5, done=self.turns == 3)


def test_conversations_take_one_generate_call_a_turn_and_train_only_on_what_was_sampled() -> None:
    data = TextRollouts(
        "digits", prompts_per_step=2, group_size=3, max_new_tokens=4, conversation=Guessing, max_turns=5
    )
    trainer = make(data=data, training_steps=1)
    calls = []
    kept = trainer.policy.generate

    def counted(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(prompts))
        return kept(prompts, *args, **kwargs)

    trainer.policy.generate = counted  # type: ignore[assignment]
    trainer.fit()
    assert calls == [2, 6, 6]
    policy: Any = trainer.policy
    for rollout in data.rollouts:
        assert rollout.turns == 3 and rollout.reward == 1.5
        assert len(rollout.tokens) == len(rollout.loss_mask) == len(rollout.logprobs or [])
        heard = [token for token, mask in zip(rollout.tokens, rollout.loss_mask) if not mask]
        assert policy.decode(heard) == rollout.task.prompt + " higher " * 2


def test_a_partner_that_fails_costs_one_rollout() -> None:
    class Flaky(Guessing):
        count = 0

        def respond(self, text: str) -> Turn:
            Flaky.count += 1
            if Flaky.count == 2:
                raise OSError("hung up")
            return super().respond(text)

    data = TextRollouts("digits", prompts_per_step=2, group_size=3, max_new_tokens=4, conversation=Flaky)
    make(data=data, training_steps=1).fit()
    assert [rollout.error for rollout in data.rollouts].count("OSError: hung up") == 1


@pytest.mark.parametrize(
    "options, algorithm, message",
    [
        ({"temperature": 0.7}, GRPO(), "drawn at temperature 0.7"),
        ({}, None, "need an algorithm that learns from rewards"),
        ({"group_size": 0}, GRPO(), "must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_drawn(options: Any, algorithm: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        data = TextRollouts("digits", **{"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4, **options})
        trainer = make(data=data, algorithm=GRPO())
        trainer.algorithm = algorithm
        trainer.fit()


def test_held_out_tasks_are_evaluated_and_what_was_said_is_kept(tmp_path: Path) -> None:
    from etude.rollouts.reward_callback import EvaluateRewards

    callback = EvaluateRewards({"type": "digits", "params": {"size": 3}}, every=2, max_new_tokens=5)
    result = make(tmp_path / "run", callbacks=[callback], best_metric="eval/reward", best_mode="max").fit()
    assert 0 <= result.metrics["eval/reward"] <= 1
    assert result.best is not None
    files = sorted((tmp_path / "run" / "evaluation").glob("*.jsonl"))
    assert [path.name for path in files] == [f"step-{step:08d}.jsonl" for step in (2, 4, 6)]
    assert len(files[0].read_text().splitlines()) == 3


def test_completions_are_compared_with_the_greedy_one_where_the_algorithm_asks_for_it() -> None:
    trainer = make(algorithm=ReMax(), training_steps=2)
    trainer.fit()
    rollouts = trainer.data.rollouts  # type: ignore[attr-defined]
    assert all(rollout.greedy_rewards is not None for rollout in rollouts)
    assert len({(rollout.group_id, rollout.greedy_rewards) for rollout in rollouts}) == 4


def lively_tasks(task: Task, text: str) -> float:
    """Reward all alike on every other prompt, and by length on the rest."""
    return 1.0 if int(task.id) % 2 else float(len(text)) + 0.01 * sum(map(ord, text))


def test_groups_of_equal_reward_are_replaced_by_those_of_other_prompts() -> None:
    def drawn(resample: int) -> tuple[Any, dict[str, Any]]:
        prompts = [f"{number}: " for number in range(8)]
        data = TextRollouts(
            prompts, lively_tasks, prompts_per_step=4, group_size=4, max_new_tokens=8, resample=resample
        )
        make(data=data, training_steps=1).fit()
        groups: dict[str, list[Any]] = {}
        for rollout in data.rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        return data, groups

    plain, before = drawn(0)
    data, after = drawn(20)
    equal = {name for name, group in before.items() if len({rollout.reward for rollout in group}) == 1}
    assert equal and list(after) == list(before) and all(len(group) == 4 for group in after.values())
    for name, group in after.items():
        assert len({rollout.reward for rollout in group}) > 1
        assert len({rollout.task.id for rollout in group}) == 1
        same = [rollout.tokens for rollout in group] == [rollout.tokens for rollout in before[name]]
        assert same == (name not in equal)
    assert "rollout/resampled" not in plain.metrics
    assert data.metrics["rollout/resampled"][0] >= len(equal) / 4
    assert [r.tokens for r in drawn(20)[0].rollouts] == [r.tokens for r in data.rollouts]


def test_resampling_needs_something_to_compare() -> None:
    with pytest.raises(ConfigError, match="group_size of 2"):
        TextRollouts("digits", group_size=1, resample=1)
    with pytest.raises(ConfigError, match="choose one"):
        make(algorithm=ReMax(), data=TextRollouts("digits", resample=1)).fit()
