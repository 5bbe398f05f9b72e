"""The planner for PushT: it solves what it is given, finds ways around the block, and records what is seen later."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from etude.simulation.environments import make_environment
from etude.simulation.environments.base import HasExpert

pytest.importorskip("gym_pusht")
geometry = pytest.importorskip("shapely.geometry")

SOLVED_SOON = 11  # the seed of an episode that takes some 80 steps


def solve(seed: int) -> tuple[bool, list[np.ndarray]]:
    env = make_environment("pusht")
    assert isinstance(env, HasExpert)
    env.reset(seed)
    actions = []
    for _ in range(env.max_steps):
        actions.append(env.expert_action())
        outcome = env.step(actions[-1])
        if outcome.done:
            break
    env.close()
    return outcome.success, actions


def test_it_pushes_the_block_onto_its_outline_in_the_same_way_each_time() -> None:
    success, actions = solve(SOLVED_SOON)
    assert success
    assert all(action.shape == (2,) and action.dtype == np.float32 for action in actions)
    assert np.min(actions) > 0 and np.max(actions) < 512
    again = solve(SOLVED_SOON)
    assert again[0] and np.array_equal(actions, again[1])


@pytest.mark.slow
def test_it_solves_whatever_comes() -> None:
    solved = [solve(seed)[0] for seed in range(12)]
    assert sum(solved) >= 11


def test_an_episode_forgets_the_plan_of_the_one_before() -> None:
    env = make_environment("pusht")
    assert isinstance(env, HasExpert)
    env.reset(SOLVED_SOON)
    first = env.expert_action()
    env.reset(SOLVED_SOON + 1)
    for _ in range(10):
        env.step(env.expert_action())
    env.reset(SOLVED_SOON)
    assert np.array_equal(env.expert_action(), first)
    env.close()


def test_the_way_goes_around_the_block() -> None:
    from etude.simulation.environments.pusht_planner import find_way

    obstacle = geometry.box(200, 100, 300, 400)
    way = find_way(obstacle, (100.0, 250.0), (400.0, 250.0))
    assert way is not None and len(way) > 1 and way[-1] == (400.0, 250.0)
    for one, other in pairwise([(100.0, 250.0), *way]):
        assert geometry.LineString([one, other]).intersection(obstacle).length < 1.0
    length = sum(math.dist(one, other) for one, other in pairwise([(100.0, 250.0), *way]))
    assert 2 * math.dist((100, 250), (200, 100)) + 100 <= length < 480
    assert find_way(obstacle, (100.0, 250.0), (150.0, 250.0)) == [(150.0, 250.0)]
    assert find_way(obstacle, (100.0, 250.0), (250.0, 250.0)) is None


def test_a_finger_that_touches_the_block_first_steps_back() -> None:
    from etude.simulation.environments.pusht_planner import find_way

    way = find_way(geometry.box(200, 100, 300, 400), (205.0, 250.0), (100.0, 250.0))
    assert way is not None and way[0] == pytest.approx((199.0, 250.0)) and way[-1] == (100.0, 250.0)


def test_the_table_of_the_planner_is_that_of_the_environment() -> None:
    """A push, tried by the planner and done by the finger, ends at the same pose."""
    from etude.simulation.environments.pusht_planner import PushTPlanner

    env = make_environment("pusht", observe="pose")
    env.reset(SOLVED_SOON)
    scene = env._env.unwrapped  # type: ignore[attr-defined]
    planner = PushTPlanner(scene.goal_pose)

    def pose() -> tuple[float, float, float]:
        return (*scene.block.position, scene.block.angle)

    env.step(planner.act(tuple(scene.agent.position), pose(), tuple(scene.agent.velocity)))
    push = planner._push
    assert push is not None
    start = planner._table.centre_of(pose())
    for _ in range(60):
        if math.dist(scene.agent.position, push.end) < 1.0:
            break
        env.step(planner.act(tuple(scene.agent.position), pose(), tuple(scene.agent.velocity)))
    end = planner._table.centre_of(pose())
    moved, missed = planner._distance(start, push.pose), planner._distance(end, push.pose)
    assert missed < 0.2 * moved
    env.close()


def test_the_steps_of_a_push_are_alike_and_end_where_they_should() -> None:
    """The finger does not slow down towards the end of a push, which would teach to stop there."""
    from etude.simulation.environments.pusht_planner import PushTPlanner

    env = make_environment("pusht")
    env.reset(SOLVED_SOON)
    scene = env._env.unwrapped  # type: ignore[attr-defined]
    planner = PushTPlanner(scene.goal_pose)
    push, places = None, []
    for _ in range(60):
        block = (*scene.block.position, scene.block.angle)
        action = planner.act(tuple(scene.agent.position), block, tuple(scene.agent.velocity))
        if push is not None and planner._push is not push:
            break
        push = planner._push
        if not planner._way:
            places.append(tuple(scene.agent.position))
        env.step(action)
    assert push is not None and len(places) > 3
    steps = [math.dist(*pair) for pair in pairwise([*places, tuple(scene.agent.position)])][1:]
    assert max(steps) <= 10.5 and max(steps) - min(steps) < 1.0
    assert math.dist(scene.agent.position, push.end) < 1.0
    env.close()


def test_a_finger_pushed_aside_makes_another_plan() -> None:
    from etude.simulation.environments.pusht_planner import PushTPlanner

    env = make_environment("pusht")
    env.reset(SOLVED_SOON)
    scene = env._env.unwrapped  # type: ignore[attr-defined]
    block = (*scene.block.position, scene.block.angle)
    planner = PushTPlanner(scene.goal_pose)
    planner.act(tuple(scene.agent.position), block, (0.0, 0.0))
    first = planner._push
    assert first is not None
    for place in [*planner._way]:
        planner.act(place, block, (0.0, 0.0))
    assert planner._push is first and not planner._way
    (ax, ay), (bx, by) = first.start, first.end
    length = math.dist(first.start, first.end)
    planner.act((ax + 12 * (by - ay) / length, ay - 12 * (bx - ax) / length), block, (0.0, 0.0))
    assert planner._push is not first
    env.close()


def test_noise_moves_the_finger_and_the_plan_without_noise_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from etude.data.lerobot.reader import LeRobotDataset
    from etude.simulation.record import Noise, record
    from etude.simulation.seeds import episode_seed

    noise = Noise(40.0, rate=0.04, steps=3)
    record("pusht", tmp_path / "d", episodes=1, noise=noise)
    columns = LeRobotDataset(tmp_path / "d", show_progress=False).source.columns
    recorded, fingers = np.asarray(columns["action"]), np.asarray(columns["observation.state"])
    env = make_environment("pusht")
    assert isinstance(env, HasExpert)
    seed = episode_seed(0, "train", 0)
    finger, disturb, disturbed = env.reset(seed)["observation.state"], noise.of_episode(seed), 0
    for step, label in enumerate(recorded):
        action = env.expert_action()
        assert np.array_equal(action, label) and np.array_equal(finger, fingers[step])
        executed = disturb(action)
        disturbed += not np.array_equal(executed, action)
        outcome = env.step(executed)
        finger = outcome.observation["observation.state"]
    assert outcome.success and disturbed >= 3
    env.close()


def test_what_is_recorded_is_what_a_policy_sees_later(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from etude.data.lerobot.reader import LeRobotDataset
    from etude.simulation.record import record

    done = record("pusht", tmp_path / "d", episodes=1)
    dataset = LeRobotDataset(tmp_path / "d", show_progress=False)
    shown = make_environment("pusht").spec.features
    assert done.episodes == 1
    columns = dataset.source.columns
    for name, feature in shown.items():
        assert np.asarray(columns[name][0]).shape == feature.shape
        assert np.abs(np.asarray(columns[name])).max() <= 600
