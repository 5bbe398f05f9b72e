"""Rollouts in a simulator: episodes as trajectories; exact when resumed, the same on any number of ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude import Callback, Trainer, TrainingConfiguration
from etude.algorithms import PPO, RLOO, SFT, ReinforcePlusPlus
from etude.errors import ConfigError, RolloutError
from etude.policies import MLP, ActorCritic
from etude.registry import ENVIRONMENT_REGISTRY
from etude.rollouts.explore import EnvironmentRollouts, Explorer
from etude.runs.checkpoint import CheckpointStore
from etude.runs.metrics import read_metrics
from etude.simulation.actors import Seat
from etude.simulation.environments import make_environment
from etude.simulation.seeds import episode_seed
from etude.simulation.timed import TimedEnvironment
from etude.types import Batch
from etude.types.names import ACTION, STATE
from tests.callbacks import DieAt
from tests.crash.harness import compare
from tests.processes import reap, run_ranks, spawn
from tests.unit.simulation.point_reach import PointReach, faults


@pytest.fixture(autouse=True)
def point_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "point_reach", PointReach)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Notes(Callback):
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, trainer: Trainer, step: int, metrics: Any) -> None:
        self.rows.append(dict(metrics))


def make(
    run: Any = False, algorithm: Any = None, callbacks: Any = (), policy: Any = None, data: Any = None, **config: Any
) -> Trainer:
    settings = {"lr": 3e-3, "batch_size": 4, "training_steps": 2, "log_every": 1, "shuffle": True}
    return Trainer(
        policy or ActorCritic(hidden=[16]), data or EnvironmentRollouts("point_reach", 6, slots=4),
        algorithm or PPO(gamma=0.9, epochs=2, minibatches=2), config=TrainingConfiguration(**{**settings, **config}),
        run=run, loggers=[], callbacks=callbacks, show_progress=False,
    )  # fmt: skip


def test_an_episode_is_a_trajectory_of_its_steps() -> None:
    trainer = make(training_steps=1, data=EnvironmentRollouts("point_reach", 6, slots=4, options={"max_steps": 9}))
    trainer.fit()
    data: Any = trainer.data
    policy: Any = trainer.policy
    data.open(data.place)
    data.take(3)  # with the policy as it is now
    assert [t.group_id for t in data.trajectories] == list(range(18, 24))
    env = make_environment("point_reach", max_steps=9)
    for trajectory in data.trajectories:
        assert trajectory.seed == episode_seed(0, "train", trajectory.group_id) and trajectory.task == "Reach the goal"
        steps, seen = len(trajectory.loss_mask), [env.reset(trajectory.seed)[STATE]]
        rewards = []
        for action in trajectory[ACTION].numpy():  # played again, it goes the same way
            outcome = env.step(action)
            seen.append(outcome.observation[STATE])
            rewards.append(outcome.reward)
        assert outcome.done and trajectory.terminated == outcome.terminated == (not trajectory.truncated)
        np.testing.assert_array_equal(trajectory[STATE].numpy(), np.stack(seen[:-1]))
        assert trajectory.token_level_scores == rewards and trajectory.success == bool(outcome.success)
        assert trajectory.reward == pytest.approx(sum(rewards))
        values = policy.value({STATE: torch.from_numpy(np.stack(seen))}).tolist()
        assert trajectory["values"] == pytest.approx(values[:-1], abs=1e-6)
        assert trajectory.bootstrap == pytest.approx(0.0 if trajectory.terminated else values[-1], abs=1e-6)
        assert steps == len(trajectory.logprobs)
    assert {t.terminated for t in data.trajectories} <= {True, False}
    batch = Batch.from_trajectories(data.trajectories)
    assert batch[STATE].shape == (6, 9, 4) and batch[ACTION].shape == (6, 9, 2) and len(batch["seed"]) == 6
    found = policy.log_probs(batch)
    np.testing.assert_allclose(found.detach().numpy(), batch["old_log_probs"].numpy(), atol=1e-5)
    back = batch.to_trajectories()
    assert [t.seed for t in back] == [t.seed for t in data.trajectories]


def test_advantages_of_an_episode_that_was_cut_off_count_what_would_have_come() -> None:
    trainer = make(training_steps=1, data=EnvironmentRollouts("point_reach", 2, options={"max_steps": 3}))
    trainer.fit()
    data: Any = trainer.data
    for trajectory in data.trajectories:
        if trajectory.terminated:
            continue
        batch = PPO(gamma=0.9, lam=0.8, whiten=False).advantages(Batch.from_trajectories([trajectory]))
        values, carried = [*trajectory["values"], trajectory.bootstrap], 0.0
        for t in reversed(range(3)):
            carried = trajectory.token_level_scores[t] + 0.9 * values[t + 1] - values[t] + 0.9 * 0.8 * carried
            assert float(batch["advantages"][0, t]) == pytest.approx(carried, abs=1e-5)
    assert any(trajectory.truncated for trajectory in data.trajectories)


def test_what_is_drawn_depends_on_the_episode_alone_and_not_on_slots_or_neighbours() -> None:
    env = make_environment("point_reach")
    policy = ActorCritic(hidden=[64, 64])
    policy.build(env.spec)
    explorer = Explorer(policy, 16)
    seats = [Seat(slot, env, env.reset(slot), key=1000 + slot) for slot in range(16)]
    with explorer.session():
        together = explorer.act(seats)
        likely = dict(explorer.log_probs)
        for seat, action in zip(seats, together, strict=True):
            (lonely,) = explorer.act([seat])
            assert (lonely == action).all() and explorer.log_probs == {seat.slot: likely[seat.slot]}
        turned = explorer.act(seats[::-1])
    assert all((one == other).all() for one, other in zip(together, turned[::-1], strict=True))
    assert len({tuple(action) for action in together}) == 16


def test_a_group_begins_alike_and_goes_on_differently() -> None:
    data = EnvironmentRollouts("point_reach", 6, group_size=3)
    make(data=data, algorithm=RLOO(), policy=ActorCritic([8], value_head=False), training_steps=1).fit()
    first, second = data.trajectories[:3], data.trajectories[3:]
    assert [(t.group_id, t.run_id) for t in data.trajectories] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for group in (first, second):
        assert len({tuple(t[STATE][0].tolist()) for t in group}) == 1
        assert len({tuple(t[ACTION][0].tolist()) for t in group}) == 3
    assert first[0].seed != second[0].seed and "values" not in first[0]


@pytest.mark.parametrize(
    "fault, reason",
    [
        ({"at": 2, "kind": "raise"}, "OSError: the arm is broken"),
        ({"at": 2, "kind": "nan"}, "ValueError: it gave the reward nan"),
        ({"at": 2, "kind": "hang"}, "TimeoutError: it took longer than 1 s"),
        ({"seeds": [episode_seed(0, "train", 4)]}, "OSError: the table is broken"),
        ({"blind": [episode_seed(0, "train", 4)]}, "ValueError: it shows observation.state that is not finite"),
    ],
)
def test_an_episode_that_fails_is_dropped_and_the_others_are_trained_on(fault: Any, reason: str) -> None:
    notes = Notes()
    data = EnvironmentRollouts("point_reach", 6, slots=4, step_timeout_s=1.0)
    trainer = make(data=data, callbacks=[notes], training_steps=1)
    with faults(of=[episode_seed(0, "train", 4)], **fault):
        trainer.fit()
    assert data.failures == {4: reason} and len(data.trajectories) == 5
    assert notes.rows[0]["train/rollout/failed"] == pytest.approx(1 / 6)


def test_if_all_episodes_fail_the_run_ends_with_the_reason() -> None:
    with (
        faults(at=1, kind="raise"),
        pytest.raises(RolloutError, match="all 6 episodes of step 0 failed; the first"),
    ):
        make().fit()


def test_on_request_a_failing_episode_ends_the_run() -> None:
    data = EnvironmentRollouts("point_reach", 6, on_error="stop")
    with faults(at=1, kind="raise"), pytest.raises(RolloutError, match="of point_reach failed: OSError: the arm"):
        make(data=data).fit()


def test_alarms_of_others_still_ring_and_a_late_step_counts_in_any_thread() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    earlier = signal.setitimer(signal.ITIMER_REAL, 50.0)
    try:
        env = TimedEnvironment(PointReach(), 0.05)
        env.reset(0)
        env.step(np.zeros(2))
        assert 45 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50 and env.task == "Reach the goal"
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.05)
        assert rung == [1]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *earlier)

    class Slow(PointReach):
        def step(self, action: Any) -> Any:
            time.sleep(0.1)
            return super().step(action)

    caught: list[BaseException] = []

    def elsewhere() -> None:
        env = TimedEnvironment(Slow(), 0.05)
        env.reset(0)
        try:
            env.step(np.zeros(2))
        except TimeoutError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(timeout=60)
    assert len(caught) == 1


def test_the_alarm_stays_set_between_steps_and_leaves_nothing_behind() -> None:
    class Napping(PointReach):
        nap_s = 0.0

        def step(self, action: Any) -> Any:
            time.sleep(self.nap_s)
            return super().step(action)

    def is_free() -> bool:
        return signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

    inner = Napping()
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    earlier = signal.setitimer(signal.ITIMER_REAL, 0.0)
    try:
        env = TimedEnvironment(inner, 1.0)
        env.reset(0)
        inner.nap_s = 0.6
        for _ in range(3):  # it rings in the second and has time left
            env.step(np.zeros(2))
        assert not is_free()
        time.sleep(1.2)
        assert is_free()
        inner.nap_s = 60.0
        with pytest.raises(TimeoutError, match="longer than 1 s"):
            env.step(np.zeros(2))
        assert is_free()
        inner.nap_s = 0.0
        env.step(np.zeros(2))
        assert not is_free()
        env.close()
        assert is_free()
        killed = os.fork()
        if not killed:
            env.step(np.zeros(2))
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # of somebody who wants to be ended by it
            time.sleep(60)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(killed, 0)[1]) == signal.SIGALRM
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *earlier)


@pytest.mark.parametrize(
    "make_it, message",
    [
        (lambda: make(policy=MLP(normalization={"state": "identity", "action": "identity"})), "that draws its actions"),
        (lambda: make(algorithm=SFT()), "an algorithm that learns from rewards"),
        (lambda: make(algorithm=PPO(kl_coef=0.1)), "no reference to be held to"),
        (lambda: make(data=EnvironmentRollouts("point_reach", 7, group_size=2)), "a multiple of group_size"),
        (lambda: make(data=EnvironmentRollouts("point_reach", options={"size": 3})), "no option 'size'"),
        (lambda: make(policy=ActorCritic(value_head=False)), "value head"),
        (lambda: make(algorithm=PPO(temperature=0.5)), "the temperature is 1"),
    ],
)
def test_what_does_not_fit_is_refused(make_it: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_it().fit()


def test_environment_steps_are_counted_across_a_resume(tmp_path: Path) -> None:
    first = make(tmp_path / "run", save_every=1)
    first.fit()
    assert first.progress.env_steps == first.data.env_steps > 0  # type: ignore[attr-defined]
    more = make(tmp_path / "run", training_steps=3)
    more.fit()
    assert more.progress.env_steps > first.progress.env_steps


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    def train(name: str, callbacks: Any = ()) -> None:
        make(tmp_path / name, callbacks=callbacks, training_steps=5, save_every=1, keep_last=20, ema_decay=0.9).fit()

    train("whole")
    assert reap(spawn(lambda: train("killed", [DieAt(3)]))) == [-9]
    train("killed")
    assert compare(tmp_path / "killed", tmp_path / "whole") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, broken",
    [
        (PPO(gamma=0.9, epochs=2, minibatches=2), False),
        (ReinforcePlusPlus(gamma=0.9), False),
        (ReinforcePlusPlus(gamma=0.9), True),
    ],
    ids=["PPO", "REINFORCE++", "REINFORCE++ with a rank whose episodes all fail"],
)
def test_two_ranks_train_as_one_process_does(tmp_path: Path, algorithm: Any, broken: bool) -> None:
    odd = [episode_seed(0, "train", episode) for episode in range(1, 40, 2)]

    def train(run: str) -> None:
        policy = ActorCritic([16], value_head=isinstance(algorithm, PPO))
        data = EnvironmentRollouts("point_reach", 6, slots=4)
        with faults(seeds=odd if broken else []):
            make(tmp_path / run, algorithm, policy=policy, data=data, training_steps=3, optimizer="sgd", lr=0.05).fit()

    train("alone")
    assert run_ranks(lambda: train("shared"), 2) == [0, 0]
    one, other = (read_metrics(tmp_path / run / "metrics.jsonl") for run in ("alone", "shared"))
    for name in ("train/reward", "train/reward_std", "train/rollout/steps", "train/rollout/failed"):
        assert [row[name] for row in one] == pytest.approx([row[name] for row in other], abs=1e-5)
    assert one[0]["train/rollout/failed"] == (0.5 if broken else 0.0)
    trees = [CheckpointStore(tmp_path / run / "checkpoints").load("last").tree for run in ("alone", "shared")]
    first, second = (tree["policy"] for tree in trees)
    assert max((first[key] - second[key]).abs().max().item() for key in first) < 1e-6
    assert trees[0]["data"]["env_steps"] == trees[1]["data"]["env_steps"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "reinforce"])
def test_a_point_learns_to_reach(kind: str) -> None:
    notes = Notes()
    with_values = kind == "ppo"
    algorithm = PPO(gamma=0.9, epochs=4, minibatches=4) if with_values else ReinforcePlusPlus(gamma=0.9)
    policy = ActorCritic([32, 32], std=0.5, value_head=with_values)
    data = EnvironmentRollouts("point_reach", 32, options={"max_steps": 15})
    steps, lr = (20, 3e-3) if with_values else (60, 1e-2)
    make(data=data, algorithm=algorithm, policy=policy, callbacks=[notes], training_steps=steps, lr=lr).fit()
    first, last = notes.rows[0], notes.rows[-1]
    assert first["train/rollout/success"] < 0.4
    assert last["train/rollout/success"] > 0.8 and last["train/reward"] > 0.5 * first["train/reward"]


@pytest.mark.slow
def test_it_plays_in_real_simulators() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra: sim)")
    for env, params in (("gym:CartPole-v1", {}), ("gym:Pendulum-v1", {"normalization": {"action": "min_max"}})):
        data = EnvironmentRollouts(env, 4, slots=4, options={"render": False, "max_steps": 20})
        make(data=data, policy=ActorCritic([8], **params), training_steps=1).fit()
        assert len(data.trajectories) == 4 and not data.failures
    torques = torch.cat([trajectory[ACTION] for trajectory in data.trajectories])
    assert 1.5 < float(torques.std()) < 2.5  # a deviation of 1 is half of what a torque may be
