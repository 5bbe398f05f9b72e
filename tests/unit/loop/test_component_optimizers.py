"""Optimizers with their schedule inside: the rates, what is saved, and what a changed configuration does."""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etude import Callback, Trainer, TrainingConfiguration
from etude.config.restore import load_policy
from etude.config.training import OptimizerConfiguration
from etude.data.columns import Columns
from etude.data.map import MapData
from etude.errors import ConfigError, MissingExtraError
from etude.loop.optimizers import build_optimizer
from etude.policies import MLP
from etude.registry import OPTIMIZER_BUILDER_REGISTRY
from etude.runs.checkpoint import CheckpointStore
from etude.trainer import wrap_train_step
from etude.types import DataSpec, Feature
from tests.processes import run_ranks

WARMUP = {"peak_lr": 1.0, "total_steps": 10, "warmup_steps": 4, "start_lr": 0.1, "end_lr": 0.0}
ONE_CYCLE: dict[str, Any] = {"max_lr": 0.1, "total_steps": 12}


def build(key: str, params: Any = None, **options: Any) -> Any:
    factory: Any = OPTIMIZER_BUILDER_REGISTRY.get(key)
    return factory(**options).build([nn.Parameter(torch.ones(2))] if params is None else params)


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


def rates(optimizer: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        step(optimizer)
    return found


# -- warm-up and cosine ----------------------------------------------------------------------------------------------


def test_the_rate_rises_to_the_peak_falls_as_a_cosine_and_stays() -> None:
    expected = [0.1, 0.4, 0.7, 1, 1, 0.9045, 0.6545, 0.3455, 0.0955, 0, 0, 0]
    assert rates(build("adamw_warmup_cosine_decay", **WARMUP), 12) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    "warmup, total, expected", [(0, 3, [1, 0.5, 0, 0]), (1, 3, [1, 1, 0, 0]), (2, 3, [0, 1, 1, 0])]
)
def test_short_schedules_have_no_gap(warmup: int, total: int, expected: list[float]) -> None:
    optimizer = build("adamw_warmup_cosine_decay", peak_lr=1.0, total_steps=total, warmup_steps=warmup)
    assert rates(optimizer, 4) == pytest.approx(expected)


def test_steps_are_those_of_adamw_at_these_rates_and_groups_keep_their_ratio() -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    twin = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
    optimizer = build("adamw_warmup_cosine_decay", groups, weight_decay=0.1, **WARMUP)
    plain = torch.optim.AdamW([{"params": [p]} for p in twin], weight_decay=0.1, fused=True)
    for _ in range(12):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == first / 2
        plain.param_groups[0]["lr"], plain.param_groups[1]["lr"] = first, second
        step(plain)
        step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(params, twin, strict=True))


# -- OneCycle --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {}, {"anneal_strategy": "linear", "pct_start": 0.5}, {"three_phase": True}, {"cycle_momentum": False},
        {"div_factor": 4.0, "final_div_factor": 10.0, "base_momentum": 0.8, "max_momentum": 0.9, "pct_start": 0.25},
    ],
)  # fmt: skip
def test_one_cycle_is_that_of_torch(options: dict[str, Any]) -> None:
    ours = build("adamw_cosine_schedule", **ONE_CYCLE, **options)
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(theirs, **ONE_CYCLE, **options)
    for done in range(12):
        for key in ("lr", "betas"):
            assert ours.param_groups[0][key] == pytest.approx(theirs.param_groups[0][key], rel=1e-9)
        step(ours)
        step(theirs)
        if done < 11:
            schedule.step()
    last = ours.param_groups[0]["lr"]
    step(ours)  # torch's raises here
    assert ours.param_groups[0]["lr"] == last


