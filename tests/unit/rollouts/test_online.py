"""Learning from what is played: exact shares, exact resumes with the buffer, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude import Trainer, TrainingConfiguration
from etude.algorithms import BehaviorCloning
from etude.data import ReplayBuffer, Windows
from etude.errors import ConfigError, DataError, RolloutError
from etude.policies import MLP, ActorCritic
from etude.registry import ENVIRONMENT_REGISTRY
from etude.rollouts.online import OnlineData, OnlineSettings
from etude.rollouts.playing import FIRST_START, play_episodes
from etude.rollouts.rounds import pack, unpack
from etude.runs.checkpoint import CheckpointStore
from etude.simulation.environments.base import Array
from etude.simulation.evaluate import evaluate_policy
from etude.simulation.seeds import episode_seed
from etude.types.names import ACTION, STATE
from tests.callbacks import DieAt, KeepRows
from tests.crash.harness import compare, differs
from tests.processes import reap, run_ranks, spawn
from tests.unit.simulation.point_reach import PointReach, faults


class GuidedPoint(PointReach):
    """A point with an expert, which goes straight to the goal."""

    def expert_action(self) -> Array:
        return np.clip(5.0 * (self.goal - self.point), -1, 1).astype(np.float32)


@pytest.fixture(autouse=True)
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "point_reach", PointReach)
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "guided_point", GuidedPoint)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(episode: int) -> int:
    """Return the seed of an episode that is played."""
    return episode_seed(0, "train", FIRST_START + episode)


def demonstrations(episodes: int = 2, chunk: int = 1) -> Windows:
    """Return what the expert does in a few episodes that nobody else plays."""
    env, seen, done, ends = GuidedPoint(), [], [], []
    for number in range(episodes):
        observation, over = env.reset(episode_seed(0, "train", number)), False
        while not over:
            seen.append(observation[STATE])
            done.append(env.expert_action())
            outcome = env.step(done[-1])
            observation, over = outcome.observation, outcome.done
        ends.append(len(seen))
    return Windows({STATE: np.stack(seen), ACTION: np.stack(done)}, ends, {ACTION: range(chunk)})


def online(data: Any = "two", share: float | None = 0.5, buffer: Any = None, **settings: Any) -> OnlineData:
    data = demonstrations() if isinstance(data, str) else data
    given = {"env": "guided_point", "label": "expert", "episodes_per_round": 2, "updates_per_round": 3}
    given |= {"warmup_episodes": 3, **settings}
    return OnlineData(data, OnlineSettings(**given), share=share, buffer=buffer)


def make(data: Any, run: Any = False, callbacks: Any = (), policy: Any = None, **config: Any) -> Trainer:
    settings = {"lr": 3e-3, "batch_size": 8, "training_steps": 7, "log_every": 1}
    return Trainer(
        policy or MLP(hidden=[16]), data, BehaviorCloning(), config=TrainingConfiguration(**{**settings, **config}),
        run=run, loggers=[], callbacks=callbacks, show_progress=False,
    )  # fmt: skip


# -- playing -----------------------------------------------------------------------------------------------------------


def built(policy: Any = None) -> Any:
    policy = policy or MLP(hidden=[8])
    torch.manual_seed(0)
    policy.build(demonstrations().spec)
    return policy


def test_an_episode_holds_what_was_seen_and_what_the_expert_would_have_done_there() -> None:
    policy = built()
    (episode,) = play_episodes(policy, "guided_point", [5], label="expert")
    env = GuidedPoint()
    observation = env.reset(start(5))
    for frame in range(len(episode["reward"])):
        np.testing.assert_array_equal(episode[STATE][frame], observation[STATE])
        np.testing.assert_array_equal(episode[ACTION][frame], env.expert_action())
        with torch.no_grad():
            own = policy.select_action({STATE: torch.from_numpy(observation[STATE])[None]})[0].numpy()
        outcome = env.step(own)  # the policy acts, the expert only speaks
        observation = outcome.observation
        assert episode["reward"][frame] == pytest.approx(outcome.reward)
    np.testing.assert_array_equal(episode["last"][STATE], observation[STATE])
    assert outcome.done and episode["terminated"] == outcome.terminated and episode["episode"] == 5


def test_the_expert_acts_less_and_less_and_noise_is_on_what_is_executed() -> None:
    policy = built()
    alone = play_episodes(policy, "guided_point", range(6), label="expert", expert_share=lambda _: 1.0)
    assert all(episode["success"] and len(episode["reward"]) < 15 for episode in alone)
    mixed = play_episodes(policy, "guided_point", range(6), label="expert", expert_share=lambda n: 1.0 - n / 6)
    lengths = [len(episode["reward"]) for episode in mixed]
    assert lengths[0] == len(alone[0]["reward"]) and sum(lengths) > sum(len(one["reward"]) for one in alone)
    own = play_episodes(policy, "guided_point", [1], label="own")[0]
    noisy = play_episodes(policy, "guided_point", [1], label="own", noise=0.5)[0]
    again = play_episodes(policy, "guided_point", [1], label="own", noise=0.5)[0]
    np.testing.assert_array_equal(noisy[ACTION], again[ACTION])
    width = policy.normalizer.get_buffer("action__width").numpy()
    assert 0.01 < np.abs((noisy[ACTION][0] - own[ACTION][0]) / width).max() < 2.5
    told = play_episodes(policy, "guided_point", [1], label="expert", noise=0.5)[0]
    goal_side = np.sign(told[STATE][:, 2:])
    assert (np.sign(told[ACTION]) == goal_side).all()  # the words of the expert have none
    counted = play_episodes(policy, "guided_point", [0], label="expert", expert_share=lambda _: 1.0, reward="success")
    assert counted[0]["reward"].tolist() == [0.0] * (len(counted[0]["reward"]) - 1) + [1.0]


def test_noise_holds_for_as_many_steps_as_asked_and_begins_anew_with_an_episode() -> None:
    policy = built()
    for parameter in policy.parameters():  # always the same action, so that the rest is noise
        parameter.data.zero_()
    played = play_episodes(policy, "guided_point", range(2), label="own", noise=0.1, noise_steps=3)
    changes = [np.flatnonzero((np.diff(one[ACTION], axis=0) != 0).any(1)) + 1 for one in played]
    assert all(len(one) and not (one % 3).any() for one in changes)
    assert not np.array_equal(played[0][ACTION][0], played[1][ACTION][0])
    alone = play_episodes(policy, "guided_point", [1], label="own", noise=0.1, noise_steps=3)[0]
    np.testing.assert_array_equal(alone[ACTION], played[1][ACTION])


def test_a_policy_that_draws_its_actions_draws_them() -> None:
    policy = built(ActorCritic(hidden=[8], std=0.3))
    drawn = play_episodes(policy, "guided_point", range(3), seed=4)
    assert [one["episode"] for one in drawn] == [0, 1, 2]
    assert all(np.ptp(one[ACTION], axis=0).min() > 0.2 for one in drawn if len(one["reward"]) > 5)
    again = play_episodes(policy, "guided_point", [1], seed=4)
    np.testing.assert_array_equal(drawn[1][ACTION], again[0][ACTION])


def test_episodes_can_be_sent_as_bytes() -> None:
    episodes = play_episodes(built(), "guided_point", range(2), label="expert")
    back = unpack(pack(episodes))
    assert unpack(pack([])) == [] and len(back) == 2
    for one, other in zip(episodes, back, strict=True):
        assert one.keys() == other.keys() and one["success"] == other["success"]
        assert all((one[name] == other[name]).all() for name in (STATE, ACTION, "reward"))
        assert (one["last"][STATE] == other["last"][STATE]).all()


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_every_batch_holds_exactly_its_share(share: float) -> None:
    data, notes = online(share=share), KeepRows()
    trainer = make(data, callbacks=[notes], training_steps=1)
    trainer.fit()
    data.open(data.place)
    shown = {tuple(row.tolist()) for row in demonstrations().columns[STATE]}
    played = {tuple(row) for row in data.buffer.sample(2000, key=0)[STATE].tolist()}
    assert not shown & played
    for step in range(1, 6):
        (batch,) = data.take(step)
        rows = [tuple(row.tolist()) for row in batch[STATE]]
        assert len(rows) == 8 and sum(row in shown for row in rows) == 8 * (1 - share)
        assert batch[ACTION].shape == (8, 1, 2) and batch["action_is_pad"].shape == (8, 1)
        assert len(data.ids(step)[0]) == 8
    assert notes.rows[0]["train/online/share"] == share


def test_rounds_come_when_they_are_due_and_are_counted() -> None:
    data, notes = online(start_after=2), KeepRows()
    make(data, callbacks=[notes], training_steps=7).fit()
    assert [row.get("train/online/episodes") for row in notes.rows] == [0, 0, 2, 2, 2, 4, 4]
    assert [row["train/online/share"] for row in notes.rows] == [0, 0, *[0.5] * 5]
    last = notes.rows[-1]
    assert last["train/online/buffer_episodes"] == 4 and last["train/online/buffer_frames"] == data.buffer.size()
    assert last["train/online/updates_per_env_step"] == pytest.approx(6 / data.env_steps)
    assert data.env_steps == data.buffer.added and "train/online/success" in last
    assert "train/online/success" not in notes.rows[2]  # the expert had a part in those


def test_own_deeds_are_kept_where_they_succeed() -> None:
    how = {"label": "own", "episodes_per_round": 8, "start_after": 100}
    data, everything = online(demonstrations(3), **how), online(demonstrations(3), keep="all", **how)
    for one in (data, everything):
        make(one, training_steps=104).fit()
        assert one.source.metrics()["online/episodes"][0] == 16
    assert 0 < data.buffer.episodes < 16 and data.buffer.success == 1.0
    assert everything.buffer.episodes == 16 and 0 < everything.buffer.success < 1


@pytest.mark.parametrize("kind", ["expert", "all", "prioritised"])
def test_a_killed_run_resumes_bit_for_bit_with_its_buffer(tmp_path: Path, kind: str) -> None:
    def train(name: str, callbacks: Any = ()) -> None:
        buffer = ReplayBuffer(max_frames=60, sampling="prioritised" if kind == "prioritised" else "uniform")
        label: Any = {"label": "own", "keep": "all", "noise": 0.3} if kind == "all" else {}
        data = online(buffer=buffer, **label)
        make(data, tmp_path / name, callbacks, training_steps=9, save_every=1, keep_last=20, ema_decay=0.9).fit()

    train("whole")
    assert reap(spawn(lambda: train("killed", [DieAt(5)]))) == [-9]
    train("killed")
    assert compare(tmp_path / "killed", tmp_path / "whole") is None
    trees = [CheckpointStore(tmp_path / run / "checkpoints").load("last").tree["data"] for run in ("killed", "whole")]
    assert differs(*trees, "data") is None and trees[0]["buffer"]["frames"].sum() > 20


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    odd = [start(episode) for episode in range(1, 40, 2)]

    def train(run: str, size: int) -> None:
        with faults(seeds=odd[:1]):  # one of them fails
            data = online(demonstrations(chunk=2), episodes_per_round=3)
            policy = MLP(hidden=[16], chunk_size=2)
            make(data, tmp_path / run, policy=policy, batch_size=size, optimizer="sgd", lr=0.05, save_every=7).fit()

    train("alone", 8)
    assert run_ranks(lambda: train("shared", 4), 2) == [0, 0]
    one, other = (CheckpointStore(tmp_path / run / "checkpoints").load("last").tree for run in ("alone", "shared"))
    assert max((one["policy"][key] - other["policy"][key]).abs().max().item() for key in one["policy"]) < 1e-6
    assert one["data"]["played"] == other["data"]["played"] == 8
    assert one["session"]["progress"]["env_steps"] == other["session"]["progress"]["env_steps"]
    buffers = [tree["data"]["buffer"] for tree in (one, other)]
    assert buffers[0]["frames"].tolist() == buffers[1]["frames"].tolist()
    assert (buffers[0]["columns"][STATE] - buffers[1]["columns"][STATE]).abs().max() < 1e-5


def test_a_batch_may_be_cut_in_two() -> None:
    def learn(**config: Any) -> dict[str, torch.Tensor]:
        trainer = make(online(), precision="float64", **config)
        trainer.fit()
        return trainer.policy.state_dict()

    whole, halves = learn(batch_size=8), learn(batch_size=4, gradient_accumulation_steps=2)
    assert max((whole[name] - halves[name]).abs().max().item() for name in whole) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["huggingface", "lightning"])
def test_engines_that_call_the_same_session_train_alike(engine: str) -> None:
    pytest.importorskip({"huggingface": "transformers"}.get(engine, engine))
    trainers = [make(online(), training_steps=5) for _ in range(2)]
    trainers[1].engine = engine
    for trainer in trainers:
        trainer.fit()
    one, other = (trainer.policy.state_dict() for trainer in trainers)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_an_apprentice_learns_what_demonstrations_alone_do_not_teach() -> None:
    few = demonstrations(3)

    def learn(data: Any) -> float:
        trainer = make(data, policy=MLP(hidden=[32, 32]), training_steps=400, batch_size=32, log_every=100)
        trainer.fit()
        return evaluate_policy(trainer.policy, "guided_point", episodes=40, options={"max_steps": 12}).success

    alone = learn(few)
    told = learn(online(few, updates_per_round=40, warmup_episodes=4))
    assert told >= 0.95 and alone <= told - 0.2


def test_without_demonstrations_all_rows_were_played() -> None:
    data = online(None, None, label="own", keep="all")
    make(data, policy=ActorCritic(hidden=[8]), training_steps=2).fit()
    assert data.take(1)[0][STATE].shape == (8, 4) and data.epochs(5) == 0.0


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_it, message",
    [
        (lambda: online(env="point_reach"), "point_reach comes without one; use label: own"),
        (lambda: online(share=0.0), "share must lie between 0 and 1, got 0.0"),
        (lambda: online(share=1.0), "share must lie between 0 and 1, got 1.0"),
        (lambda: online(share=0.3), "share 0.3 of a batch of 8 is 2.4 rows"),
        (lambda: online(buffer=ReplayBuffer(max_frames=3)), "max_frames is 3, less than the 4 rows of a batch"),
        (lambda: online(buffer=ReplayBuffer(max_bytes=63)), r"max_bytes is 63, less than the \d+ bytes of the 4 rows"),
        (lambda: online(None), "a share beside demonstrations, and there are none"),
        (lambda: online(None, None, label="own"), "no success to keep; set online.keep: all"),
        (lambda: online(None, None, start_after=3), "counts steps on demonstrations"),
        (lambda: online(label="mine"), "online.label must be own or expert, got 'mine'"),
        (lambda: online(noise=-1.0), "online.noise must be at least 0"),
        (lambda: online(noise_steps=0), "online.noise_steps must be at least 1"),
        (lambda: online(options={"sise": 3}), "no option 'sise'"),
        (
            lambda: online(Windows({STATE: np.zeros((9, 7)), ACTION: np.zeros((9, 2))}, [9], {ACTION: [0]})),
            r"the demonstrations have observation.state \[7\], action \[2\], but the environment .* differs",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_played(make_it: Any, message: str) -> None:
    played = [start(episode) for episode in range(20)]
    with faults(seeds=played), pytest.raises(ConfigError, match=message) as raised:
        make(make_it()).fit()
    assert "\n" not in str(raised.value)


def test_episodes_that_fail_are_left_out_and_if_all_do_the_run_ends() -> None:
    data = online(episodes_per_round=4)
    with faults(of=[start(1)], at=2, kind="raise"):
        make(data, training_steps=1).fit()
    assert data.buffer.episodes == 3
    trainer = make(online())
    with faults(at=1, kind="raise"), pytest.raises(RolloutError, match="all episodes of round 0 in guided_point"):
        trainer.fit()
    empty = online(None, None, label="own", keep="all", buffer=ReplayBuffer(max_frames=8))
    with pytest.raises(DataError, match="is larger than the replay buffer"):
        make(empty, policy=ActorCritic(hidden=[8])).fit()
