"""Evaluation: the same outcomes whenever and however they are measured."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import ConfigError, NonFiniteError
from etude.policies.base import PolicyModule
from etude.simulation.environments import rendering
from etude.simulation.evaluate import evaluate_policy
from etude.types import DataSpec, Feature
from tests.unit.simulation.conftest import OPTIONS, PENDULUM, pendulum_spec

pytest.importorskip("gymnasium")
SHORT: dict[str, Any] = {"episodes": 9, "options": OPTIONS}


@pytest.mark.parametrize("kind", ["mlp", "noisy"])
def test_slots_and_workers_change_no_outcome(kind: str, request: pytest.FixtureRequest) -> None:
    policy = request.getfixturevalue(kind)
    alone = evaluate_policy(policy, PENDULUM, slots=1, **SHORT)
    assert len({row.reward for row in alone.rows}) == 9
    for slots, workers in ((8, 0), (3, 0), (1, 2), (8, 2)):
        assert evaluate_policy(policy, PENDULUM, slots=slots, workers=workers, **SHORT) == alone
    assert [row.episode for row in alone.rows] == list(range(9))


def test_evaluating_twice_gives_the_same_whatever_happened_before(noisy: PolicyModule) -> None:
    first = evaluate_policy(noisy, PENDULUM, **SHORT)
    torch.manual_seed(5)
    np.random.seed(5)
    assert evaluate_policy(noisy, PENDULUM, **SHORT) == first
    assert evaluate_policy(noisy, PENDULUM, seed=1, **SHORT) != first
    assert evaluate_policy(noisy, PENDULUM, split="validation", **SHORT) != first


def test_more_episodes_begin_with_the_same_ones(mlp: PolicyModule) -> None:
    few = evaluate_policy(mlp, PENDULUM, episodes=3, options=OPTIONS)
    assert evaluate_policy(mlp, PENDULUM, episodes=5, options=OPTIONS).rows[:3] == few.rows


def test_nothing_of_the_process_is_changed(noisy: PolicyModule) -> None:
    noisy.train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    evaluate_policy(noisy, PENDULUM, episodes=1, options=OPTIONS)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert all(module.training for module in noisy.modules())


def test_all_slots_may_be_asked_at_once(mlp: PolicyModule) -> None:
    exact = evaluate_policy(mlp, PENDULUM, **SHORT)
    batched = evaluate_policy(mlp, PENDULUM, slots=4, exact=False, **SHORT)
    assert [row.seed for row in batched.rows] == [row.seed for row in exact.rows]
    np.testing.assert_allclose([row.reward for row in batched.rows], [row.reward for row in exact.rows], rtol=1e-3)


def test_history_begins_anew_with_each_episode(mlp: PolicyModule) -> None:
    """One slot plays several episodes: each must go as it does alone."""
    together = evaluate_policy(mlp, PENDULUM, episodes=3, slots=1, options=OPTIONS)
    mlp.reset()
    spread = evaluate_policy(mlp, PENDULUM, episodes=3, slots=3, options=OPTIONS)
    assert together == spread


def test_several_environments_make_a_table(mlp: PolicyModule) -> None:
    names = [PENDULUM, "gym:Pendulum-v1 "]
    with pytest.raises(ConfigError):
        evaluate_policy(mlp, names, episodes=1, options=OPTIONS)
    result = evaluate_policy(lambda _: np.zeros(1), [PENDULUM, "gym:MountainCarContinuous-v0"], **SHORT)
    assert [(rate.name, rate.episodes) for rate in result.tasks] == [(PENDULUM, 9), ("gym:MountainCarContinuous-v0", 9)]


def test_a_function_may_act_and_is_told_of_new_episodes() -> None:
    class Counter:
        def __init__(self) -> None:
            self.steps = 0

        def reset(self) -> None:
            self.steps = 0

        def __call__(self, observation: Any) -> Any:
            self.steps += 1
            assert self.steps <= 12, "a new episode began without a word"
            return np.array([float(self.steps % 2)])

    one = evaluate_policy(Counter(), PENDULUM, slots=1, **SHORT)
    assert evaluate_policy(Counter(), PENDULUM, slots=8, **SHORT) == one


@pytest.mark.parametrize("returned", [np.zeros(7), "left", None, [[1.0], [1.0, 2.0]]])
def test_a_function_that_returns_no_action_is_told_so(returned: Any) -> None:
    def steer(observation: Any) -> Any:
        return returned

    with pytest.raises(
        ConfigError, match=r"^steer has to return numbers of shape \[1\], the action in .*; it returned"
    ):
        evaluate_policy(steer, PENDULUM, **SHORT)


def test_a_function_that_returns_nan_is_not_taken_for_one_that_fails() -> None:
    with pytest.raises(NonFiniteError, match="chose an action that is not finite"):
        evaluate_policy(lambda _: np.full(1, np.nan), PENDULUM, **SHORT)


def test_latencies_and_rates_are_told(mlp: PolicyModule) -> None:
    timing = evaluate_policy(mlp, PENDULUM, workers=2, **SHORT).timing
    assert timing["env_steps"] == 9 * 12
    assert 0 < timing["policy_ms_p50"] <= timing["policy_ms_p99"] <= timing["policy_ms_max"]
    assert timing["env_steps_per_s"] > 0


def test_rows_are_told_as_they_come(mlp: PolicyModule) -> None:
    seen: list[int] = []
    beats: list[None] = []
    evaluate_policy(
        mlp, PENDULUM, on_episode=lambda row: seen.append(row.episode), heartbeat=lambda: beats.append(None), **SHORT
    )
    assert sorted(seen) == list(range(9))
    assert len(beats) == 9 * 12


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_films_show_what_happened_failures_first(tmp_path: Path, workers: int) -> None:
    options = {"success_return": 10.0, "max_steps": 12}
    shown: list[tuple[int, int]] = []
    found = evaluate_policy(
        lambda seen: np.array(int(seen["observation.state"][0] > 0)), "gym:CartPole-v1", episodes=6, options=options,
        video_dir=tmp_path, videos=4, workers=workers,
        on_film=lambda result: shown.append((result.total.successes, len(result.videos))),
    )  # fmt: skip
    assert shown == [(found.total.successes, films) for films in range(5)]
    assert found.timing["env_steps"] == sum(row.steps for row in found.rows)
    failures = [row.episode for row in found.rows if not row.success]
    assert 0 < len(failures) < 6
    names = [path.name for path in found.videos]
    assert len(names) == 4
    assert [name.endswith("failure.mp4") for name in names] == [True] * len(failures) + [False] * (4 - len(failures))
    assert all(path.stat().st_size > 500 for path in found.videos)


def test_an_action_that_is_not_finite_stops_the_evaluation(mlp: PolicyModule) -> None:
    with torch.no_grad():
        next(mlp.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="MLP chose an action"):
        evaluate_policy(mlp, PENDULUM, **SHORT)
    with pytest.raises(NonFiniteError, match="MLP chose an action"):
        evaluate_policy(mlp, PENDULUM, workers=2, **SHORT)


def test_a_policy_that_wants_to_see_more_is_told_what_there_is(mlp: PolicyModule) -> None:
    with pytest.raises(ConfigError, match=r"with observation.state \[3\].*, but .* has observation.state \[4\]"):
        evaluate_policy(mlp, "gym:CartPole-v1", episodes=1)


def test_a_policy_that_wants_to_see_what_is_not_shown_is_refused(mlp: PolicyModule) -> None:
    mlp.spec = DataSpec({**mlp.spec.features, "observation.images.top": Feature((3, 8, 8), "uint8", "image")})
    with pytest.raises(
        ConfigError, match=r"but the environment .* has observation.state .*: it has no observation.images.top"
    ):
        evaluate_policy(mlp, PENDULUM, episodes=1, options=OPTIONS)


@pytest.mark.parametrize("wrong", [{"episodes": 0}, {"slots": 0}, {"workers": -1}, {"split": "tset"}, {"env_name": []}])
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"env_name": PENDULUM, "episodes": 1, **wrong}
    with pytest.raises(ConfigError):
        evaluate_policy(lambda _: np.zeros(1), arguments.pop("env_name"), **arguments)


def test_who_cannot_act_is_refused() -> None:
    for policy, message in ((torch.nn.Linear(1, 1), "select_action"), ("wizard", "expert"), (3, "got int")):
        with pytest.raises(ConfigError, match=message):
            evaluate_policy(policy, PENDULUM, episodes=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without an expert"):
        evaluate_policy("expert", PENDULUM, episodes=1, options=OPTIONS)


def test_a_process_that_has_rendered_does_not_fork(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendering, "_has_rendered", True)
    with caplog.at_level(logging.INFO, logger="etude"):
        found = evaluate_policy(lambda _: np.zeros(1), PENDULUM, workers=2, **SHORT)
    assert len(found.rows) == 9
    assert "without workers" in caplog.text


def test_a_policy_of_several_tasks_is_told_which_one_it_is() -> None:
    from etude.policies.mlp import MLP

    spec = pendulum_spec()
    names = ("swing it", "Pendulum-v1", "let it be")
    policy = MLP(hidden=[8])
    torch.manual_seed(0)
    policy.build(DataSpec({**spec.features, "task_index": Feature((), "int64", "task", 3, names)}, 30.0))
    found = evaluate_policy(policy, PENDULUM, **SHORT)
    assert evaluate_policy(policy, PENDULUM, tasks={"Pendulum-v1": 1}, **SHORT) == found
    assert evaluate_policy(policy, PENDULUM, tasks={"Pendulum-v1": 2}, **SHORT) != found
    with pytest.raises(ConfigError, match="not trained on the task 'hold it'; it knows 'swing it', 'Pendulum-v1'"):
        evaluate_policy(policy, PENDULUM, episodes=1, options={**OPTIONS, "task": "hold it"})
