"""Agents: asked together level by level, trained on exactly what was sampled, and never waited for without end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

from etude import Trainer, TrainingConfiguration
from etude.algorithms.grpo import GRPO
from etude.errors import ConfigError, DataError, RegistryError, RolloutError
from etude.policies.language import LanguageModel
from etude.rollouts.coordinator import MOST_HUNG, run_together
from etude.rollouts.evaluators import EvaluationRunResult, Evaluator
from etude.rollouts.llm import LLM
from etude.rollouts.reward_callback import EvaluateRewards
from etude.rollouts.tasks import Task
from etude.rollouts.text import TextRollouts
from etude.rollouts.tools import ToolAgent
from etude.runs.checkpoint import CheckpointStore
from etude.types.protocols import Place
from tests.callbacks import DieAt, KeepRows
from tests.crash.harness import compare
from tests.processes import reap, run_ranks, spawn

PROMPTS = [{"prompt": f"say {number}: ", "answer": str(number)} for number in range(4)]


def rollouts_of(agent: Any, policy: Any = None, step: int = 0, place: Place | None = None, **options: Any) -> list[Any]:
    """Draw and judge one step's rollouts of an agent."""
    settings = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6, "reward_timeout_s": None}
    data = TextRollouts(options.pop("tasks", PROMPTS), agent=agent, **{**settings, **options})
    data.open(place or Place())
    try:
        return data.judged(policy or LanguageModel.tiny(seed=0), data._positions(step), seed=step)
    finally:
        data.close()


def make(data: TextRollouts, run: Any = False, callbacks: Any = (), **config: Any) -> Trainer:
    torch.set_num_threads(1)
    settings = {"lr": 3e-3, "batch_size": 8, "training_steps": 3, "log_every": 1, "ema_decay": 0.9}
    return Trainer(
        LanguageModel.tiny(seed=0), data, GRPO(by_run=True), config=TrainingConfiguration(**{**settings, **config}),
        run=run, loggers=[], callbacks=callbacks, show_progress=False,
    )  # fmt: skip


class Twice:
    """Asks, says something, and asks again."""

    def run(self, task: Task, llm: LLM) -> float:
        first = llm.complete(task.prompt)
        second = llm.complete(f"{task.prompt}{first.text} go on: ", max_tokens=4)
        return float(sum(character.isdigit() for character in first.text + second.text))


def test_turns_that_share_a_prefix_are_one_trajectory_of_the_very_tokens_that_were_sampled() -> None:
    policy = LanguageModel.tiny(seed=0)
    sampled: list[list[int]] = []
    kept = policy.generate

    def noted(prompts: Any, sampling: Any, **options: Any) -> Any:
        found = kept(prompts, sampling, **options)
        sampled.append([token for group in found for one in group for token in one.tokens])
        return found

    policy.generate = noted  # type: ignore[method-assign]
    rollouts = rollouts_of(Twice, policy)
    assert [(r.group_id, r.run_id, r.turns) for r in rollouts] == [
        ("0", 0, 2), ("0", 1, 2), ("1", 0, 2), ("1", 1, 2),
    ]  # fmt: skip
    assert len(sampled) == 2  # a call of generate for each level, of all agents together
    for rollout in rollouts:
        assert len(rollout.tokens) == len(rollout.loss_mask) == len(rollout.logprobs)
        heard = [token for token, counts in zip(rollout.tokens, rollout.loss_mask, strict=True) if not counts]
        assert policy.decode(heard) == f"{rollout.task.prompt} go on: "
    trained = [t for r in rollouts for t, counts in zip(r.tokens, r.loss_mask, strict=True) if counts]
    assert sorted(trained) == sorted(sampled[0] + sampled[1])
    batch = {"input_ids": torch.tensor([rollouts[0].tokens]), "attention_mask": torch.ones(1, len(rollouts[0].tokens))}
    scored = policy.log_probs(batch)[0].tolist()[-len(rollouts[0].tokens) :]
    for found, drawn, counts in zip(scored[-4:], rollouts[0].logprobs[-4:], rollouts[0].loss_mask[-4:], strict=True):
        assert not counts or found == pytest.approx(drawn, abs=1e-5)


