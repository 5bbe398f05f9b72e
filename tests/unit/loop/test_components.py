"""Trainers made from (models, optimizers, loss, device): what they are given, what they keep, and several ranks."""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etude import Trainer, TrainingConfiguration
from etude.config.training import OptimizerConfiguration
from etude.data.coerce import as_data
from etude.errors import ConfigError, DataError
from etude.runs.checkpoint import CheckpointStore
from etude.trainer import wrap_train_step
from tests.callbacks import DieAt
from tests.processes import run_ranks


def components() -> nn.ModuleDict:
    torch.manual_seed(0)
    experts = {name: nn.Linear(3, 1) for name in ("low", "high", "spare")}
    return nn.ModuleDict({"trunk": nn.Linear(3, 3), **experts})


def rows() -> dict[str, Tensor]:
    """Twelve batches of four, of which the first half has x[0] < 0 and the second half x[0] > 0."""
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    x[:, 0] = x[:, 0].abs() * torch.tensor([-1.0, -1.0, 1.0, 1.0]).repeat(12)
    return {"x": x, "y": x.sum(1, keepdim=True)}


class Experts:
    """Uses the expert that a sample asks for, clips each component, and steps every optimizer."""

    def __init__(self, models: Any, optimizers: Any, loss: Any, device: Any) -> None:
        self.models, self.optimizers, self.loss = models, optimizers, loss

    def train_step(self, data: dict[str, Tensor]) -> dict[str, Any]:
        models = self.models
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        hidden, total = models["trunk"](data["x"]).tanh(), torch.zeros(())
        for name, chosen in (("low", data["x"][:, 0] < 0), ("high", data["x"][:, 0] > 0)):
            if chosen.any():
                total = total + (models[name](hidden[chosen]) - data["y"][chosen]).square().sum() / len(data["x"])
        total.backward()
        for model in models.values():
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return {"total": total, "twice": 2 * total.item()}


def make(kind: Any, run: Any = False, data: Any = None, callbacks: Any = (), params: Any = None, **options: Any) -> Any:
    settings = {"training_steps": 6, "batch_size": 4, "shuffle": False, "log_every": 1, **options}
    settings.setdefault(
        "optimizers",
        {
            "trunk": OptimizerConfiguration(match=["trunk"], lr=0.05),
            "experts": OptimizerConfiguration(match=["low", "high", "spare"], lr=0.05, type="adamw", weight_decay=0.1),
        },
    )
    return wrap_train_step(kind, params or {})(
        components(), rows() if data is None else data, config=TrainingConfiguration(**settings), run=run,
        loggers=[], show_progress=False, callbacks=callbacks,
    )  # fmt: skip


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# -- several ranks ---------------------------------------------------------------------------------------------------


def test_ranks_that_use_different_experts_take_the_step_of_one_process(tmp_path: Path) -> None:
    assert run_ranks(lambda: make(Experts, tmp_path, batch_size=2).fit(), 2) == [0, 0]
    tree = CheckpointStore(tmp_path / "checkpoints").load().tree
    alone = make(Experts)
    result = alone.fit()
    found = weights(alone)
    assert max(float((tree["policy"][name] - value).abs().max()) for name, value in found.items()) < 1e-6
    assert same({"spare": tree["policy"]["spare.weight"]}, {"spare": components()["spare"].weight.detach()})
    assert tree["session"]["metrics"]["train/total"] == pytest.approx(result.metrics["train/total"], rel=1e-5)
    assert result.metrics["train/loss"] == pytest.approx(result.metrics["train/total"])
    assert result.metrics["train/twice"] == pytest.approx(2 * result.metrics["train/loss"])


def test_a_component_that_nobody_optimizes_is_named_by_one_rank(tmp_path: Path) -> None:
    def work() -> None:
        handler = logging.FileHandler(tmp_path / f"said-{os.environ['RANK']}")
        logging.getLogger("etude").addHandler(handler)
        trunk = {"trunk": OptimizerConfiguration(match=["trunk"], lr=0.05)}
        make(Experts, batch_size=2, training_steps=1, optimizers=trunk).fit()

    assert run_ranks(work, 2, timeout_s=60) == [0, 0]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said == ["low, high, spare have neither an optimizer nor freeze: they are not updated\n", ""]