def test_one_cycle_takes_epochs_a_rate_and_a_place_to_begin() -> None:
    optimizer = build("adamw_cosine_schedule", lr=0.1, epochs=3, steps_per_epoch=4, last_epoch=4)
    assert optimizer.param_groups[0]["lr"] == rates(build("adamw_cosine_schedule", **ONE_CYCLE), 6)[5]


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, options, said",
    [
        ("adamw_warmup_cosine_decay", {**WARMUP, "start_lr": 2.0}, "start_lr 2.0 must lie between 0 and peak_lr 1.0"),
        ("adamw_warmup_cosine_decay", {**WARMUP, "end_lr": 2.0}, "end_lr 2.0 must lie between 0 and peak_lr 1.0"),
        ("adamw_warmup_cosine_decay", {**WARMUP, "warmup_steps": 10}, "below total_steps 10, got 10"),
        ("adamw_warmup_cosine_decay", {**WARMUP, "peak_lr": 0.0}, "peak_lr must be positive"),
        ("adamw_warmup_cosine_decay", {**WARMUP, "betas": [0.9]}, "betas must be two numbers"),
        ("adamw_warmup_cosine_decay", {"lr": 1.0, "total_steps": 3}, "unexpected keyword argument 'lr'"),
        ("adamw_warmup_cosine_decay", {"total_steps": 3}, "missing 1 required positional argument: 'peak_lr'"),
        ("adamw_cosine_schedule", {"total_steps": 3}, "max_lr must be positive, got None"),
        ("adamw_cosine_schedule", {"lr": 0.1}, "give total_steps, or epochs and steps_per_epoch"),
        ("adamw_cosine_schedule", {**ONE_CYCLE, "pct_start": 2.0}, "pct_start must lie between 0 and 1"),
        ("schedule_free_radam", {"lr": -1.0}, "lr must be positive"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(key: str, options: dict[str, Any], said: str) -> None:
    config = OptimizerConfiguration(type=key, params=options)
    with pytest.raises(ConfigError, match=said):
        build_optimizer(config, [nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("lr", [None, 0.01])
def test_a_rate_of_ones_own_stays_and_may_be_said_among_the_parameters(lr: float | None) -> None:
    params = {} if lr is None else {"lr": lr}
    built = build_optimizer(
        OptimizerConfiguration(type="schedule_free_radam", params=params), [nn.Parameter(torch.ones(2))]
    )
    assert built.param_groups[0]["lr"] == (lr or 0.0025)


def test_a_second_schedule_beside_the_one_inside_is_refused() -> None:
    trainer = make(optimizer="adamw_warmup_cosine_decay", optimizer_params=WARMUP, schedule="cosine")
    with pytest.raises(ConfigError, match="the optimizer has its schedule inside; leave out schedule"):
        trainer.fit()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(MissingExtraError, match=r"schedulefree cannot be imported .*'etude\[components\]'"):
        build("schedule_free_radam")


# -- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, options", [("adamw_warmup_cosine_decay", WARMUP), ("adamw_cosine_schedule", ONE_CYCLE)])
def test_the_schedule_is_saved_with_the_state_and_survives_a_copy(key: str, options: dict[str, Any]) -> None:
    expected = rates(build(key, **options), 9)
    first = build(key, **options)
    rates(first, 4)
    second = build(key, **options)
    second.load_state_dict(first.state_dict())
    assert rates(copy.deepcopy(first), 5) == rates(second, 5) == expected[4:]


def test_another_total_goes_on_with_the_new_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    first = build("adamw_warmup_cosine_decay", **WARMUP)
    rates(first, 6)
    longer = {**WARMUP, "total_steps": 100}
    second = build("adamw_warmup_cosine_decay", **longer)
    with caplog.at_level(logging.WARNING, "etude"):
        second.load_state_dict(first.state_dict())
    assert "goes on with total_steps 10 -> 100" in caplog.text
    assert rates(second, 3) == rates(build("adamw_warmup_cosine_decay", **longer), 9)[6:]


class Squares(Trainer):
    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> Any:
        return (policy(batch["x"]) - batch["y"]).square().mean()


def make(run: Any = False, callbacks: Any = (), **options: Any) -> Trainer:
    torch.manual_seed(0)
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    config = TrainingConfiguration(**{"training_steps": 8, "batch_size": 4, "log_every": 1, **options})
    return Squares(
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), {"x": x, "y": x.sum(1, keepdim=True)},
        config=config, run=run, loggers=[], show_progress=False, callbacks=callbacks,
    )  # fmt: skip


def weights(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.policy.parameters()]


class Die(Callback):
    """Ends the process without a word after a step."""

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.progress.step == 4:
            trainer.session.record.wait()
            os.kill(os.getpid(), signal.SIGKILL)


EACH = [
    ("adamw_warmup_cosine_decay", WARMUP),
    ("adamw_cosine_schedule", ONE_CYCLE),
    ("schedule_free_radam", {"lr": 0.1}),
]


@pytest.mark.parametrize("key, options", EACH)
def test_a_killed_run_ends_bit_for_bit_like_an_undisturbed_one(
    tmp_path: Path, key: str, options: dict[str, Any]
) -> None:
    settings = {"optimizer": key, "optimizer_params": options, "save_every": 1}
    straight = make(**settings)
    result = straight.fit()
    killed = run_ranks(lambda: make(tmp_path, [Die()], **settings).fit(), 1)
    assert killed == [-signal.SIGKILL]
    resumed = make(tmp_path, **settings)
    again = resumed.fit()
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))
    assert (resumed.optimizer.param_groups[0]["lr"], again.metrics["train/loss"]) == (
        straight.optimizer.param_groups[0]["lr"], result.metrics["train/loss"],
    )  # fmt: skip


def test_a_run_resumed_with_another_total_follows_the_new_schedule_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, optimizer="adamw_warmup_cosine_decay", optimizer_params=WARMUP, training_steps=5).fit()
    longer = {**WARMUP, "total_steps": 100}
    resumed = make(tmp_path, optimizer="adamw_warmup_cosine_decay", optimizer_params=longer)
    with caplog.at_level(logging.INFO, "etude"):
        resumed.fit()
    assert "optimizer policy goes on with total_steps 10 -> 100, as the configuration says now" in caplog.text
    group = resumed.optimizer.param_groups[0]
    assert group["made"] == 8
    assert group["lr"] == rates(build("adamw_warmup_cosine_decay", **longer), 9)[8]


