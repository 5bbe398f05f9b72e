"""Recording: clean actions, only successes, and a dataset that does not depend on interruptions."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.data.lerobot.reader import LeRobotDataset
from etude.errors import ConfigError, DataError
from etude.simulation import ahead
from etude.simulation.journal import JOURNAL_NAME, Journal
from etude.simulation.record import Noise, record
from tests.processes import reap, spawn

pytest.importorskip("gymnasium")
pytest.importorskip("pyarrow")
POLE = "gym:CartPole-v1"
OPTIONS = {"render": False, "success_return": 15.0, "max_steps": 40}


def balance(observation: dict[str, Any]) -> Any:
    """Keep the pole up for a while."""
    state = observation["observation.state"]
    return np.array(int(state[2] + 0.3 * state[3] > 0))


def stumble(observation: dict[str, Any]) -> Any:
    """Succeed about half of the time."""
    return np.array(int(observation["observation.state"][3] > 0.8))


def make(root: Path, episodes: int = 4, **more: Any) -> Any:
    return record(POLE, root, **{"episodes": episodes, "policy": balance, "options": OPTIONS, **more})


def content(root: Path) -> dict[str, Any]:
    dataset = LeRobotDataset(root, show_progress=False)
    return {name: np.asarray(column) for name, column in dataset.source.columns.items()}


def same(one: Path, other: Path) -> bool:
    first, second = content(one), content(other)
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def digest(root: Path) -> str:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_rewards_are_kept_on_request_and_a_recording_goes_on_with_them(tmp_path: Path) -> None:
    make(tmp_path / "d", episodes=2, rewards=True)
    make(tmp_path / "d", rewards=True)
    columns = content(tmp_path / "d")
    np.testing.assert_array_equal(columns["next.reward"], np.ones((len(columns["action"]), 1), np.float32))
    with pytest.raises(DataError, match="rewards"):
        make(tmp_path / "d", episodes=6)
    make(tmp_path / "without")
    assert "next.reward" not in content(tmp_path / "without")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"policy": stumble}, {"policy": stumble, "keep_failures": True, "rewards": True}])
def test_processes_record_what_one_does(tmp_path: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where attempts fail, where there are more rounds than one, and where a recording goes on."""
    monkeypatch.setattr(ahead, "ROUND", 2)
    names = [POLE, "gym:CartPole-v0"]
    alone = record(names, tmp_path / "alone", episodes=5, options=OPTIONS, workers=0, **more)
    record(names, tmp_path / "many", episodes=2, options=OPTIONS, workers=2, **more)
    many = record(names, tmp_path / "many", episodes=5, options=OPTIONS, workers=3, **more)
    assert (many.episodes, many.frames, many.attempts) == (alone.episodes, alone.frames, alone.attempts)
    assert more.get("keep_failures") or many.attempts > many.episodes
    assert same(tmp_path / "alone", tmp_path / "many")
    journals = [json.loads((tmp_path / name / JOURNAL_NAME).read_text()) for name in ("alone", "many")]
    assert journals[0] == journals[1]


def test_processes_that_see_no_success_give_up_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="20 attempts in a row failed"):
        make(tmp_path / "d", policy=stumble, options={**OPTIONS, "success_return": 1e9}, workers=2)
    with pytest.raises(ConfigError, match="workers must not be negative"):
        make(tmp_path / "e", workers=-1)


def test_what_is_recorded_can_be_read_and_trained_on(tmp_path: Path) -> None:
    done = make(tmp_path / "d")
    assert (done.episodes, done.attempts) == (4, 4)
    dataset = LeRobotDataset(tmp_path / "d", show_progress=False)
    assert dataset.num_episodes == 4
    assert len(dataset) == done.frames
    assert dataset.tasks == ["CartPole-v1"]
    assert dataset.fps == 50.0


def test_the_same_call_makes_the_same_files(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    make(tmp_path / "c", seed=1)
    assert not same(tmp_path / "a", tmp_path / "c")


def test_recording_again_adds_what_is_missing_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path / "a", 6)
    make(tmp_path / "b", 2)
    assert make(tmp_path / "b", 2).env_steps == 0
    make(tmp_path / "b", 6)
    assert same(tmp_path / "a", tmp_path / "b")


def test_only_successes_are_kept_and_failures_are_counted(tmp_path: Path) -> None:
    done = make(tmp_path / "a", 5, policy=stumble)
    journal = json.loads((tmp_path / "a" / JOURNAL_NAME).read_text())
    assert done.attempts == 5 + len(journal["failed"]) > 5
    assert not set(journal["kept"]) & {attempt for _, attempt in journal["failed"]}
    make(tmp_path / "b", 5, policy=stumble, keep_failures=True)
    lengths = LeRobotDataset(tmp_path / "b", show_progress=False).source.episodes.lengths
    assert min(lengths) < 15 <= max(lengths)


@pytest.mark.slow
def test_a_recording_killed_at_any_moment_goes_on_to_the_same_dataset(tmp_path: Path) -> None:
    make(tmp_path / "whole", 6, policy=stumble)
    for kill_at in (1, 2, 4):
        root = tmp_path / f"killed-{kill_at}"

        def die(saved: int, attempts: int, root: Path = root, kill_at: int = kill_at) -> None:
            if saved == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        codes = reap(spawn(lambda root=root, die=die: make(root, 6, policy=stumble, on_episode=die)))  # type: ignore[misc]
        assert codes == [-signal.SIGKILL]
        make(root, 6, policy=stumble)
        assert same(tmp_path / "whole", root)
        assert json.loads((root / JOURNAL_NAME).read_text()) == json.loads(
            (tmp_path / "whole" / JOURNAL_NAME).read_text()
        )