def test_turns_that_share_nothing_are_trajectories_of_one_run_with_its_reward() -> None:
    def two_questions(task: Task, llm: LLM) -> dict[str, Any]:
        llm.complete(task.prompt)
        llm.complete("and now: ")
        llm.complete("quietly: ", train=False)
        return {"reward": llm.turns, "score": {"asked": llm.turns}}

    rollouts = rollouts_of(two_questions)
    assert [(r.group_id, r.run_id, r.turns, r.reward) for r in rollouts[:4]] == [
        ("0", 0, 1, 3.0), ("0", 0, 1, 3.0), ("0", 1, 1, 3.0), ("0", 1, 1, 3.0),
    ]  # fmt: skip
    assert len(rollouts) == 8 and rollouts[0].scores == {"asked": 3.0}


def test_a_prompt_asked_again_begins_a_new_trajectory_even_after_an_empty_reply() -> None:
    def again(task: Task, llm: LLM) -> list[float]:
        replies = [llm.complete(task.prompt, max_tokens=1) for _ in range(3)]
        assert all(reply.prompt_tokens == replies[0].prompt_tokens for reply in replies)
        return [0.0, 1.0, 2.0]

    assert [rollout.reward for rollout in rollouts_of(again)] == [0.0, 1.0, 2.0] * 4


class Slow(Twice):
    """Takes its time, more of it where fewer would: threads come in another order."""

    delay = 0.0

    def run(self, task: Task, llm: LLM) -> float:
        time.sleep(self.delay * (3 - int(task.answer)))
        found = super().run(task, llm)
        time.sleep(self.delay * (llm.seed % 3))
        return found


def test_what_comes_out_does_not_depend_on_which_thread_is_faster() -> None:
    quick = rollouts_of(Slow, step=1)
    Slow.delay = 0.02
    try:
        slow = rollouts_of(Slow, step=1)
    finally:
        Slow.delay = 0.0
    assert quick == slow
    assert quick != rollouts_of(Slow, step=3)


def test_a_rollout_is_a_function_of_its_place_and_not_of_the_ranks() -> None:
    alone = {(r.group_id, r.run_id): r.tokens for r in rollouts_of(Twice)}
    for rank in range(2):
        for rollout in rollouts_of(Twice, place=Place(rank=rank, world=2)):
            assert rollout.tokens == alone[rollout.group_id, rollout.run_id]


@pytest.mark.parametrize(
    "result, reward, wanted, text",
    [
        (2, None, 2.0, None),
        ("mine", lambda task, text: len(text), 4.0, "mine"),
        (None, lambda task, text: len(text) * 100.0, None, None),
        ({"text": "mine", "score": {"s": 1}}, lambda task, text: {"reward": 5, "t": 2}, 5.0, "mine"),
        ({"reward": 1.5, "text": "mine"}, lambda task, text: 9.0, 1.5, "mine"),
        ([0.5], None, 0.5, None),
        (["mine"], lambda task, text: len(text), 4.0, "mine"),
    ],
)
def test_an_agent_returns_a_reward_or_a_text_to_be_judged(result: Any, reward: Any, wanted: Any, text: Any) -> None:
    def agent(task: Task, llm: LLM) -> Any:
        llm.complete(task.prompt)
        return result

    for rollout in rollouts_of(agent, reward=reward):
        assert rollout.error is None
        assert rollout.reward == (len(rollout.text) * 100.0 if wanted is None else wanted)
        assert text is None or rollout.text == text


@pytest.mark.parametrize(
    "result, message",
    [
        (float("nan"), "it returned nan"),
        ("text", "no reward, and there is no reward function"),
        ({"rewards": 1}, "'rewards'; reward, text and score have a meaning"),
        ([1.0, 2.0], "a list of 2 for 1 turns"),
        (object(), "float"),
    ],
)
def test_a_result_that_makes_no_sense_is_a_failed_rollout(result: Any, message: str) -> None:
    def agent(task: Task, llm: LLM) -> Any:
        llm.complete(task.prompt)
        return result

    assert all(r.reward is None and message in r.error for r in rollouts_of(agent))


