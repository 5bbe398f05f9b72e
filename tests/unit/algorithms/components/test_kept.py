"""Every trainer of components under the loop: stopped and killed runs end like others, and so do two ranks."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etude import TrainingConfiguration
from etude.config.training import OptimizerConfiguration
from etude.registry import TRAINER_REGISTRY
from etude.runs.checkpoint import CheckpointStore
from etude.trainer import wrap_train_step
from tests.callbacks import DieAt
from tests.component_models import chunks, components
from tests.processes import run_ranks

TRAINERS = [
    "naive_flow_matching_policy_trainer",
    "vfp_single_expert_trainer",
    "variational_flow_matching_policy_trainer",
    "cfg_vqvae_flow_matching_trainer",
    "mutual_information_estimator_trainer",
]
PARAMS: dict[str, dict[str, Any]] = {
    "cfg_vqvae_flow_matching_trainer": {"replace_every": 3, "replace_epochs": 9},
    "mutual_information_estimator_trainer": {"bound": "mine"},
}


def make(key: str, run: Any = False, steps: int = 8, callbacks: Any = (), **settings: Any) -> Any:
    models = components(key)
    optimizers = {name: OptimizerConfiguration(match=[name], lr=0.01, type="adamw") for name in models}
    config = TrainingConfiguration(
        training_steps=steps, optimizers=optimizers, **{"batch_size": 12, "log_every": 1, "save_every": 1, **settings}
    )
    return wrap_train_step(TRAINER_REGISTRY.get(key), PARAMS.get(key, {}))(
        models, chunks(), config=config, run=run, loggers=[], show_progress=False, callbacks=callbacks
    )


def everything(trainer: Any) -> dict[str, Tensor]:
    """Return the weights, the optimizers' moments, and what the inner trainer keeps."""
    found = {f"policy.{name}": value for name, value in trainer.policy.state_dict().items()}
    for name, optimizer in trainer.optimizers.items():
        for index, state in enumerate(optimizer.state.values()):
            found |= {f"{name}.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    for name, value in vars(trainer.inner).items():
        if name == "models":
            continue
        if isinstance(value, nn.Module):
            found |= {f"{name}.{key}": one for key, one in value.state_dict().items()}
        elif isinstance(value, Tensor | int | float):
            found[name] = torch.as_tensor(value)
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("key", TRAINERS)
def test_a_stopped_run_ends_bit_for_bit_like_an_undisturbed_one(key: str, tmp_path: Path) -> None:
    straight = make(key)
    whole = straight.fit()
    make(key, tmp_path, steps=4).fit()
    resumed = make(key, tmp_path)
    result = resumed.fit()
    assert (whole.steps, result.steps) == (8, 8)
    assert same(everything(straight), everything(resumed))
    assert whole.metrics["train/total"] == result.metrics["train/total"]


@pytest.mark.nightly
def test_two_ranks_that_stop_end_like_two_that_do_not(tmp_path: Path) -> None:
    """In between codes were counted, and rank 0 saved what both had used."""
    key = "cfg_vqvae_flow_matching_trainer"
    for name, lengths in {"straight": (8,), "stopped": (4, 8)}.items():
        for steps in lengths:
            work = partial(fit, key, tmp_path / name, steps=steps, batch_size=1, save_every=9)
            assert run_ranks(work, 2, timeout_s=100) == [0, 0]
    one, other = (CheckpointStore(tmp_path / name / "checkpoints").load().tree for name in ("straight", "stopped"))
    assert same(one["policy"], other["policy"])
    (counted,) = (value for name, value in one["policy"].items() if name.endswith("uses_K"))
    assert int(counted.sum()) == 4  # of two ranks, in the two steps since codes were last replaced


def fit(key: str, run: Path, **settings: Any) -> None:
    make(key, run, **settings).fit()


@pytest.mark.nightly
@pytest.mark.parametrize("key", TRAINERS)
def test_a_killed_run_ends_bit_for_bit_like_an_undisturbed_one(key: str, tmp_path: Path) -> None:
    straight = make(key, tmp_path / "straight")
    straight.fit()
    killed = run_ranks(lambda: make(key, tmp_path / "killed", callbacks=[DieAt(5)]).fit(), 1)
    assert killed == [-signal.SIGKILL]
    resumed = make(key, tmp_path / "killed")
    resumed.fit()
    assert same(everything(straight), everything(resumed))


@pytest.mark.parametrize("key", ["variational_flow_matching_policy_trainer", "cfg_vqvae_flow_matching_trainer"])
def test_ranks_keep_the_same_weights(key: str, tmp_path: Path) -> None:
    def work() -> None:
        trainer = make(key, tmp_path, batch_size=6)
        trainer.fit()
        torch.save(trainer.policy.state_dict(), tmp_path / f"rank{trainer.rank}.pt")

    assert run_ranks(work, 2, timeout_s=100) == [0, 0]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert same(first, second)
    assert CheckpointStore(tmp_path / "checkpoints").load().tree["policy"].keys() == first.keys()


def test_two_ranks_of_which_one_uses_an_expert_take_the_step_of_one_process(tmp_path: Path) -> None:
    """With one expert a sample, rank 0 has only samples of the first and rank 1 only of the second."""
    assert run_ranks(lambda: divided(tmp_path / "two", 6), 2, timeout_s=100) == [0, 0]
    assert run_ranks(lambda: divided(tmp_path / "one", 12), 1, timeout_s=100) == [0]
    two, one = (CheckpointStore(tmp_path / name / "checkpoints").load().tree["policy"] for name in ("two", "one"))
    start = components("variational_flow_matching_policy_trainer").state_dict()
    moved = [name for name in one if "experts" in name and not torch.allclose(one[name], start[name], atol=1e-4)]
    assert {name.split("experts.")[1][0] for name in moved} == {"0", "1"}
    assert max(float((one[name] - value).abs().max()) for name, value in two.items()) < 1e-5


def divided(run: Path, batch_size: int) -> None:
    """Take one step in which each half of the batch goes to an expert of its own; nothing is drawn at random."""
    key = "variational_flow_matching_policy_trainer"
    kind: Any = TRAINER_REGISTRY.get(key)

    class Divided(kind):  # type: ignore[misc]
        @staticmethod
        def gate(models: Any, seen: Any, latent: Tensor) -> dict[str, Tensor]:
            first = (seen["state"][:, :1] < 0).float()
            weights = torch.cat([first, 1 - first, 0 * first], dim=1)
            return {"weights": weights, "logits": models["gate"](0 * latent)["logits"]}

        def losses(self, data: Any, epoch: int) -> dict[str, Tensor]:
            from etude.algorithms.components.flow import FlowPath

            ones = torch.ones_like(data["action"])
            path = FlowPath(data["action"], ones[..., 0], 0.1 * ones, 0.5 * ones[:, 0, 0])
            seen = self.observe(self.models, data)
            told = {**seen, "weights": self.gate(self.models, seen, torch.zeros(len(ones), 4))["weights"]}
            return {"total": self.weighed_error(path, told)}

    models, data = components(key), chunks(12)
    sign = torch.tensor([-1.0] * 6 + [1.0] * 6)
    order = torch.arange(12).view(2, 6)
    data["observation.state"][:, 0] = data["observation.state"][:, 0].abs() * sign[order.flatten()]
    del data["action_is_pad"]
    optimizers = {name: OptimizerConfiguration(match=[name], lr=0.01, type="sgd") for name in models}
    config = TrainingConfiguration(training_steps=1, optimizers=optimizers, batch_size=batch_size, shuffle=False)
    wrap_train_step(Divided, {})(models, data, config=config, run=run, loggers=[], show_progress=False).fit()
