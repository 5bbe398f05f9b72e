"""The optimizer that one sees is the one that steps: changed, replaced or with a scheduler, and resumed exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR, ReduceLROnPlateau, SequentialLR, StepLR

from etude import Callback, Trainer, TrainingConfiguration
from etude.config.training import OptimizerConfiguration
from etude.errors import ConfigError
from etude.loop.optimizers import Optimization
from tests.crash.harness import compare
from tests.unit.rollouts.test_harness import Guess, GuessSampler, Reinforce


def make(kind: type[Trainer] = Trainer, run: Any = False, callbacks: Any = (), **config: Any) -> Trainer:
    torch.set_num_threads(1)
    settings = {"training_steps": 4, "num_episodes_per_experience": 4, "batch_size": 5, "lr": 1e-2, "log_every": 1,
                "ema_decay": 0.9}  # fmt: skip
    sampler = GuessSampler(Guess())
    return kind(
        config=TrainingConfiguration(**{**settings, **config}), sampler=sampler, algorithm=Reinforce(sampler.system),
        run=run, loggers=[], show_progress=False, callbacks=callbacks,
    )  # fmt: skip


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()]).clone()


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        self.seen.append(trainer.optimizer.param_groups[0]["lr"])


class Plain(Trainer):
    """Looks, and changes nothing."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        assert self.optimizer.param_groups[0]["lr"] == 1e-2


class Slower(Trainer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.optimizer.param_groups[0]["lr"] = 1e-4


class Replaced(Trainer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.5, momentum=0.9)


class Scheduled(Trainer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=0.5)


class Joined(Trainer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.warmup = LinearLR(self.optimizer, 0.1, total_iters=2)
        self.decay = MultiStepLR(self.optimizer, [1, 2], 0.5)
        self.scheduler = SequentialLR(self.optimizer, [self.warmup, self.decay], milestones=[2])


class Lambdas(Trainer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))


class Plateau(Trainer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.scheduler = ReduceLROnPlateau(self.optimizer, factor=0.1, patience=0)

    def evaluate(self) -> Any:
        self.scheduler.step(1.0)
        return {"loss": 1.0}


def test_looking_at_it_changes_nothing() -> None:
    trained = []
    for kind in (Trainer, Plain):
        trainer = make(kind)
        trainer.train()
        trained.append(weights(trainer))
    assert torch.equal(*trained)


def test_a_changed_rate_is_the_rate() -> None:
    trainer, configured = make(Slower), make(lr=1e-4)
    result = trainer.train()
    configured.train()
    assert result.metrics["lr/policy"] == 1e-4
    assert torch.equal(weights(trainer), weights(configured))


def test_a_replaced_optimizer_is_the_one_that_steps() -> None:
    trainer = make(Replaced)
    chosen = trainer.optimizer
    steps = []
    chosen.register_step_pre_hook(lambda *_: steps.append(1))
    trainer.train()
    assert trainer.optimizer is chosen is trainer.optimizers["policy"]
    assert len(steps) == 12
    configured = make(optimizer="sgd", lr=0.5, optimizer_params={"momentum": 0.9})
    configured.train()
    assert torch.allclose(weights(trainer), weights(configured), atol=1e-6)  # ours is fused


def test_a_scheduler_goes_once_a_step_however_many_updates_a_step_has() -> None:
    rates = Rates()
    make(Scheduled, callbacks=[rates]).train()
    assert rates.seen == pytest.approx([5e-3, 2.5e-3, 1.25e-3, 6.25e-4])


def test_a_scheduler_that_needs_a_metric_is_left_to_its_owner() -> None:
    rates = Rates()
    make(Plateau, callbacks=[rates], evaluate_every=1).train()
    assert rates.seen == pytest.approx([1e-2, 1e-2, 1e-3, 1e-4])


@pytest.mark.parametrize("kind", [Slower, Replaced, Scheduled, Joined, Lambdas, Plateau])
def test_it_resumes_exactly(tmp_path: Path, kind: type[Trainer]) -> None:
    settings: dict[str, Any] = {"save_every": 1, "keep_last": 20, "evaluate_every": 1}
    make(kind, tmp_path / "whole", **settings).train()
    make(kind, tmp_path / "parts", **{**settings, "training_steps": 2}).train()
    make(kind, tmp_path / "parts", **settings).train()
    assert compare(tmp_path / "parts", tmp_path / "whole") is None


def test_a_trainer_of_policy_and_data_does_the_same() -> None:
    data = {"observation": torch.randn(8, 2)}

    class Own(Trainer):
        def compute_loss(self, policy: Any, batch: Any) -> Any:
            return policy(batch["observation"]).square().mean()

    trainer = Own(nn.Linear(2, 1), data, config=TrainingConfiguration(training_steps=2), run=False, show_progress=False)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=0.0)
    before = weights(trainer)
    trainer.fit()
    assert torch.equal(before, weights(trainer))


def test_what_cannot_be_is_refused() -> None:
    several = {name: OptimizerConfiguration(match=[name]) for name in ("0.*", "3.*")}
    with pytest.raises(ConfigError, match=r"names 0\.\*, 3\.\*: trainer\.optimizer cannot stand for all"):
        make(Slower, optimizers=several)
    with pytest.raises(ConfigError, match="must be a torch optimizer, got float"):
        make().optimizer = 0.1  # type: ignore[assignment]
    trainer = make()
    trainer.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="holds parameters that the policy does not have"):
        trainer.train()
    with pytest.raises(ConfigError, match=r"both training\.schedule .cosine, 0 warm-up steps. and StepLR"):
        make(Scheduled, schedule="cosine").train()

    class Twice(Scheduled):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.another = LinearLR(self.optimizer)

    with pytest.raises(ConfigError, match="StepLR and LinearLR are both attached"):
        make(Twice).train()

    class Elsewhere(Slower):
        def configure_optimizers(self) -> Any:
            return Optimization(torch.optim.SGD(self.policy.parameters(), lr=0.1))

    with pytest.raises(ConfigError, match="configure_optimizers returns another"):
        make(Elsewhere).train()

    class Late(Callback):
        def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
            trainer.optimizer = torch.optim.SGD(trainer.policy.parameters())

    with pytest.raises(ConfigError, match="cannot be replaced during training"):
        make(callbacks=[Late()]).train()


def test_an_override_may_return_it() -> None:
    class Returned(Slower):
        def configure_optimizers(self) -> Any:
            return self.optimizer

    assert make(Returned).train().metrics["lr/policy"] == 1e-4


def test_a_scheduler_that_nobody_keeps_is_pointed_out(caplog: Any) -> None:
    trainer = make()
    StepLR(trainer.optimizer, 1)
    trainer.train()
    assert "keep it as an attribute" in caplog.text


def test_a_copied_trainer_steps_its_own() -> None:
    """As workers of Ray get one."""
    original = make(Scheduled)
    rates = Rates()
    copied = copy.deepcopy(original)
    copied.callbacks.append(rates)
    copied.train()
    assert rates.seen == pytest.approx([5e-3, 2.5e-3, 1.25e-3, 6.25e-4])
    assert not torch.equal(weights(original), weights(copied))