def test_agents_that_raise_ask_too_much_or_never_end_cost_their_rollout_alone() -> None:
    never = threading.Event()

    def agent(task: Task, llm: LLM) -> float:
        if task.answer == "0":
            raise OSError("no such tool")
        if task.answer == "1":
            never.wait()
        while task.answer == "2":
            llm.complete(task.prompt)
        llm.complete(task.prompt)
        return 1.0

    place = Place(shuffle=False)
    rollouts = rollouts_of(agent, prompts_per_step=4, max_turns=3, agent_timeout_s=3.0, place=place)
    assert [(r.group_id, r.reward) for r in rollouts[-2:]] == [("3", 1.0)] * 2
    errors = {r.task.answer: r.error for r in rollouts}
    assert errors == {
        "0": "the agent failed: OSError: no such tool",
        "1": "the agent failed: it took longer than 3 s",
        "2": "the agent failed: it asked for more than 3 completions; raise max_turns",
        "3": None,
    }
    never.set()


def test_what_one_agent_asks_wrongly_is_its_own_error() -> None:
    seen = []

    def agent(task: Task, llm: LLM) -> float:
        if task.answer == "0":
            for wrong in ("", [], "x" * 600, [{"role": "user", "content": "hi"}]):
                with pytest.raises((DataError, ConfigError)) as caught:
                    llm.complete(wrong)  # type: ignore[arg-type]
                seen.append(str(caught.value))
            with pytest.raises(ConfigError, match="train=False"):
                llm.complete(task.prompt, temperature=0.5)
        llm.complete(task.prompt)
        return 1.0

    rollouts = rollouts_of(agent, group_size=1, max_turns=9, place=Place(shuffle=False))
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0], rollouts[0].error
    assert "empty prompt" in seen[0] and "exceeds the model's context of 512" in seen[2]
    assert "no chat template" in seen[3]


