"""The multilayer perceptron: classes, chunks, history, tasks, cameras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude import Trainer, TrainingConfiguration
from etude.data.digits import Digits
from etude.errors import ConfigError, DataError
from etude.policies import MLP, PolicyModule
from etude.types import DataSpec, Feature
from tests.unit.policies.samples import make_batch, make_spec, now, parameters, reaching

STATE = "observation.state"


def built(spec: DataSpec | None = None, **options: Any) -> MLP:
    torch.manual_seed(0)
    policy = MLP(**{"hidden": [32], "chunk_size": 6, "image_backbone": "resnet10_small", **options})
    policy.build(spec or make_spec())
    return policy


def digits(count: int = 8) -> dict[str, Tensor]:
    return Digits().gather(np.arange(count), np.zeros(count, dtype=np.uint64))


def test_classes_are_learned_with_cross_entropy() -> None:
    torch.manual_seed(0)
    policy = MLP(hidden=[128, 128])
    policy.build(Digits().spec)
    batch = digits()
    assert parameters(policy) == 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
    loss = policy(batch)
    logits = policy.predict(batch)
    assert logits.shape == (8, 10)
    expected = torch.nn.functional.cross_entropy(logits, batch["action"], reduction="sum")
    torch.testing.assert_close(loss.total, expected)
    assert float(loss.weight) == 8
    assert float(loss.metrics["accuracy"]) == float((logits.argmax(1) == batch["action"]).float().mean())


def test_a_class_is_selected_as_its_index() -> None:
    policy = MLP()
    policy.build(Digits().spec)
    action = policy.select_action({STATE: digits()[STATE]})
    assert action.shape == (8,) and action.dtype == torch.int64
    assert torch.equal(policy.predict_action_chunk({STATE: digits()[STATE]})[:, 0], action)


def test_digits_are_learned() -> None:
    policy = MLP(hidden=[64])
    config = TrainingConfiguration(training_steps=60, batch_size=64, lr=5e-3)
    result = Trainer(policy, Digits(), config=config, run=False, loggers=[], show_progress=False).fit()
    assert result.metrics["train/accuracy"] > 0.8


def test_classes_cannot_be_averaged() -> None:
    with pytest.raises(ConfigError, match="classes cannot be averaged"):
        MLP(temporal_ensemble_coeff=0.1).build(Digits().spec)


@pytest.mark.parametrize("loss", ["mse", "l1"])
def test_continuous_actions_are_learned_by_their_normalised_error(loss: str) -> None:
    policy, batch = built(loss=loss), make_batch(make_spec())
    got = policy(batch)
    normalized = policy.normalizer.normalize(batch)
    error = policy.predict(batch) - normalized["action"]
    error = error.square() if loss == "mse" else error.abs()
    valid = ~batch["action_is_pad"]
    torch.testing.assert_close(got.total / got.weight, error.mean(-1)[valid].mean())


def test_padded_actions_do_not_matter() -> None:
    policy, batch = built(), make_batch(make_spec())
    other = {**batch, "action": torch.where(batch["action_is_pad"][..., None], 99.0, batch["action"])}
    assert torch.equal(policy(batch).total, policy(other).total)


def test_single_actions_may_come_without_a_time_dimension() -> None:
    policy, batch = built(chunk_size=1), make_batch(make_spec(), chunk=1)
    batch.pop("action_is_pad")
    flat = {**batch, "action": batch["action"][:, 0]}
    assert torch.equal(policy(batch).total, policy(flat).total)
    assert policy.select_action(now(batch)).shape == (4, 3)


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize(
    "inputs", [{}, {"environment": 2}, {"tasks": 3}, {"text": 7}, {"state": 0, "environment": 2}], ids=str
)
def test_any_mix_of_vectors_becomes_a_chunk(inputs: dict[str, int], history: int) -> None:
    spec = make_spec(**inputs)  # type: ignore[arg-type]
    policy = built(spec, n_obs_steps=history)
    batch = make_batch(spec, history=history)
    policy(batch).total.backward()
    assert [name for name, parameter in policy.named_parameters() if parameter.grad is None] == []
    assert policy.predict_action_chunk(now(batch)).shape == (4, 6, 3)


@pytest.mark.slow
@pytest.mark.parametrize("cameras, history", [(("top",), 1), (("left", "right"), 2)])
def test_cameras_are_seen(cameras: tuple[str, ...], history: int, tmp_path: Path) -> None:
    spec = make_spec(cameras=cameras)
    policy = built(spec, n_obs_steps=history)
    batch = make_batch(spec, history=history)
    policy(batch).total.backward()
    assert [name for name, parameter in policy.named_parameters() if parameter.grad is None] == []
    policy.save_pretrained(tmp_path)
    loaded = PolicyModule.from_pretrained(tmp_path)
    assert torch.equal(loaded.predict_action_chunk(now(batch)), policy.predict_action_chunk(now(batch)))


def test_actions_of_any_shape_come_back_in_it() -> None:
    shape = (2, 3)
    stats = {"mean": torch.zeros(shape), "std": torch.ones(shape)}
    spec = DataSpec({STATE: make_spec()[STATE], "action": Feature(shape, "float32", "action", stats=stats)})
    policy = built(spec, chunk_size=4)
    policy({STATE: torch.zeros(5, 5), "action": torch.zeros(5, 4, 2, 3)})
    assert policy.predict_action_chunk({STATE: torch.zeros(5, 5)}).shape == (5, 4, 2, 3)
    assert policy.select_action({STATE: torch.zeros(5, 5)}).shape == (5, 2, 3)


def test_data_without_an_observation_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to observe"):
        MLP().build(DataSpec({"action": make_spec()["action"]}))


@pytest.mark.parametrize("options", [{"activation": "swish"}, {"loss": "huber"}])
def test_unknown_choices_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is unknown; one of"):
        MLP(**options)


@pytest.mark.parametrize("history", [1, 2])
def test_training_through_the_trainer_resumes_bit_for_bit(history: int, tmp_path: Path) -> None:
    def train(run: Path, steps: int) -> MLP:
        policy = MLP(hidden=[16], chunk_size=4, n_obs_steps=history, dropout=0.1)
        config = TrainingConfiguration(training_steps=steps, batch_size=8, save_every=4)
        data = reaching(4, history=policy.observation_delta_indices)
        Trainer(policy, data, config=config, run=run, loggers=[], show_progress=False).fit()
        return policy

    whole = train(tmp_path / "whole", 8)
    train(tmp_path / "parts", 4)
    resumed = train(tmp_path / "parts", 8)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())
