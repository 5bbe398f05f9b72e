"""What an optimizer is built with, what it keeps, and how its configuration and its checkpoint agree."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn

from etude import Callback, Trainer, TrainingConfiguration
from etude.config.training import OptimizerConfiguration
from etude.errors import ConfigError
from etude.loop.optimizers import build_optimizer, torch_optimizers
from etude.registry import OPTIMIZER_BUILDER_REGISTRY
from etude.runs.checkpoint import CheckpointStore
from tests.processes import run_ranks


class Squares(Trainer):
    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> Any:
        return (policy(batch["x"]) - batch["y"]).square().mean()


def rows() -> dict[str, Tensor]:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": x.sum(1, keepdim=True)}


def make(run: Any = False, callbacks: Any = (), eval_data: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    config = TrainingConfiguration(**{"training_steps": 8, "batch_size": 4, **options})
    return Squares(
        policy, rows(), config=config, run=run, loggers=[], show_progress=False, callbacks=callbacks,
        eval_data=eval_data,
    )  # fmt: skip


def weights(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.policy.parameters()]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


class Sgd:
    """An optimizer factory with a rate of its own."""

    def __init__(self, lr: float = 3e-4, momentum: float = 0.0) -> None:
        self.options = {"lr": lr, "momentum": momentum}

    def build(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, **self.options)


class Peak(Sgd):
    """One that calls its rate something else."""

    def __init__(self, peak_lr: float = 0.5) -> None:
        super().__init__(peak_lr)


class Strict(Sgd):
    """One without a rate of its own."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)


class Owner(torch.optim.SGD):
    """An optimizer that owns its schedule and counts its steps, and says so in a state of its own."""

    def __init__(self, params: Any, lr: float, total: int) -> None:
        super().__init__(params, lr=lr)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self, max_lr=lr, total_steps=total)
        self.made = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.made += 1
        if self.made < self.scheduler.total_steps:
            self.scheduler.step()
        return result

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict.pop("scheduler"))
        super().load_state_dict(state_dict)


class OwnerFactory:
    def __init__(self, lr: float = 0.5, total: int = 20) -> None:
        self.lr, self.total = lr, total

    def build(self, params: Any) -> torch.optim.Optimizer:
        return Owner(params, self.lr, self.total)


class ScheduleFree:
    def __init__(self, lr: float = 0.05, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self.options = {"lr": lr, "betas": betas, "silent_sgd_phase": False}

    def build(self, params: Any) -> torch.optim.Optimizer:
        return schedulefree.RAdamScheduleFree(params, **self.options)


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    made = {"own_sgd": Sgd, "peak": Peak, "strict": Strict, "owner": OwnerFactory, "schedule_free": ScheduleFree}
    for key, kind in made.items():
        OPTIMIZER_BUILDER_REGISTRY.add(key, kind)
    yield
    for key in made:
        del OPTIMIZER_BUILDER_REGISTRY._entries[key]


# -- what the configuration says -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(torch_optimizers()))
def test_torch_optimizers_get_the_weight_decay_of_the_configuration_also_if_it_is_zero(kind: str) -> None:
    group = build_optimizer(OptimizerConfiguration(type=kind), parameters()).param_groups[0]
    assert group.get("weight_decay", 0.0) == 0.0
    assert group["lr"] == 1e-3


def test_no_weight_decay_trains_as_adam_does() -> None:
    plain, decayed = make(lr=0.1), make(lr=0.1, weight_decay=0.01)
    adam = make(lr=0.1, optimizer="adam")
    for trainer in (plain, decayed, adam):
        trainer.fit()
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(adam), strict=True))
    assert not torch.equal(weights(plain)[0], weights(decayed)[0])


def test_a_weight_decay_that_an_optimizer_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="'rprop' has no parameter 'weight_decay'"):
        build_optimizer(OptimizerConfiguration(type="rprop", weight_decay=0.1), parameters())


def test_a_run_that_was_saved_with_another_decay_goes_on_with_the_configured_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, training_steps=4, weight_decay=0.01).fit()
    resumed = make(tmp_path)
    with caplog.at_level(logging.INFO, "etude"):
        resumed.fit()
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.0
    assert "optimizer policy goes on with weight_decay 0.01 -> 0.0, as the configuration says now" in caplog.text


