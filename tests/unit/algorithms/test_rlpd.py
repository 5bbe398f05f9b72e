"""RLPD: losses as the formulas say, each moving its own part; exact when split, killed, or shared by ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude import Callback, Trainer, TrainingConfiguration
from etude.algorithms import RLPD
from etude.algorithms.rlpd import td_target
from etude.data import LeRobotDataModule
from etude.data.lerobot.reader import LeRobotDataset
from etude.errors import ConfigError, DataError
from etude.policies import MLP, SoftActorCritic
from etude.registry import ALGORITHM_REGISTRY, ENVIRONMENT_REGISTRY
from etude.rollouts.explore import EnvironmentRollouts
from etude.rollouts.online import OnlineData, OnlineSettings
from etude.runs.checkpoint import CheckpointStore
from etude.simulation.record import record
from etude.types import DataSpec, Feature, Trajectory
from etude.types.names import STATE
from tests.callbacks import DieAt, KeepRows
from tests.crash.harness import compare, differs
from tests.processes import reap, run_ranks, spawn
from tests.unit.simulation.point_reach import PointReach

SPEC = DataSpec(
    {"observation.state": Feature((3,), "float32", "state"), "action": Feature((2,), "float32", "action")}, 10.0
)


@pytest.fixture(autouse=True)
def point_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "point_reach", PointReach)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(**options: Any) -> SoftActorCritic:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = SoftActorCritic(**{"hidden": [8, 8], "critics": 4, "temperature": 0.7, **options})
        policy.build(SPEC)
        for parameter in policy.parameters():  # targets too, so that they differ from the critics
            parameter.data += 0.2 * torch.randn_like(parameter)
    return policy.double()


def transitions(rows: int = 6) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return {
        "observation.state": normal(rows, 3), "next.observation.state": normal(rows, 3),
        "action": normal(rows, 2).tanh(), "reward": normal(rows),
        "discount": torch.tensor([0.99, 0.0, 0.99, 0.99, 0.0, 0.99] * rows)[:rows].double(),
        "noise": normal(rows, 2, 2), "subset": torch.tensor([2, 0]),
    }  # fmt: skip


def gaussian(policy: Any, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = policy.actor(state).chunk(2, -1)
    action = torch.tanh(mean + log_std.exp() * noise)
    density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - torch.log(1 - action.square())
    return action, density.sum(-1)


@pytest.mark.parametrize("backup_entropy", [True, False])
def test_the_loss_is_what_the_formulas_say(backup_entropy: bool) -> None:
    policy, batch = build(), transitions()
    algorithm = RLPD(backup_entropy=backup_entropy, reward_scale=2.0, reward_shift=-0.5, target_entropy=-3.0)
    found = algorithm.loss(policy, batch)
    state, later = batch["observation.state"], batch["next.observation.state"]
    with torch.no_grad():
        action, log_prob = gaussian(policy, later, batch["noise"][:, 0])
        everyone = policy.target_critics(later, action)
        least = torch.minimum(everyone[2], everyone[0])
        if backup_entropy:
            least = least - 0.7 * log_prob * float(policy.log_temperature.exp() / 0.7)
        target = 2.0 * batch["reward"] - 0.5 + batch["discount"] * least
        assert torch.allclose(target[1], 2.0 * batch["reward"][1] - 0.5)  # nothing comes after the end
    critic = sum(((policy.critics(state, batch["action"])[number] - target) ** 2).sum() for number in range(4)) / 4
    action, log_prob = gaussian(policy, state, batch["noise"][:, 1])
    alpha = policy.log_temperature.exp()
    actor = (alpha.detach() * log_prob - policy.critics(state, action).mean(0)).sum()
    temperature = (alpha * (-log_prob - -3.0).detach()).sum()
    torch.testing.assert_close(found.total, critic + actor + temperature)
    assert found.weight == 6
    torch.testing.assert_close(torch.as_tensor(found["critic_loss"]), critic.detach() / 6)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.as_tensor(found["entropy"]), -log_prob.mean().detach())


def test_an_episode_that_ended_earns_nothing_more_and_one_that_was_cut_off_does() -> None:
    values = torch.tensor([[5.0, 5.0, 5.0], [3.0, 9.0, 3.0]])
    found = td_target(torch.ones(3), torch.tensor([0.9, 0.9, 0.0]), values)
    torch.testing.assert_close(found, torch.tensor([1 + 0.9 * 3, 1 + 0.9 * 5, 1.0]))


def grads(policy: Any, loss: Any) -> dict[str, float]:
    loss.total.backward()
    sizes = {"actor": 0.0, "critics": 0.0, "log_temperature": 0.0, "target_critics": 0.0}
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            sizes[name.split(".")[0]] += float(parameter.grad.abs().sum())
            parameter.grad = None
    return sizes


def test_each_part_is_moved_by_its_own_loss_alone() -> None:
    policy, batch = build(), transitions()
    algorithm = RLPD()
    whole = grads(policy, algorithm.loss(policy, batch))
    without_actor = grads(policy, algorithm.loss(policy, {**batch, "moves_actor": False}))
    assert whole["actor"] > 0 and whole["log_temperature"] > 0 and whole["target_critics"] == 0
    assert without_actor["actor"] == without_actor["log_temperature"] == 0
    assert without_actor["critics"] == pytest.approx(whole["critics"], rel=1e-12)
    # The actor climbs the critics: where they are flat in the action it has entropy alone to follow.
    with torch.no_grad():
        policy.critics.weights[0][:, 3:] = 0.0
        policy.log_temperature.fill_(-200.0)
    assert grads(policy, algorithm.loss(policy, batch))["actor"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("target, rises", [(50.0, True), (-50.0, False)])
def test_the_temperature_rises_where_there_is_too_little_entropy(target: float, rises: bool) -> None:
    policy = build()
    RLPD(target_entropy=target).loss(policy, transitions()).total.backward()
    assert policy.log_temperature.grad is not None
    assert (float(policy.log_temperature.grad) < 0) == rises


# ---- in a run --------------------------------------------------------------------------------------------------------


def make(
    run: Any = False, algorithm: Any = None, callbacks: Any = (), policy: Any = None, data: Any = None, **config: Any
) -> Trainer:
    settings = {"lr": 3e-3, "batch_size": 8, "training_steps": 3, "log_every": 1, "clip_norm": None}
    return Trainer(
        policy or SoftActorCritic(hidden=[16], critics=3), data or EnvironmentRollouts("point_reach", 2, slots=2),
        algorithm or RLPD(start_after=30, updates_per_env_step=0.5),
        config=TrainingConfiguration(**{**settings, **config}), run=run, loggers=[], callbacks=callbacks,
        show_progress=False,
    )  # fmt: skip


def test_updates_are_owed_by_the_step_and_the_buffer_holds_what_was_done() -> None:
    rows = KeepRows()
    trainer = make(callbacks=[rows], training_steps=6, algorithm=RLPD(start_after=50, updates_per_env_step=0.5))
    trainer.fit()
    algorithm: Any = trainer.algorithm
    assert algorithm.buffer.size() == trainer.progress.env_steps
    made = sum(row["train/updates"] for row in rows.rows)
    late = [row for row in rows.rows if row["train/updates"]]
    assert 0 < len(late) < len(rows.rows) and rows.rows[0]["train/updates"] == 0
    warm = next(row["train/buffer"] for row in rows.rows if row["train/buffer"] >= 50)
    before = warm - late[0]["train/rollout/steps"] * 2
    assert abs(made - 0.5 * (trainer.progress.env_steps - before)) < 1
    drawn = algorithm.buffer.sample(500, key=1, transitions=True, n_step=1, gamma=0.9)
    moved = drawn["next.observation.state"][:, :2] - drawn["observation.state"][:, :2]
    np.testing.assert_allclose(moved, 0.2 * drawn["action"].clip(-1, 1), atol=1e-5)
    left = np.linalg.norm(drawn["next.observation.state"][:, 2:], axis=1)
    np.testing.assert_allclose(drawn["reward"], -left, atol=1e-5)
    np.testing.assert_array_equal(drawn["discount"] == 0, left < 0.15)  # cut off is not ended


class Watch(Callback):
    """Keeps the critics, and those of the targets, as they are before the first step and after each update."""

    def on_fit_start(self, trainer: Trainer) -> None:
        policy: Any = trainer.policy
        self.kept = [[value.detach().clone() for value in policy.target_critics.parameters()]]
        self.leaders: list[list[Tensor]] = []
        optimizer = next(o.optimizer for o in trainer.session.optimizations.values() if _has_critics(o, policy))
        optimizer.register_step_post_hook(lambda *_: self.note(policy))

    def note(self, policy: Any) -> None:
        self.kept.append([value.detach().clone() for value in policy.target_critics.parameters()])
        self.leaders.append([value.detach().clone() for value in policy.critics.parameters()])


def _has_critics(optimization: Any, policy: Any) -> bool:
    return any(parameter is optimization.params[0] for parameter in policy.critics.parameters()) or len(
        optimization.params
    ) > len(list(policy.critics.parameters()))


@pytest.mark.parametrize("named", [False, True], ids=["one optimizer", "three"])
def test_targets_follow_once_for_each_update_whatever_the_optimizers_and_the_split(named: bool) -> None:
    rates = {"critics": 3e-3, "actor": 1e-3, "log_temperature": 1e-2}
    several = {
        name: {"match": [f"{name}*"], "type": "adam", "lr": rate, "clip_norm": None} for name, rate in rates.items()
    }
    watch = Watch()
    make(
        algorithm=RLPD(start_after=1, updates_per_env_step=0.25, tau=0.1), callbacks=[watch], training_steps=2,
        gradient_accumulation_steps=2, optimizers=several if named else {},
    ).fit()  # fmt: skip
    assert len(watch.leaders) >= 4
    for before, leader, after in zip(watch.kept[:-1], watch.leaders, watch.kept[1:], strict=True):
        for was, led, now in zip(before, leader, after, strict=True):
            assert torch.equal(now, torch.lerp(was, led, 0.1))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def test_no_split_of_a_batch_changes_the_update() -> None:
    ends = []
    for size, count in ((8, 1), (4, 2), (2, 4)):
        trainer = make(
            batch_size=size, gradient_accumulation_steps=count, precision="float64", optimizer="sgd", lr=0.01
        )
        trainer.fit()
        ends.append(weights(trainer))
    for other in ends[1:]:
        assert max(float((other[name] - value).abs().max()) for name, value in ends[0].items()) < 1e-12


def test_the_actor_may_wait_for_the_critics() -> None:
    trainer = make(algorithm=RLPD(start_after=1, updates_per_env_step=0.1, actor_every=1000), training_steps=1)
    trainer.fit()
    policy: Any = trainer.policy
    assert float(policy.log_temperature.detach()) == 0.0
    assert not torch.equal(policy.critics.weights[0], policy.target_critics.weights[0])


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit_with_its_buffer(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra: sim)")

    def train(name: str, callbacks: Any = ()) -> None:
        config = {"lr": 1e-3, "batch_size": 16, "training_steps": 5, "save_every": 1, "keep_last": 20, "log_every": 1}
        Trainer(
            SoftActorCritic(hidden=[16], critics=3),
            EnvironmentRollouts("gym:Pendulum-v1", 1, slots=1, options={"render": False, "max_steps": 30}),
            RLPD(start_after=40, updates_per_env_step=0.73), config=TrainingConfiguration(**config, ema_decay=0.9),
            run=tmp_path / name, loggers=[], callbacks=callbacks, show_progress=False,
        ).fit()  # fmt: skip

    train("whole")
    assert reap(spawn(lambda: train("killed", [DieAt(3)]))) == [-9]
    train("killed")
    assert compare(tmp_path / "killed", tmp_path / "whole") is None
    trees = [CheckpointStore(tmp_path / name / "checkpoints").load("last").tree for name in ("killed", "whole")]
    assert differs(trees[0]["algorithm"], trees[1]["algorithm"], "algorithm") is None
    assert trees[0]["algorithm"]["owed"] != 0.0


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    def train(name: str, size: int) -> None:
        data = EnvironmentRollouts("point_reach", 4, slots=2)
        make(tmp_path / name, data=data, batch_size=size, optimizer="sgd", lr=0.01).fit()

    train("alone", 8)
    assert run_ranks(lambda: train("shared", 4), 2) == [0, 0]
    trees = [CheckpointStore(tmp_path / name / "checkpoints").load("last").tree for name in ("alone", "shared")]
    one, other = (tree["policy"] for tree in trees)
    assert max((one[key] - other[key]).abs().max().item() for key in one) < 1e-6
    assert trees[0]["algorithm"]["owed"] == trees[1]["algorithm"]["owed"]


@pytest.mark.slow
def test_a_point_learns_to_reach() -> None:
    rows = KeepRows()
    algorithm = RLPD(gamma=0.9, start_after=100, updates_per_env_step=1.0)
    make(
        algorithm=algorithm, callbacks=[rows], policy=SoftActorCritic([32, 32]), training_steps=30, batch_size=64
    ).fit()
    last = [row["train/rollout/success"] for row in rows.rows[-6:]]
    assert float(np.mean(last)) > 0.9 and rows.rows[0]["train/rollout/success"] < 0.6


# ---- beside demonstrations -------------------------------------------------------------------------------------------


def straight(observation: dict[str, Any]) -> Any:
    """Go to the goal."""
    return np.clip(5.0 * observation[STATE][2:], -1, 1)


def shown(root: Path, rewards: bool = True) -> Any:
    """Return two episodes in which a point goes straight to its goal, with what was earned."""
    pytest.importorskip("pyarrow")
    record("point_reach", root, episodes=2, policy=straight, rewards=rewards)
    return LeRobotDataModule(root=root, show_progress=False)


def make_online(data: Any, run: Any = False, callbacks: Any = (), reward: Any = "env") -> Trainer:
    settings = OnlineSettings("point_reach", keep="all", reward=reward, episodes_per_round=2, updates_per_round=3)
    return Trainer(
        SoftActorCritic(hidden=[16], critics=3, normalization={"action": "identity"}),
        OnlineData(data, settings, share=0.5), RLPD(gamma=0.9, n_step=2),
        config=TrainingConfiguration(lr=3e-3, batch_size=8, training_steps=7, log_every=1, save_every=1, keep_last=20),
        run=run, loggers=[], callbacks=callbacks, show_progress=False,
    )  # fmt: skip


def test_half_of_every_batch_are_demonstrations_with_what_they_earned(tmp_path: Path) -> None:
    trainer = make_online(shown(tmp_path / "with"))
    trainer.fit()
    (batch,) = trainer.data.take(6)
    known = np.asarray(LeRobotDataset(tmp_path / "with", show_progress=False).source.columns[STATE])
    is_shown = [bool((known == row).all(1).any()) for row in batch[STATE].numpy()]
    assert is_shown == [True] * 4 + [False] * 4
    assert set((batch["discount"] * 1e4).round().tolist()) <= {8100.0, 9000.0, 0.0}
    left = batch[f"next.{STATE}"][:, 2:].norm(dim=1)
    assert bool((batch["reward"][4:] <= -0.89 * left[4:]).all())  # of two steps, the later is what is left
    assert bool((batch["reward"][:4] < 0).all())
    bare = shown(tmp_path / "without", rewards=False)
    with pytest.raises(DataError, match="have no reward"):
        make_online(bare).fit()
    make_online(shown(tmp_path / "without", rewards=False), reward="success").fit()


@pytest.mark.slow
def test_beside_demonstrations_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    def train(name: str, callbacks: Any = ()) -> None:
        make_online(shown(tmp_path / "data"), tmp_path / name, callbacks).fit()

    train("whole")
    assert reap(spawn(lambda: train("killed", [DieAt(4)]))) == [-9]
    train("killed")
    trees = [CheckpointStore(tmp_path / name / "checkpoints").load("last").tree for name in ("killed", "whole")]
    for part in ("policy", "optimizer", "algorithm", "data"):
        assert differs(trees[0][part], trees[1][part], part) is None


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_mistakes_are_refused_in_one_sentence() -> None:
    assert ALGORITHM_REGISTRY.key_of(RLPD) == "rlpd"
    for options, message in (
        ({"updates_per_env_step": 0.0}, "updates_per_env_step must be positive"),
        ({"gamma": 1.5}, "gamma lies"),
        ({"tau": 0.0}, "tau lies"),
        ({"subset": 0}, "at least 1"),
        ({"actor_every": 0}, "at least 1"),
        ({"reward_scale": 0.0}, "reward_scale must be positive"),
        ({"n_step": 3, "reward_shift": -1.0}, "reward_shift needs n_step: 1"),
        ({"start_after": -1}, "must not be negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            RLPD(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="subset of 9 critics, and the policy has only 3"):
        make(algorithm=RLPD(subset=9)).fit()
    with pytest.raises(ConfigError, match="trains a soft_actor_critic or a residual, not MLP"):
        make(policy=MLP(normalization={"state": "identity", "action": "identity"})).fit()
    with pytest.raises(ConfigError, match="no optimizer has them"):
        make(freeze=["critics.*"]).fit()
    with pytest.raises(DataError, match="learns from transitions, and the batch has no reward"):
        RLPD().loss(build(), {"observation.state": torch.zeros(2, 3), "action": torch.zeros(2, 2)})


def test_a_trajectory_keeps_where_its_last_action_led() -> None:
    trainer = make(training_steps=1)
    trainer.fit()
    data: Any = trainer.data
    episode: Trajectory = data.trajectories[0]
    where = episode["observation.state"][-1, :2] + 0.2 * episode["action"][-1].clamp(-1, 1)
    torch.testing.assert_close(episode["last"]["observation.state"][:2], where)
