"""Meta-World: 50 tasks with experts, and episodes that are functions of their seed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from etude.errors import ConfigError
from etude.simulation.environments import make_environment, options_for
from etude.simulation.environments.metaworld import STATE_NAMES, MetaWorld, require_task
from etude.simulation.environments.metaworld_tasks import TASKS
from etude.simulation.environments.quick_sawyer import PlainRotation
from etude.types import DataSpec, Feature

# Importing and compiling the simulator alone takes more than a second.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("metaworld") is None, reason="needs etude[sim]")]


def play(env: MetaWorld, seed: int, steps: int = 50, noise: float = 0.3) -> list[Any]:
    """Act like the expert with noise; return everything that comes of it."""
    generator = np.random.default_rng(seed)
    found: list[Any] = [env.reset(seed)]
    for _ in range(steps):
        outcome = env.step(env.expert_action() + noise * generator.standard_normal(4))
        found.append((outcome.observation, outcome.reward, outcome.success))
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def test_there_are_fifty_tasks_with_words_of_their_own() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    assert {f"{name}-v3" for name in TASKS} == set(ALL_V3_ENVIRONMENTS)
    assert len(TASKS) == len(set(TASKS.values())) == 50


@pytest.mark.parametrize("task", ["pick-place", "door-open", "peg-insert-side", "soccer", "stick-pull"])
def test_an_episode_is_a_function_of_its_seed(task: str) -> None:
    env = MetaWorld(task)
    fresh = play(env, 7)
    play(env, 1)
    np.random.seed(5)  # Meta-World draws from the global generator unless it is kept from doing so
    assert equal(play(env, 7), fresh)
    assert equal(play(MetaWorld(f"{task}-v3"), 7), fresh)
    assert not equal(play(env, 8), fresh)


@pytest.mark.parametrize("task", ["pick-place", "drawer-open", "lever-pull", "basketball"])
def test_the_quick_simulator_gives_the_numbers_of_the_original(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.spatial.transform import Rotation

    quick = MetaWorld(task)
    expected = play(quick, 3)
    slow = MetaWorld(task)
    kind = type(slow._env)
    original = kind.__mro__[1]
    for name in ("_reset_hand", "touching_object"):
        monkeypatch.setattr(kind, name, getattr(original, name))
    if hasattr(sys.modules[original.__module__], "Rotation"):
        monkeypatch.setattr(sys.modules[original.__module__], "Rotation", Rotation)
    assert equal(play(slow, 3), expected)


def test_quaternions_are_scipys() -> None:
    from scipy.spatial.transform import Rotation

    for seed in range(200):
        matrix = Rotation.random(rng=seed).as_matrix()
        quaternion = PlainRotation.from_matrix(matrix).as_quat()
        np.testing.assert_allclose(quaternion, Rotation.from_matrix(matrix).as_quat(), atol=1e-15)


def test_the_goal_is_seen_and_moves_with_the_seed() -> None:
    env = MetaWorld("pick-place")
    goals = {tuple(env.reset(seed)["observation.state"][-3:]) for seed in range(5)}
    assert len(goals) == 5
    assert (0.0, 0.0, 0.0) not in goals
    outcome = env.step(np.zeros(4))
    assert tuple(outcome.observation["observation.state"][-3:]) in goals


def test_what_is_seen_is_what_the_spec_says() -> None:
    env = MetaWorld("drawer-open", cameras=["corner2", "gripperPOV"], size=48)
    seen = env.reset(0)
    assert list(seen) == ["observation.state", "observation.images.corner2", "observation.images.gripperPOV"]
    for name, value in seen.items():
        assert (value.shape, str(value.dtype)) == (env.spec[name].shape, env.spec[name].dtype)
    assert env.spec["observation.state"].names == STATE_NAMES
    assert len(STATE_NAMES) == 39
    assert env.spec["action"].shape == (4,)
    again = MetaWorld("drawer-open", cameras=["corner2", "gripperPOV"], size=48).reset(0)
    assert equal(seen, again)
    assert env.render().shape == (240, 320, 3)
    env.close()


def test_pictures_stand_upright() -> None:
    """The table is below the wall: brown at the bottom of the picture, grey at the top."""
    env = MetaWorld("reach", render_camera="corner4", render_height=64, render_width=64)
    env.reset(0)
    picture = env.render().astype(int)
    redness = (picture[..., 0] - picture[..., 2]).mean(axis=1)
    assert redness[48:].mean() > redness[:8].mean() + 10
    env.close()


def test_success_ends_an_episode_and_time_truncates_it() -> None:
    env = MetaWorld("reach")
    env.reset(0)
    for _ in range(200):
        outcome = env.step(env.expert_action())
        if outcome.done:
            break
    assert (outcome.success, outcome.terminated, outcome.truncated) == (True, True, False)
    for steps, said in (("many", "expected a whole number"), (0, "at least 1, got 0"), (-3, "at least 1, got -3")):
        with pytest.raises(ConfigError, match=f"metaworld: max_steps.*{said}"):
            make_environment("metaworld/reach", max_steps=steps)
    short = MetaWorld("reach", max_steps=3)
    short.reset(0)
    outcomes = [short.step(np.zeros(4)) for _ in range(3)]
    assert [one.truncated for one in outcomes] == [False, False, True]


def test_actions_beyond_the_bounds_are_clipped() -> None:
    env = MetaWorld("reach")
    env.reset(0)
    far = env.step(np.full(4, 100.0)).observation
    env.reset(0)
    assert equal(env.step(np.ones(4)).observation, far)


def test_wrong_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'pick-place'"):
        require_task("pick-plce")
    with pytest.raises(ConfigError, match="did you mean 'corner2'"):
        make_environment("metaworld/reach", cameras=["corner22"])
    with pytest.raises(ConfigError, match="did you mean 'cameras'"):
        make_environment("metaworld/reach", camera=["corner2"])
    with pytest.raises(ConfigError, match="metaworld/NAME"):
        make_environment("metaworld")


def test_options_follow_from_what_a_policy_was_trained_to_see() -> None:
    state, image = Feature((39,), role="state"), Feature((3, 84, 84), "uint8", "image")
    assert options_for("metaworld/reach", DataSpec({"observation.state": state})) == {}
    spec = DataSpec({"observation.images.corner": image, "observation.images.topview": image})
    assert options_for("metaworld/reach", spec) == {"cameras": ["corner", "topview"], "size": 84}
    blind = DataSpec({"observation.state": Feature((8,), role="state")})
    assert options_for("metaworld/reach", blind) == {"state": "hand"}


def test_the_hand_alone_may_be_the_state() -> None:
    whole, hand = MetaWorld("drawer-open"), MetaWorld("drawer-open", state="hand")
    everything, some = play(whole, 0), play(hand, 0)
    assert hand.spec["observation.state"].names == (
        "hand_x", "hand_y", "hand_z", "gripper",
        "previous_hand_x", "previous_hand_y", "previous_hand_z", "previous_gripper",
    )  # fmt: skip
    for one, other in zip(everything[1:], some[1:], strict=True):
        full, part = one[0]["observation.state"], other[0]["observation.state"]
        assert np.array_equal(part, full[[0, 1, 2, 3, 18, 19, 20, 21]])
    with pytest.raises(ConfigError, match="full, hand or relative"):
        MetaWorld("reach", state="half")  # type: ignore[arg-type]


def test_the_state_may_tell_where_things_are_from_the_hand() -> None:
    whole, related = MetaWorld("peg-insert-side"), MetaWorld("peg-insert-side", state="relative")
    names = related.spec["observation.state"].names or ()
    for one, other in zip(play(whole, 0)[1:], play(related, 0)[1:], strict=True):
        full, more = one[0]["observation.state"], dict(zip(names, other[0]["observation.state"], strict=True))
        assert [more[name] for name in names[:39]] == full.tolist()
        for axis in "xyz":
            for thing, origin in (("object", "hand"), ("goal", "hand"), ("goal", "object")):
                between = more[f"{thing}_{axis}"] - more[f"{origin}_{axis}"]
                assert more[f"{thing}_from_{origin}_{axis}"] == pytest.approx(between, abs=1e-6)
    spec = DataSpec({"observation.state": Feature((51,), role="state")})
    assert options_for("metaworld/reach", spec) == {"state": "relative"}


def test_the_experts_mostly_succeed() -> None:
    from etude.simulation.evaluate import evaluate_policy

    names = ["metaworld/button-press", "metaworld/hammer", "metaworld/plate-slide-back-side"]
    assert evaluate_policy("expert", names, episodes=4).success == 1.0