# -- factories -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, rate",
    [
        ({}, 3e-4),
        ({"lr": 1e-3}, 1e-3),
        ({"lr": 0.0}, 0.0),
        ({"optimizer_params": {"lr": 0.2}}, 0.2),
        ({"optimizer": "strict"}, 1e-3),
        ({"optimizer": "peak"}, 0.5),
        ({"optimizer": "peak", "optimizer_params": {"peak_lr": 0.25}}, 0.25),
    ],
)
def test_a_factory_keeps_its_own_rate_unless_the_configuration_says_another(
    settings: dict[str, Any], rate: float
) -> None:
    config = TrainingConfiguration(**{"optimizer": "own_sgd", **settings}).named_optimizers()["policy"]
    assert build_optimizer(config, parameters()).param_groups[0]["lr"] == rate
    params = {"params": settings["optimizer_params"]} if "optimizer_params" in settings else {}
    said = {key: value for key, value in settings.items() if key == "lr"}
    named = OptimizerConfiguration(type=settings.get("optimizer", "own_sgd"), **params, **said)
    assert build_optimizer(named, parameters()).param_groups[0]["lr"] == rate


def test_a_rate_said_twice_or_to_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr is said twice"):
        build_optimizer(OptimizerConfiguration(type="own_sgd", lr=1.0, params={"lr": 2.0}), parameters())
    with pytest.raises(ConfigError, match=r"'peak' has no parameter 'lr', so lr: 0\.1 would do nothing; it takes p"):
        build_optimizer(OptimizerConfiguration(type="peak", lr=0.1), parameters())


def test_a_schedule_inside_an_optimizer_resumes_exactly(tmp_path: Path) -> None:
    options = {"optimizer": "owner", "training_steps": 12}
    straight = make(**options)
    straight.fit()
    make(tmp_path, optimizer="owner", training_steps=5).fit()
    resumed = make(tmp_path, **options)
    resumed.fit()
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))
    owner: Any = resumed.optimizer
    assert (owner.made, owner.scheduler.last_epoch) == (12, 12)


def test_a_schedule_whose_length_was_changed_keeps_the_new_length(tmp_path: Path) -> None:
    make(tmp_path, optimizer="owner", training_steps=5).fit()
    resumed = make(tmp_path, optimizer="owner", training_steps=6, optimizer_params={"total": 40})
    resumed.fit()
    owner: Any = resumed.optimizer
    assert (owner.scheduler.total_steps, owner.made) == (40, 6)


# -- modes -----------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Notes which mode the optimizer is in, and the weights that are shown."""

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        self.seen["step"] = trainer.optimizer.param_groups[0]["train_mode"]

    def on_save(self, trainer: Any, step: int) -> None:
        self.seen["save"] = trainer.optimizer.param_groups[0]["train_mode"]


def by_hand(steps: int) -> nn.Module:
    trainer = make()
    policy, data = trainer.policy, rows()
    optimizer = schedulefree.RAdamScheduleFree(policy.parameters(), lr=0.05, betas=(0.9, 0.99), silent_sgd_phase=False)
    optimizer.train()
    for step in range(steps):
        x, y = (data[key][(4 * step) % 24 : (4 * step) % 24 + 4] for key in ("x", "y"))
        optimizer.zero_grad()
        (policy(x) - y).square().mean().backward()
        optimizer.step()
    optimizer.eval()
    return policy


def test_optimizers_with_modes_train_and_are_evaluated_saved_and_left_in_the_right_one(tmp_path: Path) -> None:
    watch = Watch()
    options = {"optimizer": "schedule_free", "shuffle": False, "clip_norm": None}
    trainer = make(tmp_path, [watch], rows(), save_every=2, evaluate_every=3, **options)
    result = trainer.fit()
    assert watch.seen == {"step": True, "save": False}
    expected = by_hand(8)
    assert all(torch.equal(a, b) for a, b in zip(weights(trainer), expected.parameters(), strict=True))
    loss = (expected(rows()["x"]) - rows()["y"]).square().mean().item()
    assert result.metrics["eval/loss"] == pytest.approx(loss, rel=1e-6)
    tree = CheckpointStore(tmp_path / "checkpoints").load().tree
    assert torch.equal(tree["shown"]["0.weight"], expected[0].weight)  # type: ignore[index]
    assert not torch.equal(tree["policy"]["0.weight"], expected[0].weight)  # type: ignore[index]


def test_a_run_with_modes_resumes_exactly_whatever_was_saved_and_evaluated_on_the_way(tmp_path: Path) -> None:
    straight = make(optimizer="schedule_free")
    straight.fit()
    make(tmp_path, optimizer="schedule_free", training_steps=5, save_every=1).fit()
    resumed = make(tmp_path, optimizer="schedule_free", eval_data=rows(), evaluate_every=2)
    resumed.fit()
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))


def test_optimizers_with_modes_on_two_ranks_equal_one_process(tmp_path: Path) -> None:
    assert run_ranks(lambda: make(tmp_path, optimizer="schedule_free", batch_size=2).fit(), 2) == [0, 0]
    alone = make(optimizer="schedule_free")
    alone.fit()
    shown = CheckpointStore(tmp_path / "checkpoints").load().tree["shown"]
    assert max(float((shown[n] - p.detach()).abs().max()) for n, p in alone.policy.named_parameters()) < 1e-6