def test_a_policy_may_be_used_by_one_rank_alone_after_training(tmp_path: Path) -> None:
    def work() -> None:
        trainer = make(Experts, batch_size=2, training_steps=1)
        trainer.fit()
        if trainer.rank == 0:
            trainer.policy["trunk"](torch.ones(1, 3)).sum().backward()
        trainer.fit()

    assert run_ranks(work, 2, timeout_s=60) == [0, 0]


class Apart(Experts):
    """Steps only the optimizer of the expert it used."""

    def train_step(self, data: dict[str, Tensor]) -> dict[str, Any]:
        name = "trunk" if float(data["x"][0, 0]) < 0 else "experts"
        module = self.models["trunk"] if name == "trunk" else self.models["low"]
        module(data["x"]).square().mean().backward()
        self.optimizers[name].step()
        return {"loss": 0.0}


def test_ranks_that_step_different_optimizers_are_told_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    codes = run_ranks(lambda: make(Apart, batch_size=2).fit(), 2)
    assert all(codes)
    said = capfd.readouterr().err
    assert "the ranks part ways in train_step: rank 0 is about to step 'trunk', rank 1 is about to step" in said


class Twice(Experts):
    """Goes back several times a step, on one rank more often than on the other."""

    def train_step(self, data: dict[str, Tensor]) -> dict[str, Any]:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        for name, chosen in (("low", data["x"][:, 0] < 0), ("high", data["x"][:, 0] > 0)):
            if chosen.any():
                found = self.models[name](self.models["trunk"](data["x"][chosen]))
                ((found - data["y"][chosen]).square().sum() / len(data["x"])).backward()
        if "spare" in self.models and bool((data["x"][:, 0] < 0).any()):
            self.models["spare"](data["x"][data["x"][:, 0] < 0]).square().sum().div(len(data["x"])).backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return {"loss": 0.0}


def test_ranks_may_go_back_a_different_number_of_times(tmp_path: Path) -> None:
    assert run_ranks(lambda: make(Twice, tmp_path, batch_size=2).fit(), 2) == [0, 0]
    tree = CheckpointStore(tmp_path / "checkpoints").load().tree
    alone = make(Twice)
    alone.fit()
    assert max(float((tree["policy"][name] - value).abs().max()) for name, value in weights(alone).items()) < 1e-6


# -- what is kept ----------------------------------------------------------------------------------------------------


class Keeper(Experts):
    """Keeps counters, averages, a schedule, a head of its own and a history, and trains by all of them."""

    def __init__(self, models: Any, optimizers: Any, loss: Any, device: Any, decay: float = 0.9) -> None:
        super().__init__(models, optimizers, loss, device)
        self.average = copy.deepcopy(models["low"]).requires_grad_(False)
        self.head = nn.Linear(1, 1).requires_grad_(False)
        self.scale, self.count, self.decay, self.recent = torch.ones(3), 0, decay, deque(maxlen=3)
        self.table: dict[str, Any] = {"seen": 0, "norms": np.zeros(2)}
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizers["trunk"], lambda step: 0.8**step)
        self.random = torch.Generator().manual_seed(7)

    def train_step(self, data: dict[str, Tensor], **kwargs: Any) -> dict[str, Any]:
        self.count += 1
        self.table["seen"] += len(data["x"])
        noise = 0.01 * torch.randn(data["x"].shape, generator=self.random)
        drawn = {**data, "x": data["x"] * self.scale + noise + 0.01 * self.count}
        drawn["y"] = data["y"] + self.head(self.average(drawn["x"]))
        found = super().train_step(drawn)
        self.schedule.step()
        self.recent.append(found["twice"])
        self.table["norms"] = self.table["norms"] + found["twice"]
        with torch.no_grad():
            self.scale.mul_(1.01)
            self.average.weight.lerp_(self.models["low"].weight, 1 - self.decay)
        return {**found, **{name: value for name, value in kwargs.items() if value is not None}}


