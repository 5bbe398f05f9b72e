"""Reward functions of the user's may raise, return nonsense or hang: the rollout is dropped, or the run stops."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import ConfigError, DataError, RolloutError
from etude.loop.watchdog import _is_alive
from etude.rollouts.rewards import MOST_HUNG, Rewards, contains_answer, exact_match
from etude.rollouts.sources import make_reward, make_tasks
from etude.rollouts.tasks import Addition, Digits, PromptFile, Prompts, Task
from etude.rollouts.text import TextRollouts
from etude.runs.directory import Run
from tests.crash.harness import compare
from tests.processes import reap, spawn, wait_for

TASKS = [Task("a", "1", "a"), Task("b", "2", "b"), Task("c", "3", "c")]


def judge(function: Any, timeout_s: float | None = 5.0, **options: Any) -> list[Any]:
    return Rewards(function, timeout_s, **options)(TASKS, ["1", "x", "3"])


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_each_completion_gets_its_reward_and_scores(timeout_s: float | None) -> None:
    found = judge(lambda task, text: {"reward": task.answer == text, "length": len(text)}, timeout_s)
    assert [outcome.reward for outcome in found] == [1.0, 0.0, 1.0]
    assert all(outcome.scores == {"length": 1.0} and outcome.error is None for outcome in found)


@pytest.mark.parametrize("timeout_s", [None, 5.0])
@pytest.mark.parametrize(
    "result, error",
    [
        (math.nan, "it returned nan"),
        (math.inf, "it returned inf"),
        ("much", "it returned 'much', which is no number"),
        (None, "it returned None, which is no number"),
        ([1.0, 2.0], "it returned [1.0, 2.0], which is no number"),
        (torch.zeros(2), "it returned tensor([0., 0.]), which is no number"),
        ({"score": 1.0}, "it returned no 'reward', but 'score'"),
        ({"reward": 1.0, "why": "good"}, "it returned 'good' as 'why', which is no number"),
        (ZeroDivisionError("by nought"), "ZeroDivisionError: by nought (test_rewards.py, line "),
        (KeyError("answer"), "KeyError: 'answer'"),
    ],
    ids=str,
)
def test_what_fails_is_dropped_and_the_rest_kept(result: Any, error: str, timeout_s: float | None) -> None:
    def reward(task: Task, text: str) -> Any:
        if task.id != "b":
            return 1.0
        if isinstance(result, Exception):
            raise result
        return result

    found = judge(reward, timeout_s)
    assert [outcome.reward for outcome in found] == [1.0, None, 1.0]
    assert error in found[1].error
    with pytest.raises(RolloutError, match="the reward of task 'b' failed on 'x'"):
        judge(reward, timeout_s, on_error="stop")


def test_one_that_hangs_is_given_up_and_the_next_ones_still_judged() -> None:
    never = threading.Event()

    def reward(task: Task, text: str) -> float:
        if task.id == "b":
            never.wait(60)
        return 1.0

    began = time.monotonic()
    found = judge(reward, 0.2)
    assert time.monotonic() - began < 10
    assert [outcome.reward for outcome in found] == [1.0, None, 1.0]
    assert found[1].error == "it took longer than 0.2 s"
    never.set()


def test_many_that_hang_end_the_run() -> None:
    never = threading.Event()
    rewards = Rewards(lambda task, text: float(never.wait(60)), 0.01)
    with pytest.raises(RolloutError, match=r"took longer than 0\.01 s.* on 9 rollouts in a row"):
        rewards([TASKS[0]] * (MOST_HUNG + 2), ["x"] * (MOST_HUNG + 2))
    never.set()


def backtracks(task: Task, text: str) -> float:
    """Keep the interpreter's lock for years on one of the tasks."""
    if task.id == "b":
        re.match(r"(a+)+$", "a" * 40 + "b")
    return 1.0