def test_an_episode_that_was_noted_but_not_saved_is_tried_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"x": 1}, 0)
    journal.fail(0, 0)
    journal.keep(1)
    again = Journal(tmp_path, {"x": 1}, saved=0)
    assert again.kept == []
    assert again.next_attempt(0, 1) == 1
    assert Journal(tmp_path, {"x": 1}, saved=1).next_attempt(0, 1) == 2


def test_other_settings_do_not_mix(tmp_path: Path) -> None:
    make(tmp_path / "a", 2)
    with pytest.raises(DataError, match="recorded with seed=0, not 7"):
        make(tmp_path / "a", 3, seed=7)
    (tmp_path / "a" / JOURNAL_NAME).unlink()
    with pytest.raises(DataError, match="2 were not recorded by this command"):
        make(tmp_path / "a", 3)


def test_a_policy_that_never_succeeds_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="20 attempts in a row failed"):
        make(tmp_path / "a", policy=lambda _: np.array(0))


def test_environments_take_turns_and_may_be_extended(tmp_path: Path) -> None:
    def push(observation: Any) -> Any:
        return np.array([0.5])

    names = ["gym:Pendulum-v1", "gym:Pendulum-v1"]
    options = {"render": False, "max_steps": 5}
    arguments: dict[str, Any] = {"policy": push, "options": options, "keep_failures": True}
    assert record(names, tmp_path / "a", episodes=2, **arguments).episodes == 4
    assert record(names, tmp_path / "a", episodes=3, **arguments).episodes == 6
    with pytest.raises(ConfigError, match="differ in rate or features"):
        record(["gym:Pendulum-v1", "gym:MountainCarContinuous-v0"], tmp_path / "b", episodes=2, **arguments)


@pytest.mark.parametrize(
    "wrong",
    [{"scale": -0.1}, {"share": 1.5}, {"scale": float("nan")}, {"rate": -0.1}, {"rate": 2.0}, {"steps": 0}],
)
def test_impossible_noise_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="noise needs"):
        Noise(**wrong)


def test_noise_is_a_function_of_the_episode() -> None:
    zeros = np.zeros(3)
    assert np.array_equal(Noise(0.5).of_episode(3)(zeros), Noise(0.5).of_episode(3)(zeros))
    assert not np.array_equal(Noise(0.5).of_episode(3)(zeros), Noise(0.5).of_episode(4)(zeros))
    assert np.array_equal(Noise(0.0).of_episode(3)(zeros), zeros)
    noisy = sum(bool(Noise(0.5, 0.25).of_episode(seed)(zeros).any()) for seed in range(400))
    assert 70 < noisy < 130


def test_noise_may_begin_now_and_then_and_hold() -> None:
    disturb, again = (Noise(0.5, rate=0.1, steps=3).of_episode(7) for _ in range(2))
    seen = np.array([disturb(np.zeros(2)) for _ in range(3000)])
    assert np.array_equal(seen, [again(np.zeros(2)) for _ in range(3000)])
    values, counts = np.unique(seen, axis=0, return_counts=True)
    quiet = (values == 0).all(axis=1)
    assert 0.7 < counts[quiet].item() / len(seen) < 0.84  # nine quiet steps or so for every three
    assert np.sum(counts[~quiet] != 3) <= 1  # the last is cut short
    assert values[~quiet].std() == pytest.approx(0.5, abs=0.05)


def test_a_recording_does_not_go_on_with_other_noise(tmp_path: Path) -> None:
    assert Noise(0.1, 0.5).describe() == [0.1, 0.5]
    make(tmp_path / "d", noise=Noise(0.1, rate=0.2, steps=3))
    make(tmp_path / "d", 5, noise=Noise(0.1, rate=0.2, steps=3))
    with pytest.raises(DataError, match="recorded with noise="):
        make(tmp_path / "d", 6, noise=Noise(0.1, rate=0.2, steps=4))


@pytest.mark.slow
def test_noise_moves_the_robot_but_not_the_recorded_action(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    from etude.simulation.environments.metaworld import MetaWorld

    record("metaworld/reach", tmp_path / "clean", episodes=2)
    record("metaworld/reach", tmp_path / "noisy", episodes=2, noise=Noise(0.5))
    assert not same(tmp_path / "clean", tmp_path / "noisy")
    noisy = content(tmp_path / "noisy")
    assert np.abs(noisy["action"]).max() <= 1.0
    expert = MetaWorld("reach")
    expert.reset(0)
    for state, action in zip(noisy["observation.state"][:20], noisy["action"][:20], strict=True):
        expert._raw = state.astype(np.float64)
        np.testing.assert_allclose(expert.expert_action(), action, atol=1e-5)


@pytest.mark.slow
def test_cameras_are_recorded_as_the_environment_sees_them(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    options = {"cameras": ["corner2"], "size": 48}
    record("metaworld/reach", tmp_path / "d", episodes=1, options=options, images="image")
    dataset = LeRobotDataset(tmp_path / "d", show_progress=False, cache_dir=tmp_path / "cache")
    from etude.simulation.environments import make_environment
    from etude.simulation.seeds import episode_seed

    env = make_environment("metaworld/reach", **options)
    first = env.reset(episode_seed(0, "train", 0))["observation.images.corner2"]
    recorded = dataset[0]["observation.images.corner2"].numpy()
    assert np.array_equal(recorded, first.transpose(2, 0, 1))
    env.close()