class ModuleKeeper(nn.Module):
    """The same as a module, as the trainers of others are."""

    def __init__(self, models: Any, optimizers: Any, loss: Any, device: Any) -> None:
        super().__init__()
        self.models, self.average, self.count = models, copy.deepcopy(models["low"]), 0
        self.inner = Experts(models, optimizers, loss, device)
        self.register_buffer("scale", torch.ones(3))
        self.average.requires_grad_(False)

    def train_step(self, data: dict[str, Tensor], epoch: int) -> dict[str, Any]:
        self.count += 1
        drawn = {**data, "y": data["y"] + self.average(data["x"] * self.scale) + 0.01 * self.count + epoch}
        self.scale.mul_(1.01)
        self.average.weight.lerp_(self.models["low"].weight.detach(), 0.1)
        return self.inner.train_step(drawn)


class Dictated(Experts):
    """Says itself what to save."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.hidden = [0]

    def train_step(self, data: dict[str, Tensor]) -> dict[str, Any]:
        self.hidden[0] += 1
        return super().train_step({**data, "y": data["y"] * self.hidden[0]})

    def state_dict(self) -> dict[str, Any]:
        return {"hidden": self.hidden[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hidden = [state["hidden"]]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["huggingface", "lightning"])
def test_other_engines_give_the_same_numbers(engine: str) -> None:
    straight, other = make(Keeper), make(Keeper)
    other.engine = engine
    straight.fit()
    other.fit()
    assert same(weights(straight), weights(other))
    assert torch.equal(straight.inner.average.weight, other.inner.average.weight)


def test_evaluation_data_that_no_one_can_judge_is_refused() -> None:
    trainer = make(Experts)
    trainer.algorithm, trainer.eval_data = nn.MSELoss(), rows()
    with pytest.raises(ConfigError, match="eval_data: Experts has no loss outside of its train_step"):
        trainer.fit()


@pytest.mark.parametrize("kind", [Keeper, ModuleKeeper, Dictated])
def test_a_killed_run_ends_bit_for_bit_like_an_undisturbed_one(kind: Any, tmp_path: Path) -> None:
    saving = {"save_every": 1, "training_steps": 14}
    straight = make(kind, tmp_path / "a", **saving)
    whole = straight.fit()
    killed = run_ranks(lambda: make(kind, tmp_path / "b", callbacks=[DieAt(4)], **saving).fit(), 1)
    assert killed == [-signal.SIGKILL]
    resumed = make(kind, tmp_path / "b", **saving)
    result = resumed.fit()
    assert same(weights(straight), weights(resumed))
    timed = [name for name in whole.metrics if name.startswith("time/")]
    assert {k: v for k, v in whole.metrics.items() if k not in timed} == {
        k: v for k, v in result.metrics.items() if k not in timed
    }
    assert getattr(resumed.inner, "count", 14) == 14


def test_a_setting_that_was_changed_since_keeps_its_new_value(tmp_path: Path) -> None:
    make(Keeper, tmp_path, training_steps=3).fit()
    resumed = make(Keeper, tmp_path, params={"decay": 0.5}, training_steps=5)
    resumed.fit()
    assert (resumed.inner.decay, resumed.inner.count) == (0.5, 5)


def test_what_cannot_be_saved_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Experts):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.thing = memoryview(b"x")

    with caplog.at_level(logging.WARNING, "etude"):
        make(Odd, training_steps=1).fit()
    assert "Odd keeps thing (memoryview), which cannot be saved" in caplog.text


def test_a_train_step_is_told_what_it_asks_for() -> None:
    seen: list[dict[str, Any]] = []

    class Told(Experts):
        def train_step(self, data: dict[str, Tensor], total_epochs: int, **kwargs: Any) -> dict[str, Any]:
            seen.append({"total_epochs": total_epochs, **kwargs})
            return super().train_step(data)

    make(Told, duration="2 epochs").fit()
    assert seen[0] == {"epoch": 0, "total_epochs": 2, "iterations": 0}
    assert [told["epoch"] for told in seen] == [0] * 12 + [1] * 12
    assert seen[-1]["iterations"] == 23


# -- statistics ------------------------------------------------------------------------------------------------------


class Spy(Experts):
    """Notes the batches it is given."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.seen: list[dict[str, Tensor]] = []

    def train_step(self, data: dict[str, Tensor]) -> dict[str, Any]:
        self.seen.append(data)
        return {"loss": 0.0}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


