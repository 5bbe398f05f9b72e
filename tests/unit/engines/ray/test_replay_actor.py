"""The replay actor's class without a cluster: what it keeps on disk, what it takes once, and who may play."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
from etude.engines.ray.actors import Actors
from etude.engines.ray.replay import RECENT, EpisodeFacts, ReplayActor
from etude.engines.ray.rollouts import RolloutPlan, RolloutWorker
from etude.engines.ray.state_manager import unwrapped
from etude.errors import DataError
from etude.rollouts.diaries import timed_pool
from etude.rollouts.online import OnlineSettings


def episode(number: int, frames: int = 5) -> dict[str, Any]:
    draw = np.random.default_rng(number)
    return {
        "observation.state": draw.normal(size=(frames, 3)).astype(np.float32),
        "observation.images.head": draw.integers(0, 256, (frames, 3, 4, 4), dtype=np.uint8),
        "action": draw.normal(size=(frames, 2)).astype(np.float32),
        "reward": np.ones(frames, np.float32), "success": np.bool_(number % 2), "terminated": True,
        "last": {"observation.state": np.zeros(3, np.float32)},
    }  # fmt: skip


def drawn(actor: ReplayActor, key: int = 3) -> dict[str, Any]:
    return actor.sample(batch_size=16, key=key, windows={"action": [0, 1, 2]})


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_an_actor_that_is_started_again_has_every_episode(tmp_path: Path) -> None:
    before = ReplayActor(str(tmp_path), sampling="prioritised")
    for number in range(5):
        assert before.add(episode(number), priority=1.0 + number) == number
    assert before.add(None, facts=EpisodeFacts(7, 0.0, 0.0, 3)) == 5, "one that is not kept is counted"
    (tmp_path / ".tmp-000000009.safetensors-1@nowhere").write_bytes(b"half")
    after = ReplayActor(str(tmp_path), sampling="prioritised")
    assert after.size() == before.size() == 25 and after.counts().kept == 5
    assert same(drawn(after), drawn(before))
    transitions = {"batch_size": 8, "key": 1, "transitions": True, "n_step": 3}
    assert same(after.sample(**transitions), before.sample(**transitions)), "what came after the last action too"
    assert after.sample(4)["observation.images.head"].dtype == np.uint8
    found = after.counts()
    assert (found.episodes, found.env_steps, found.begun) == (5, 25, 5)
    assert [one.success for one in found.recent] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert after.add(episode(9)) == 5 and len(list(tmp_path.glob("*.safetensors"))) == 6


def test_an_episode_that_is_sent_again_counts_once_even_after_a_restart(tmp_path: Path) -> None:
    actor = ReplayActor(str(tmp_path))
    assert [actor.add(episode(0), name="a"), actor.add(episode(1), name="b")] == [0, 1]
    assert actor.add(episode(0), name="a") == 0
    actor = ReplayActor(str(tmp_path))
    assert actor.add(episode(1), name="b") == 1 and actor.size() == 10
    assert actor.add(episode(1), name="c") == 2


def test_names_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.engines.ray.replay.MOST_NAMES", 10)
    actor = ReplayActor(max_frames=10)
    for number in range(40):
        actor.add(episode(number), name=str(number))
    assert len(actor._known) <= 12 and len(actor.counts().recent) == RECENT


def test_episodes_that_leave_the_buffer_leave_the_disk(tmp_path: Path) -> None:
    actor = ReplayActor(str(tmp_path), max_frames=12)
    for number in range(6):
        actor.add(episode(number))
    assert [path.stem for path in sorted(tmp_path.iterdir())] == ["000000004", "000000005"]
    assert actor.counts().is_full and actor.most_frames() == 12
    again = ReplayActor(str(tmp_path), max_frames=12)
    assert same(drawn(again), drawn(actor)) and again.counts().episodes == 6


def test_what_is_refused_is_neither_counted_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = ReplayActor(str(tmp_path), max_frames=12)
    with pytest.raises(DataError, match=r"13 frames .* is larger than the replay buffer"):
        actor.add(episode(0, frames=13), name="long")
    assert actor.counts().episodes == 0 and list(tmp_path.iterdir()) == []

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("etude.engines.ray.replay.write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        actor.add(episode(0), name="a")
    monkeypatch.undo()
    assert actor.add(episode(0), name="a") == 0, "what was not written down was not acknowledged"


def test_an_episode_that_was_damaged_is_told_and_left_out(tmp_path: Path) -> None:
    actor = ReplayActor(str(tmp_path))
    for number in range(3):
        actor.add(episode(number))
    (tmp_path / "000000001.safetensors").write_bytes(b"nonsense")
    found = ReplayActor(str(tmp_path)).counts()
    assert found.kept == 2 and found.episodes == 3
    assert found.troubles[0].startswith(f"{tmp_path}/000000001.safetensors cannot be read and is left out: ")


def test_tensors_and_lists_are_taken_as_arrays() -> None:
    actor = ReplayActor()
    actor.add({"action": torch.ones(4, 2), "reward": [1.0, 0.0, 0.0, 0.0], "success": torch.tensor(True)})
    assert actor.sample(batch_size=3)["action"].tolist() == [[1.0, 1.0]] * 3
    assert actor.counts().recent == (EpisodeFacts(4, 1.0, 1.0),)


class Climber(nn.Module):
    """Acts by following a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def select_action(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.enable_grad():
            action = torch.zeros(1, 1, requires_grad=True)
            (self.net(observation["observation.state"]).sum() * action.sum()).backward()
        assert action.grad is not None
        return action.grad


def test_a_policy_that_differentiates_while_it_acts_can_be_rolled_out() -> None:
    settings = OnlineSettings("gym:Pendulum-v1", keep="all", options={"max_steps": 5})
    worker = RolloutWorker(0, [], Actors(None, None), None, {})
    worker._plan = RolloutPlan(Climber(), settings)
    worker._pool = timed_pool(settings.env, dict(settings.options), None)
    found = [worker._play_one(worker._plan.policy, number) for number in range(2)]
    assert [len(episodes[0]["reward"]) for episodes in found] == [5, 5]
    assert np.abs(found[0][0]["action"]).max() > 0
    worker._pool.close()


def test_workers_play_as_many_as_are_allowed_and_a_lost_one_gives_up_its_claim() -> None:
    actor = ReplayActor(allowed=0)
    assert actor.claim(0) == -1
    actor.allow(2)
    assert [actor.claim(0), actor.claim(1), actor.claim(2)] == [0, 1, -1]
    assert actor.claim(1) == 2, "its first was lost with it"
    actor.add(episode(0), worker=0)
    assert actor.claim(0) == -1, "one is there and one is being played"
    actor.allow(None)
    assert actor.claim(0) == -1
    rows, played = actor.draw({"batch_size": 3}, [1, 2], 3)
    assert len(rows["action"]) == 6 and played.episodes == 1
    assert actor.claim(0) == 3


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"module.a": 1, "module.b": 2}, {"a": 1, "b": 2}),
        ({"module._orig_mod.a": 1}, {"a": 1}),
        ({"module.a": 1, "head": 2}, {"module.a": 1, "head": 2}),
        ({"encoder": {"module.w": 1}, "decoder": {"w": 2}}, {"encoder": {"w": 1}, "decoder": {"w": 2}}),
        ({}, {}),
    ],
)
def test_weights_have_the_names_of_the_policy_itself(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert unwrapped(given) == expected
