"""Gymnasium, PushT and ALOHA behind the same interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etude.errors import ConfigError
from etude.simulation.environments import make_environment, options_for, split_name
from etude.simulation.environments.base import Environment
from etude.types import DataSpec, Feature

gymnasium = pytest.importorskip("gymnasium")


def play(env: Environment, seed: int, steps: int = 15) -> list[Any]:
    generator = np.random.default_rng(0)
    feature = env.spec["action"]
    first = env.reset(seed)
    found: list[Any] = [first]
    for _ in range(steps):
        if feature.classes is not None:
            action: Any = generator.integers(feature.classes)
        elif feature.shape == (14,):
            action = first["observation.state"] + 0.02 * generator.standard_normal(14)
        else:
            action = 100 * generator.random(feature.shape)
        outcome = env.step(np.asarray(action))
        found.append(outcome.observation)
        if outcome.done:
            break
    return found


def require_repeatable(env: Environment) -> None:
    first = play(env, 3)
    play(env, 4)
    again = play(env, 3)
    assert len(first) == len(again)
    for one, other in zip(first, again, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    for name, value in first[0].items():
        assert (value.shape, str(value.dtype)) == (env.spec[name].shape, env.spec[name].dtype)
    env.close()


@pytest.mark.parametrize("name", ["gym:CartPole-v1", "gym:Pendulum-v1"])
def test_a_gymnasium_environment_repeats_itself(name: str) -> None:
    require_repeatable(make_environment(name, render=False))


@pytest.mark.slow
@pytest.mark.parametrize("observe", ["keypoints", "pose", "pixels"])
def test_pusht_repeats_itself(observe: str) -> None:
    env = make_environment("pusht", observe=observe)
    assert env.task.startswith("Push the T")
    assert (env.fps, env.max_steps) == (10.0, 300)
    require_repeatable(env)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["transfer-cube", "insertion"])
def test_aloha_repeats_itself_with_and_without_a_camera(task: str) -> None:
    require_repeatable(make_environment(f"aloha/{task}"))
    seeing = make_environment(f"aloha/{task}", cameras=["top"], height=48, width=64)
    assert seeing.reset(0)["observation.images.top"].shape == (48, 64, 3)
    assert seeing.render().shape == (240, 320, 3)
    seeing.close()


def test_discrete_and_continuous_actions_are_told_apart() -> None:
    assert make_environment("gym:CartPole-v1", render=False).spec["action"] == Feature((), "int64", "action", classes=2)
    bounds = {"min": [-2.0], "max": [2.0]}
    torque = Feature((1,), "float32", "action", stats=bounds)
    assert make_environment("gym:Pendulum-v1", render=False).spec["action"] == torque


def test_success_may_be_a_sum_of_rewards() -> None:
    env = make_environment("gym:CartPole-v1", render=False, success_return=3.0)
    env.reset(0)
    outcomes = [env.step(np.array(0)) for _ in range(3)]
    assert [(one.success, one.terminated) for one in outcomes] == [(False, False), (False, False), (True, True)]


def test_episodes_are_truncated_where_asked() -> None:
    env = make_environment("gym:Pendulum-v1", render=False, max_steps=2)
    env.reset(0)
    assert [env.step(np.zeros(1)).truncated for _ in range(2)] == [False, True]


def test_a_dictionary_of_observations_is_sorted_by_what_it_holds() -> None:
    class Room(gymnasium.Env):  # type: ignore[misc,name-defined]
        observation_space = gymnasium.spaces.Dict({
            "agent_pos": gymnasium.spaces.Box(-1, 1, (2,)),
            "things": gymnasium.spaces.Box(-1, 1, (2, 2)),
            "goal": gymnasium.spaces.Box(-1, 1, (1,)),
            "top": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8),
        })  # fmt: skip
        action_space = gymnasium.spaces.Box(-1, 1, (2,))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            return self.observation_space.sample(), 0.0, False, False, {"is_success": True}

    gymnasium.register("EtudeRoom-v0", Room, max_episode_steps=5)
    env = make_environment("gym:EtudeRoom-v0", render=False)
    shapes = {name: (feature.shape, feature.role) for name, feature in env.spec.features.items()}
    assert shapes == {
        "observation.state": ((2,), "state"),
        "observation.environment_state": ((5,), "environment"),
        "observation.images.top": ((8, 8, 3), "image"),
        "action": ((2,), "action"),
    }
    assert env.reset(0)["observation.environment_state"].shape == (5,)
    assert env.step(np.zeros(2)).success


def test_names_are_cut_at_the_first_mark() -> None:
    assert split_name("metaworld/pick-place") == ("metaworld", "pick-place")
    assert split_name("gym:gym_pusht/PushT-v0") == ("gym", "gym_pusht/PushT-v0")
    assert split_name("pusht") == ("pusht", "")


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("gym:Nope-v9", {}, "Nope"),
        ("gym:FrozenLake-v1", {}, "observes Discrete"),
        ("pusht", {"observe": "smell"}, "'keypoints', 'pose' or 'pixels'"),
        ("aloha/transfer-cub", {}, "did you mean 'transfer-cube'"),
        ("aloha/insertion", {"cameras": ["left"]}, "top, angle"),
        ("nowhere/x", {}, "unknown environment 'nowhere'"),
    ],
)
def test_what_cannot_be_made_is_refused_in_words(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(name, **options)


def test_options_follow_from_what_a_policy_was_trained_to_see() -> None:
    vector, image = Feature((16,), role="environment"), Feature((3, 48, 64), "uint8", "image")
    assert options_for("pusht", DataSpec({"x": vector})) == {"observe": "keypoints"}
    assert options_for("pusht", DataSpec({"s": Feature((5,), role="state")})) == {"observe": "pose"}
    assert options_for("pusht", DataSpec({"i": image})) == {"observe": "pixels", "size": 64}
    seen = options_for("aloha/insertion", DataSpec({"observation.images.top": image}))
    assert seen == {"cameras": ["top"], "height": 48, "width": 64}
    assert options_for("gym:X-v0", DataSpec({"i": image})) == {}