STATS = {
    "x": {"mean": np.array([1.0, 2.0, 3.0]), "std": np.array([2.0, 4.0, 0.0]), "count": np.array([48])},
    "action": {"min": [0.0], "max": [10.0]},
    "index": {"mean": [5.0], "std": [3.0]},
    "absent": {"mean": [0.0], "std": [1.0]},
}


def with_stats(stats: Any = STATS) -> Any:
    x = torch.tensor([[3.0, 6.0, 3.0], [1.0, 2.0, 4.0]], dtype=torch.float64).repeat(4, 1)
    columns = {"x": x, "action": torch.tensor([[0.0], [10.0]]).repeat(4, 1), "index": torch.arange(8)[:, None]}
    data: Any = as_data(columns)
    data.norm_stats = stats
    return data


def test_statistics_normalise_every_key_they_name_before_casting(tmp_path: Path) -> None:
    trainer = make(Spy, tmp_path, with_stats(), batch_size=2, training_steps=1)
    trainer.fit()
    batch = trainer.inner.seen[0]
    assert batch["x"].tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]  # the last dimension never moved in the data
    assert batch["x"].dtype == torch.float32
    assert batch["action"].tolist() == [[-1.0], [1.0]]
    assert batch["index"].tolist() == [[0], [1]]  # an index has no scale
    assert json.loads((tmp_path / "dataset_stats.json").read_text())["x"]["std"] == [2.0, 4.0, 0.0]
    tree = CheckpointStore(tmp_path / "checkpoints").load().tree
    assert tree["norm_stats"]["x"]["mean"].tolist() == [1.0, 2.0, 3.0]


def test_a_resumed_run_goes_on_with_the_statistics_it_was_trained_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(Spy, tmp_path, with_stats(), batch_size=2, training_steps=1).fit()
    other = {**STATS, "x": {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}}
    resumed = make(Spy, tmp_path, with_stats(other), batch_size=2, training_steps=2)
    resumed.fit()
    assert "the data's statistics of x have changed; going on with those of the checkpoint" in caplog.text
    assert resumed.inner.seen[0]["x"].tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "stats, message",
    [
        ({"mean": 1.0}, "norm_stats must be {key: {mean, std}}, got float for 'mean'"),
        ({"z": {"mean": [0.0], "std": [1.0]}}, "norm_stats name z, none of which is in the batch: x, action, index"),
        ({"x": {"mean": [0.0, 1.0], "std": [1.0, 1.0]}}, r"norm_stats of 'x' have shape \(2,\), which does not fit"),
        ({"x": {"count": [3]}}, "norm_stats of 'x' have no mean and std, but count"),
        ({"x": {"mean": [0.0]}}, "x has no std"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(stats: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(Spy, False, with_stats(stats), batch_size=2, training_steps=1).fit()


class Acting(nn.Module):
    """A policy that acts, and knows nothing of statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: Any) -> Any:
        return (self.layer(batch["x"].float()) - batch["action"]).square().mean()

    def select_action(self, observation: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.layer(observation["x"])
        return found


def test_a_policy_acts_in_the_units_of_the_data_and_is_evaluated_normalised() -> None:
    policy = Acting()
    config = TrainingConfiguration(training_steps=1, batch_size=2, lr=0.0)
    trainer = Trainer(
        policy, with_stats(), config=config, run=False, loggers=[], show_progress=False, eval_data=with_stats(None)
    )
    result = trainer.fit()
    seen = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    expected = (policy.layer(seen) - torch.tensor([[-1.0], [1.0]])).square().mean()
    assert result.metrics["eval/loss"] == pytest.approx(expected.item())
    chosen = copy.deepcopy(policy).select_action({"x": torch.tensor([[3.0, 6.0, 9.0]])})
    assert torch.allclose(chosen, policy.layer(seen[:1]) * 5 + 5)