@pytest.mark.parametrize("key, options", EACH)
@pytest.mark.slow
def test_every_engine_gives_the_same_weights(tmp_path: Path, key: str, options: dict[str, Any]) -> None:
    settings = {"optimizer": key, "optimizer_params": options}
    found = {}
    for engine in ("torch", "huggingface", "lightning"):
        trainer = make(tmp_path / engine, **settings)
        trainer.engine = engine
        trainer.fit()
        tree = CheckpointStore(tmp_path / engine / "checkpoints").load().tree
        found[engine] = [*weights(trainer), *tree["policy"].values(), *tree.get("shown", {}).values()]
        if key == "schedule_free_radam":  # what is shown is what is left; training goes on from others
            assert torch.equal(tree["shown"]["0.weight"], trainer.policy.get_parameter("0.weight"))
            assert not torch.equal(tree["shown"]["0.weight"], tree["policy"]["0.weight"])
    for engine in ("huggingface", "lightning"):
        assert all(torch.equal(a, b) for a, b in zip(found["torch"], found[engine], strict=True))


# -- modes, in trainers that make the update themselves, and in what is loaded ----------------------------------------


class TwoParts:
    """Puts its optimizers into training mode at every step, as trainers written for these optimizers do."""

    def __init__(self, models: Any, optimizers: Any, loss: Any, device: Any) -> None:
        self.models, self.optimizers = models, optimizers

    def train_step(self, data: dict[str, Tensor]) -> dict[str, Any]:
        for optimizer in self.optimizers.values():
            if hasattr(optimizer, "train"):
                optimizer.train()
            optimizer.zero_grad()
        loss = (self.models["head"](self.models["trunk"](data["x"]).tanh()) - data["y"]).square().mean()
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return {"loss": loss}


def two_parts(run: Any = False, callbacks: Any = (), **options: Any) -> Trainer:
    torch.manual_seed(0)
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    optimizers = {
        "trunk": OptimizerConfiguration(match=["trunk"], type="schedule_free_radam", params={"lr": 0.1}),
        "head": OptimizerConfiguration(match=["head"], type="adamw_warmup_cosine_decay", params=WARMUP),
    }
    settings = {"training_steps": 8, "batch_size": 4, "save_every": 1, "shuffle": False, **options}
    trainer: Trainer = wrap_train_step(TwoParts, {})(
        nn.ModuleDict({"trunk": nn.Linear(3, 8), "head": nn.Linear(8, 1)}), {"x": x, "y": x.sum(1, keepdim=True)},
        config=TrainingConfiguration(optimizers=optimizers, **settings), run=run, loggers=[], show_progress=False,
        callbacks=callbacks,
    )  # fmt: skip
    return trainer


def test_a_trainer_with_two_optimizers_of_which_one_has_modes_goes_on_exactly(tmp_path: Path) -> None:
    straight = two_parts()
    straight.fit()
    assert run_ranks(lambda: two_parts(tmp_path, [Die()]).fit(), 1) == [-signal.SIGKILL]
    resumed = two_parts(tmp_path)
    resumed.fit()
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))
    tree = CheckpointStore(tmp_path / "checkpoints").load().tree
    assert set(tree["shown"]) == {"trunk.weight", "trunk.bias"}
    assert torch.equal(tree["shown"]["trunk.weight"], weights(resumed)[0])
    assert run_ranks(lambda: two_parts(tmp_path / "two", batch_size=2).fit(), 2) == [0, 0]
    shown = CheckpointStore(tmp_path / "two" / "checkpoints").load().tree["shown"]
    assert float((shown["trunk.weight"] - weights(straight)[0]).abs().max()) < 1e-5


def test_a_loaded_policy_has_the_weights_that_are_shown(tmp_path: Path) -> None:
    spec = DataSpec({
        "observation.state": Feature((3,), role="state", stats={"mean": [0.0] * 3, "std": [1.0] * 3}),
        "action": Feature((1,), role="action", stats={"mean": [0.0], "std": [1.0]}),
    })  # fmt: skip
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    data = MapData(Columns({"observation.state": x, "action": x.sum(1, keepdim=True)}), spec=spec)
    config = TrainingConfiguration(
        training_steps=8, batch_size=4, optimizer="schedule_free_radam", optimizer_params={"lr": 0.1}
    )
    trainer = Trainer(MLP(hidden=[8]), data, config=config, run=tmp_path, loggers=[], show_progress=False)
    trainer.fit()
    loaded = load_policy(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(weights(trainer), loaded.parameters(), strict=True))
    tree = CheckpointStore(tmp_path / "checkpoints").load().tree
    assert any(not torch.equal(tree["policy"][name], value) for name, value in tree["shown"].items())