def test_an_error_of_the_model_ends_the_run_and_leaves_no_agent_behind() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(policy, name)

        def generate(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("the model is broken")

    policy = LanguageModel.tiny(seed=0)
    with pytest.raises(RuntimeError, match="the model is broken"):
        rollouts_of(Twice, Broken())
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("etude-agent") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_whoever_waits_for_agents_can_be_called_away() -> None:
    never = threading.Event()

    def glance() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_together([lambda ask: never.wait()], lambda asked: [], None, glance)
    never.set()


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def test_chat_goes_on_with_the_tokens_that_were_sampled_and_answers_in_openai_shape() -> None:
    policy = LanguageModel.tiny(seed=0)
    policy.tokenizer.chat_template = CHAT
    answers: list[Any] = []

    def agent(task: Task, llm: LLM) -> float:
        messages = list(task.messages)
        first = llm.chat(messages, max_tokens=5)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
        answers.append((first, llm.chat(messages)))
        return 1.0

    rollouts = rollouts_of(agent, policy, chat=True, prompts_per_step=1, group_size=1)
    (rollout,) = rollouts
    first, second = (one["nexrl_train"] for one in answers[0])
    assert rollout.turns == 2
    assert rollout.tokens == second["prompt_tokens"] + second["response_tokens"]
    assert (
        second["prompt_tokens"][: len(first["prompt_tokens"]) + 5]
        == (first["prompt_tokens"] + first["response_tokens"])[: len(first["prompt_tokens"]) + 5]
    )
    assert policy.decode(first["prompt_tokens"]) == f"<user>{rollout.task.prompt}\n<assistant>"
    assert policy.decode(second["prompt_tokens"]).endswith("\n<user>more\n<assistant>")
    answer = answers[0][0]
    assert answer["usage"]["total_tokens"] == len(first["prompt_tokens"]) + len(first["response_tokens"])
    assert len(first["response_logprobs"]) == len(first["response_tokens"])


def test_agents_and_rewards_come_from_files_whose_siblings_they_import(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("WORD = 'digits: '\n")
    (tmp_path / "mine.py").write_text(
        "from .words import WORD\n"
        "from etude.rollouts.evaluators import Evaluator, EvaluationRunResult\n"
        "class Mine:\n"
        "    def __init__(self, tokens=3):\n        self.tokens = tokens\n"
        "    def run(self, task, llm):\n        return llm.complete(WORD, max_tokens=self.tokens).text + '!'\n"
        "class Judge(Evaluator):\n"
        "    def evaluate(self, data, target):\n"
        "        right = target.final_answer.endswith('!')\n"
        "        return EvaluationRunResult(float(right), data['answer'], {'source': data['weight']})\n"
        "def judge(task, text):\n    return float(len(text))\n"
    )
    tasks = [{"prompt": "a", "answer": "b", "weight": 2.0}]
    agent = {"type": f"{tmp_path}/mine.py:Mine", "params": {"tokens": 2}}
    options: Any = {"tasks": tasks, "prompts_per_step": 1, "reward_timeout_s": 10.0}
    for rollout in rollouts_of(agent, reward=f"{tmp_path}/mine.py:Judge", **options):
        assert (rollout.reward, rollout.scores) == (1.0, {"source": 2.0})
        assert sum(rollout.loss_mask) <= 2
    for rollout in rollouts_of(agent, reward=f"{tmp_path}/mine.py:judge", **options):
        assert rollout.reward == len(rollout.text)
    with pytest.raises(RegistryError, match=r"mine.py:Nobody': the file defines .*Mine.*, but no 'Nobody'"):
        rollouts_of(f"{tmp_path}/mine.py:Nobody")
    with pytest.raises(RegistryError, match=r"none.py:X'.*no such file"):
        rollouts_of(f"{tmp_path}/none.py:X")
    with pytest.raises(RegistryError, match="unknown agent 'tool'; did you mean 'tools'"):
        rollouts_of("tool")


def test_an_evaluator_is_a_reward_and_so_is_its_class() -> None:
    class Length(Evaluator):
        def evaluate(self, data: Any, target: Any) -> EvaluationRunResult:
            return EvaluationRunResult(len(target), metrics={"known": len(data["ground_truth"])})

    for reward in (Length, Length()):
        data = TextRollouts(PROMPTS, reward, prompts_per_step=1, group_size=2, max_new_tokens=4)
        data.open(Place())
        for rollout in data.judged(LanguageModel.tiny(seed=0), [0], 0):
            assert rollout.reward == len(rollout.text) and rollout.scores == {"known": 1.0}
        data.close()


class Script:
    """A stand-in that says what it is told to, one token a character, for tools that no tiny model can call."""

    def __init__(self, *says: str) -> None:
        self.says, self.calls = says, 0

    def generate(self, prompts: Any, sampling: Any, *, n: int = 1, keys: Any = None) -> Any:
        from etude.policies.language import Completion

        policy, text = LanguageModel.tiny(seed=0), self.says[self.calls]
        self.calls += 1
        self.prompts = [policy.decode(prompt) for prompt in prompts]
        tokens = policy.encode(text)
        shown = min((text.partition(stop)[0] for stop in sampling.stop), key=len, default=text)
        return [[Completion(list(tokens), [-1.0] * len(tokens), shown, "stop")] * n for _ in prompts]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_tools_are_called_and_their_results_carry_no_loss() -> None:
    script = Script('I ask. <tool>add({"a": 2, "b": 3})</tool>', "it is 5")
    agent = {"type": "tools", "params": {"tools": [add], "instructions": "You have:\n{tools}\n"}}
    (rollout,) = rollouts_of(
        agent, generator=script, reward=lambda task, text: text == "it is 5", prompts_per_step=1, group_size=1,
        max_new_tokens=40, place=Place(shuffle=False),
    )  # fmt: skip
    assert (rollout.reward, rollout.turns) == (1.0, 2)
    assert rollout.scores == {"tool_calls": 1.0, "tool_errors": 0.0}
    policy = LanguageModel.tiny(seed=0)
    head = "You have:\nadd(a, b): Add two numbers.\nsay 0: "
    assert policy.decode(rollout.tokens) == f"{head}{script.says[0]}<result>5</result>it is 5"
    heard = [token for token, counts in zip(rollout.tokens, rollout.loss_mask, strict=True) if not counts]
    assert policy.decode(heard) == f"{head}<result>5</result>"


@pytest.mark.parametrize(
    "text, said",
    [
        ("<tool>add(1, 2)", "error: write a call as"),
        ("<tool>add({'a': 1})", "error: write a call as"),
        ("<tool>add", "error: write a call as"),
        ("<tool>__import__({})", "error: there is no tool '__import__'; there are add"),
        ('<tool>add({"a": 1})', "error: TypeError: add() missing 1 required"),
        ('x <tool> add ({"a": 1, "b": -4}) ', "-3"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_model(text: str, said: str) -> None:
    found, worked = ToolAgent([add]).call(text)
    assert found.startswith(said) and worked == (said == "-3")
    with pytest.raises(ConfigError, match="at least one"):
        ToolAgent([])


def test_held_out_tasks_are_worked_on_by_the_agent_and_measured_by_their_source(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "a: ", "data_source": "x"}\n{"prompt": "b: ", "data_source": "y"}\n')

    def agent(task: Task, llm: LLM) -> dict[str, Any]:
        llm.complete(task.prompt)
        return {"reward": 1.0 if task.prompt == "a: " else 0.0, "score": {"turns": llm.turns}}

    data = TextRollouts(PROMPTS, agent=agent, prompts_per_step=2, group_size=2, max_new_tokens=4)
    callback = EvaluateRewards({"type": "file", "params": {"path": str(held)}}, every=3)
    found = make(data, tmp_path / "run", [callback]).fit().metrics
    assert found["eval/reward"] == found["val/reward"] == 0.5
    assert (found["val/x_reward"], found["val/y_reward"], found["val/turns"]) == (1.0, 0.0, 1.0)
    assert found["val/num_samples"] == 2


def test_prompts_that_are_too_long_are_left_out_with_a_word(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("prompt\n" + "\n".join("x" * length for length in (3, 5, 9, 12)) + "\n")
    tasks = {"type": "file", "params": {"path": str(path), "max_prompt_length": 5}}
    data = TextRollouts(tasks, lambda task, text: len(text), prompts_per_step=2, group_size=2, max_new_tokens=2)
    with caplog.at_level("INFO", "etude"):
        make(data, training_steps=2).fit()
    assert "2 of 4 prompts have more than 5 tokens and are left out" in caplog.text
    assert {len(rollout.task.prompt) for rollout in data.rollouts} == {3, 5}
    tasks["params"]["max_prompt_length"] = 2  # type: ignore[index]
    with pytest.raises(DataError, match="all 4 prompts have more than 2 tokens"):
        make(TextRollouts(tasks, lambda task, text: 0.0)).fit()


def pooled(**options: Any) -> TextRollouts:
    pool = {"batch_size": 12, "group_size": 4, "key_list": ["group_id"]}
    settings: dict[str, Any] = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 5, "pool": pool}
    return TextRollouts(PROMPTS, agent=Twice, **{**settings, **options})


@pytest.mark.slow
def test_a_killed_run_with_an_agent_and_a_pool_resumes_bit_for_bit(tmp_path: Path) -> None:
    def train(name: str, callbacks: Any = ()) -> None:
        notes = KeepRows()
        trainer = make(pooled(), tmp_path / name, [*callbacks, notes], training_steps=6, save_every=1, keep_last=20)
        trainer.fit()
        waiting = [row["train/rollout/waiting"] for row in notes.rows]
        assert name != "whole" or waiting == [4.0, 0.0] * 3, waiting

    train("whole")
    assert reap(spawn(lambda: train("killed", [DieAt(4)]))) == [-9]
    kept = CheckpointStore(tmp_path / "killed" / "checkpoints").load("last").tree["data"]
    assert kept["drawn"] == 5 and len(kept["pool"]["waiting"]) == 4
    train("killed")
    assert compare(tmp_path / "killed", tmp_path / "whole") is None


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["group_id"], []])
def test_ranks_share_agents_and_a_pool_as_one_process_has_them(tmp_path: Path, keys: list[str]) -> None:
    def train(run: str, batch_size: int) -> None:
        pool = {"batch_size": 12, "group_size": 4, "key_list": keys} if keys else {"batch_size": 11}
        make(pooled(pool=pool), tmp_path / run, batch_size=batch_size, training_steps=4, optimizer="sgd", lr=0.05).fit()

    train("alone", 12)
    assert run_ranks(lambda: train("shared", 6), 2) == [0, 0]
    one, other = (CheckpointStore(tmp_path / run / "checkpoints").load("last").tree for run in ("alone", "shared"))
    moved = LanguageModel.tiny(seed=0).state_dict()
    assert max((one["policy"][key] - moved[key]).abs().max().item() for key in moved) > 1e-4
    assert max((one["policy"][key] - other["policy"][key]).abs().max().item() for key in one["policy"]) < 1e-6
    names = [sorted((w[1]["group_id"], w[1]["run_id"]) for w in t["data"]["pool"]["waiting"]) for t in (one, other)]
    assert names[0] == names[1] and one["data"]["drawn"] == other["data"]["drawn"]


def test_an_agent_leads_its_own_conversations() -> None:
    with pytest.raises(ConfigError, match="either agent or conversation"):
        TextRollouts(PROMPTS, agent=Twice, conversation=Twice)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no run"):
        TextRollouts(PROMPTS, agent=dict)
    with pytest.raises(RolloutError, match="all 4 rollouts of step 0 failed; the first: the agent failed: it ended"):
        make(TextRollouts(PROMPTS, agent=lambda task, llm: 1.0, prompts_per_step=2, group_size=2)).fit()


def test_many_agents_that_hang_end_the_run() -> None:
    never = threading.Event()
    try:
        found = run_together([lambda ask: never.wait()] * MOST_HUNG, lambda asked: [], 0.0)
        assert {ended.error for ended in found} == {"it took longer than 0 s"}
        with pytest.raises(RolloutError, match=f"{MOST_HUNG} agents were given up"):
            run_together([lambda ask: None], lambda asked: [])
    finally:
        never.set()
        for thread in threading.enumerate():
            if thread.name.startswith("etude-agent"):
                thread.join(60)


class Interrupting(Twice):
    """Asks its process to stop in the third draw, and hangs; not once a file says that this has been."""

    said: Path
    calls = 0

    def run(self, task: Task, llm: LLM) -> float:
        Interrupting.calls += 1
        if Interrupting.calls == 20 and not self.said.exists():
            self.said.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
        return super().run(task, llm)


@pytest.mark.slow
def test_a_signal_between_two_draws_of_a_step_loses_neither(tmp_path: Path) -> None:
    def train(name: str) -> None:
        Interrupting.said = tmp_path / ("said" if name == "stopped" else "never")
        Interrupting.calls = 0 if name == "stopped" else 100
        pool = {"batch_size": 24, "group_size": 4, "key_list": ["group_id"]}
        data = TextRollouts(
            PROMPTS, agent=Interrupting, prompts_per_step=2, group_size=4, max_new_tokens=5, pool=pool,
            agent_timeout_s=None,
        )  # fmt: skip
        make(data, tmp_path / name, training_steps=2).fit()

    train("whole")
    assert reap(spawn(lambda: train("stopped"))) == [143]
    kept = CheckpointStore(tmp_path / "stopped" / "checkpoints").load("last").tree["data"]
    assert kept["drawn"] == 2 and len(kept["pool"]["waiting"]) == 16
    assert reap(spawn(lambda: train("stopped"))) == [0]
    assert compare(tmp_path / "stopped", tmp_path / "whole") is None
