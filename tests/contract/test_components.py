"""A trainer of components under contract: two optimizers, one frozen component, and what the trainer itself keeps."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude import Callback, TrainingConfiguration
from etude.config.training import OptimizerConfiguration
from etude.policies import ComponentPolicy
from etude.trainer import wrap_train_step
from tests.contract.probes import end_of, good, largest_difference
from tests.contract.subjects import ENGINES, SendSignal, Subject
from tests.contract.test_contract import _engines_are_imported_before_anything_is_forked  # noqa: F401
from tests.crash.harness import compare
from tests.processes import run_ranks

ALONE = Subject("torch")
REPEATED = (Subject("ray"), Subject("huggingface", 2), Subject("lightning", 2))
"""What others show by the same code: probed by `make test-all`."""
SUBJECTS = [
    pytest.param(one, id=str(one), marks=[pytest.mark.nightly] if one in REPEATED else [])
    for one in (Subject(engine, ranks) for engine in ENGINES for ranks in (1, 2))
]


def linear(inputs: int, outputs: int) -> dict[str, Any]:
    layers = [{"_type_": "Linear", "_args_": [inputs, outputs]}, {"_type_": "Dropout", "_kwargs_": {"p": 0.1}}]
    return {"schema_version": 1, "model": {"sequential": {"inputs": ["x"], "layers": layers}}}


class TwoExperts:
    """Uses the expert that a sample asks for, averages losses, and sees to it that what is frozen stays so."""

    def __init__(self, models: Any, optimizers: Any, loss: Any, device: Any) -> None:
        self.models, self.optimizers = models, optimizers
        self.average = torch.zeros(())

    def train_step(self, data: dict[str, Tensor], epoch: int, iterations: int) -> dict[str, Any]:
        models = self.models
        for model in models.values():
            model.train()
        assert not models["backbone"].training
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        hidden, total = models["backbone"](data["x"]), torch.zeros(())
        for name, chosen in (("low", data["x"][:, 0] < 0), ("high", data["x"][:, 0] >= 0)):
            if chosen.any():
                error = models[name].graph_modules["layer0"](hidden[chosen]) - data["y"][chosen]
                total = total + error.square().sum() / len(data["x"])
        total.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.average = 0.9 * self.average + 0.1 * total.detach()
        return {"total": total, "average": self.average, "epoch_now": epoch, "iterations": iterations}


class Evaluates(Callback):
    """Evaluates in between, after which what is frozen must be in eval mode again."""

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        """Evaluate after every third step."""
        if trainer.progress.step % 3 == 0:
            trainer.session.measure(lambda: {"modes": float(trainer.policy.training)})
            assert not trainer.policy["backbone"].training
            assert trainer.policy["low"].training


def train(subject: Subject, run: Path, callbacks: list[Any]) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = run.with_suffix(".said").open("a", buffering=1)
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    x[:, 0] = x[:, 0].abs() * torch.tensor([-1.0, -1.0, 1.0, 1.0]).repeat(12)  # each rank asks for one expert
    optimizers = {
        "low": OptimizerConfiguration(match=["low"], lr=0.05, schedule="cosine"),
        "high": OptimizerConfiguration(match=["high"], lr=0.02, type="sgd", params={"momentum": 0.9}),
    }
    config = TrainingConfiguration(
        training_steps=10, batch_size=4 // subject.ranks, shuffle=False, log_every=1, save_every=2, keep_last=100,
        optimizers=optimizers, ema_decay=0.9, device="cpu", seed=3,
    )  # fmt: skip
    configs = {"backbone": linear(3, 4), "low": linear(4, 1), "high": linear(4, 1)}
    policy = ComponentPolicy(configs, {"backbone": {"freeze": True}, "low": {"init": True}}, seed=1)
    options = {"max_failures": 1} if subject.has_driver else {}
    trainer = wrap_train_step(TwoExperts, {})(
        policy, {"x": x, "y": x.sum(1, keepdim=True)}, engine=subject.make_engine(**options), run=run, loggers=[],
        config=config, callbacks=[Evaluates(), *callbacks], show_progress=False,
    )  # fmt: skip
    assert trainer.fit().steps == 10


def launch(subject: Subject, run: Path, *callbacks: Any) -> list[int]:
    timeout_s = 240.0 if subject.has_driver else 60.0
    return run_ranks(partial(train, subject, run, list(callbacks)), subject.processes, timeout_s)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_components_train_alike_on_every_engine(
    subject: Subject, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if subject.has_driver:
        request.getfixturevalue("on_ray_cluster")
    assert launch(ALONE, tmp_path / "alone") == [0]
    assert launch(subject, tmp_path / "run") == good(subject), (tmp_path / "run.said").read_text()[-2000:]
    if subject.ranks == 1:
        assert compare(tmp_path / "run", tmp_path / "alone") is None
    found, alone = (end_of(subject, tmp_path / name) for name in ("run", "alone"))
    assert largest_difference(found, alone, "policy") < 1e-6
    begun = ComponentPolicy({"backbone": linear(3, 4)}, seed=1).state_dict()
    assert all(torch.equal(found["policy"][name], value) for name, value in begun.items())
    assert sorted(found["optimizer"]) == ["high", "low"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("subject", [one for one in SUBJECTS if not one.values[0].has_driver])
def test_a_killed_run_of_components_ends_as_one_left_alone(subject: Subject, tmp_path: Path) -> None:
    assert launch(subject, tmp_path / "whole") == good(subject)
    assert launch(subject, tmp_path / "killed", Killed(5, signal.SIGKILL)).count(-signal.SIGKILL) > 0
    assert launch(subject, tmp_path / "killed") == good(subject)
    assert compare(tmp_path / "killed", tmp_path / "whole") is None


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_components_whose_worker_is_killed_on_ray_end_as_those_left_alone(tmp_path: Path, on_ray_cluster: Any) -> None:
    """The driver starts the group again, and that goes on from its newest checkpoint."""
    ray, torchrun = Subject("ray", 2), Subject("torch", 2)
    assert launch(torchrun, tmp_path / "whole", KilledOnce(tmp_path)) == good(torchrun)  # there already: it is not
    said = tmp_path / "killed.said"
    assert launch(ray, tmp_path / "killed", KilledOnce(tmp_path / "was killed")) == good(ray), said.read_text()[-2000:]
    assert (tmp_path / "was killed").exists()
    assert compare(tmp_path / "killed", tmp_path / "whole") is None


class KilledOnce(Callback):
    """Kills the first rank after the fifth step, the first time that it comes to it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        """Kill it."""
        if trainer.progress.step == 5 and trainer.rank == 0 and not self.mark.exists():
            trainer.session.record.wait()
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Killed(SendSignal):
    """Kills this process, with no driver to ask."""

    driver = 0