def test_one_that_hangs_inside_c_costs_one_rollout() -> None:
    rewards = Rewards(backtracks, 0.5)
    for _ in range(2):
        found = rewards(TASKS, ["1", "x", "3"])
        assert [outcome.reward for outcome in found] == [1.0, None, 1.0]
        assert found[1].error == "it took longer than 0.5 s"
    rewards.close()


@pytest.mark.parametrize("end", [lambda: sys.exit(0), lambda: os._exit(3), lambda: os.kill(os.getpid(), 9)])
def test_one_that_ends_its_process_costs_one_rollout(end: Any) -> None:
    found = judge(lambda task, text: end() if task.id == "b" else 1.0)
    assert [outcome.reward for outcome in found] == [1.0, None, 1.0]
    assert "it ended its process (exit code " in found[1].error


def test_what_a_function_keeps_is_kept_and_what_it_draws_is_drawn_again() -> None:
    seen: list[str] = []

    def reward(task: Task, text: str) -> dict[str, float]:
        seen.append(text)
        return {"reward": random.random(), "drawn": float(torch.rand(())), "seen": len(seen)}

    rewards = Rewards(reward, 5.0)
    random.seed(3)
    first = rewards(TASKS, ["1", "2", "3"])
    random.seed(3)
    again = rewards(TASKS, ["1", "2", "3"])
    assert [outcome.scores["seen"] for outcome in first + again] == [1, 2, 3, 4, 5, 6]
    assert len({outcome.reward for outcome in first}) == 3
    assert [(one.reward, one.scores["drawn"]) for one in first] == [(one.reward, one.scores["drawn"]) for one in again]
    rewards.close()


@pytest.mark.slow
def test_a_function_may_start_processes_of_its_own_which_end_with_it() -> None:
    def reward(task: Task, text: str) -> float:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.01 if task.id == "a" else 600,))
        child.start()
        os.write(there, child.pid.to_bytes(4, "little"))  # type: ignore[union-attr]
        child.join()
        return 1.0

    here, there = os.pipe()
    rewards = Rewards(reward, 3.0)
    assert [outcome.reward for outcome in rewards(TASKS[:2], ["", ""])] == [1.0, None]
    pids = [int.from_bytes(os.read(here, 4), "little") for _ in range(2)]
    for _ in range(500):
        if not any(_is_alive(pid) for pid in pids):
            break
        time.sleep(0.01)
    assert not any(_is_alive(pid) for pid in pids)


def test_tasks_that_cannot_be_sent_are_judged_in_a_thread_with_a_word(caplog: Any) -> None:
    class Local(Task):
        pass

    tasks: list[Any] = [Local("a", "1", "a"), Task("b", "2", "b", {"check": lambda: 1.0})]
    rewards = Rewards(lambda task, text: 1.0, 5.0)
    assert [outcome.reward for outcome in rewards(tasks, ["1", "2"]) * 2] == [1.0] * 4
    (said,) = (record.getMessage() for record in caplog.records)
    assert "the reward function gets no process of its own (a task cannot be sent to it: " in said


def test_a_copy_has_a_process_of_its_own() -> None:
    rewards = Rewards(backtracks, 5.0)
    rewards(TASKS[:1], [""])
    copied = copy.deepcopy(rewards)
    assert copied(TASKS[:1], [""])[0].reward == rewards(TASKS[:1], [""])[0].reward == 1.0
    rewards.close(), copied.close()


@pytest.mark.slow
def test_a_stop_signal_saves_and_ends_a_run_whose_reward_hangs_inside_c(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

    def train(hangs: bool) -> None:
        from tests.unit.rollouts.test_text import make

        calls: list[str] = []

        def reward(task: Task, text: str) -> float:
            calls.append(text)
            if hangs and len(calls) > 16:  # in the third step
                (tmp_path / "hangs").touch()
                re.match(r"(a+)+$", "a" * 40 + "b")
            return float(len(text))

        name = "run" if hangs or (tmp_path / "run").exists() else "whole"
        data = TextRollouts(["1 ", "2 ", "3 ", "4 "], reward, group_size=2, max_new_tokens=4, reward_timeout_s=600.0)
        make(tmp_path / name, data=data, training_steps=4, save_every=1, keep_last=20).fit()

    train(False)
    (pid,) = spawn(lambda: train(True))
    wait_for(tmp_path / "hangs", 60)
    os.kill(pid, signal.SIGTERM)
    assert reap([pid], timeout_s=60) == [143]
    assert Run(tmp_path / "run").status()["state"] == "interrupted"
    train(False)
    assert compare(tmp_path / "run", tmp_path / "whole") is None, (
        "a step that was left is taken as if for the first time"
    )


def test_a_slow_but_good_function_is_not_given_up() -> None:
    def reward(task: Task, text: str) -> float:
        time.sleep(0.05)
        return 1.0

    assert [outcome.reward for outcome in judge(reward, 1.0)] == [1.0] * 3


def test_ready_made_rewards() -> None:
    assert [exact_match(TASKS[0], text) for text in (" 1\n", "11")] == [1.0, 0.0]
    assert [contains_answer(TASKS[0], text) for text in ("it is 1.", "no")] == [1.0, 0.0]


def test_prompts_come_from_lists_files_and_names(tmp_path: Any) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "2+2=", "answer": "4", "level": 3}\nplain text\n\n"quoted"\n')
    assert [task.prompt for task in PromptFile(path)] == ["2+2=", "plain text", "quoted"]
    assert PromptFile(path)[0] == Task("2+2=", "4", "0", {"level": 3})
    path.write_text('{"prompt": \n')
    with pytest.raises(DataError, match="line 1"):
        PromptFile(path)
    with pytest.raises(DataError, match="cannot be read"):
        PromptFile(tmp_path / "none")
    assert isinstance(make_tasks(["a", "b"]), Prompts)
    assert len(make_tasks({"type": "addition", "params": {"size": 7}})) == 7
    with pytest.raises(ConfigError, match="unexpected keyword argument 'sise'"):
        make_tasks({"type": "addition", "params": {"sise": 7}})
    with pytest.raises(ConfigError, match="did you mean 'addition'"):
        make_tasks("additon")
    with pytest.raises(ConfigError, match="no key 'parms'"):
        make_tasks({"type": "addition", "parms": {}})
    with pytest.raises(ConfigError, match="no reward of their own"):
        make_reward(None, Prompts(["a"]))
    with pytest.raises(DataError, match="prompt 1"):
        Prompts(["a", 3])  # type: ignore[list-item]


def test_sums_are_scored_for_form_and_for_truth() -> None:
    tasks = Addition(low=2, high=5, size=20)
    assert {task.id for task in tasks} == {task.id for task in Addition(low=2, high=5, size=20)}
    task = tasks[3]
    right = task.answer
    assert tasks.score(task, f" {right}\n")["reward"] == 1.0
    assert tasks.score(task, f"{int(right) + 1}")["reward"] == 0.5
    assert tasks.score(task, "perhaps")["reward"] == 0.0
    assert Digits().score(task, "12a4") == 0.75
    assert Digits().score(task, "") == 0.0


def test_reasoning_gym_verifies_its_own_answers() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra: llm)")
    tasks = make_tasks({"type": "reasoning_gym", "params": {"name": "basic_arithmetic", "size": 5, "seed": 3}})
    task = tasks[2]
    assert tasks.score(task, f" {task.answer}\nand so on") == 1.0  # type: ignore[attr-defined]
    assert tasks.score(task, "") < 1.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="reasoning-gym cannot make"):
        make_tasks({"type": "reasoning_gym", "params": {"name": "no_such_task"}})


def test_what_training_writes_to_is_not_kept_twice() -> None:
    weights = torch.ones(1_000_000)
    rewards = Rewards(lambda task, text: float(weights.untyped_storage().nbytes()), 5.0)
    rewards.judge.release = lambda: [weights]
    assert rewards(TASKS[:1], [""])[0].reward == 0
    assert weights.untyped_storage().nbytes() == 4_000_000
    rewards.close()
