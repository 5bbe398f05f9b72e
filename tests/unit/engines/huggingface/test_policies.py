"""Whatever the model's forward looks like, it trains: Etude's policies, plain modules, transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from etude import DataSpec, Feature
from etude.engines.huggingface import BaseTrainer
from etude.engines.huggingface.losses import count_items, mean_of, takes_batch, weigh
from etude.errors import DataError
from etude.policies import ACT, MLP
from etude.types import Loss
from tests.unit.engines.huggingface.parts import arguments, same


class Robot(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Demonstrations that say what they hold."""

    def __init__(self, horizon: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.state = torch.randn(64, 4, generator=generator)
        self.action = self.state[:, None, :2].repeat(1, horizon, 1)
        if horizon == 1:
            self.action = self.action.squeeze(1)

    @property
    def spec(self) -> DataSpec:
        stats = {"mean": [0.0], "std": [1.0], "min": [-3.0], "max": [3.0]}

        def of(width: int) -> dict[str, list[float]]:
            return {name: value * width for name, value in stats.items()}

        return DataSpec(
            {
                "observation.state": Feature((4,), role="state", stats=of(4)),
                "action": Feature((2,), role="action", stats=of(2)),
            }
        )

    def __len__(self) -> int:
        return len(self.state)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"observation.state": self.state[index], "action": self.action[index]}


def small_act() -> ACT:
    return ACT(chunk_size=3, dim_model=16, n_heads=2, dim_feedforward=16, n_encoder_layers=1, n_decoder_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("make_policy, horizon", [(MLP, 1), (small_act, 3)])
@pytest.mark.parametrize("how", ["train_loader", "train_dataset"])
def test_policies_of_ours_train_with_nothing_else_to_write(
    make_policy: Any, horizon: int, how: str, tmp_path: Path
) -> None:
    policy, data = make_policy(), Robot(horizon)
    source = DataLoader(data, batch_size=8, shuffle=True) if how == "train_loader" else data
    args = arguments(tmp_path, max_steps=30, save_strategy="steps", save_steps=30, logging_steps=10)
    trainer = BaseTrainer(model=policy, args=args, **{how: source}, eval_loader=DataLoader(data, batch_size=8))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    again = type(policy).from_pretrained(tmp_path / "checkpoint-30")
    assert same(dict(again.state_dict()), dict(policy.state_dict()))


def test_a_policy_without_shapes_needs_data_that_has_them(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)
    with pytest.raises(DataError, match="the data has no spec"):
        BaseTrainer(model=MLP(), args=arguments(tmp_path), train_loader=loader)


class Whole(nn.Linear):
    def forward(self, batch: Any) -> Any:
        x, y = batch
        return (super().forward(x) - y).square().mean()


def test_batches_that_are_no_dictionaries_go_in_whole(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
    loader = DataLoader(data, batch_size=8)
    trainer = BaseTrainer(
        model=Whole(3, 1), args=arguments(tmp_path, max_steps=4), train_loader=loader, eval_loader=loader
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


class Named(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


class Keywords(nn.Module):
    def forward(self, **batch: Tensor) -> Tensor:
        return batch["x"]


class Batch(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        return batch["x"]


@pytest.mark.parametrize("model, whole", [(Named(), False), (Keywords(), False), (Batch(), True)])
def test_the_signature_says_how_a_batch_goes_in(model: nn.Module, whole: bool) -> None:
    assert takes_batch(model, {"x": torch.zeros(2)}) is whole
    assert takes_batch(model, [torch.zeros(2)]) is True


def test_means_are_weighed_by_labels_that_count_or_by_samples() -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    x = torch.zeros(2, 3)
    assert count_items({"x": x}, False) == 2
    assert count_items({"x": x, "labels": labels}, False) == 3
    assert count_items({"x": x, "labels": labels}, True) == 1
    assert count_items({"x": x, "labels": x}, False) == 2, "real-valued labels are as many in every sample"
    assert count_items([x, labels], False) == 2


def test_a_loss_that_says_its_weight_is_believed() -> None:
    mean, batch = torch.tensor(3.0), {"x": torch.zeros(4, 1)}
    for value, weight in [
        (mean, 7.0), ({"loss": mean}, 7.0), ((mean, None), 7.0), ({"loss": mean, "weight": 5}, 5.0),
        (Loss.mean(mean, 5), 5.0), ({"loss": Loss.mean(mean, 5), "weight": 2}, 5.0),
    ]:  # fmt: skip
        share = weigh(value, batch, 7)
        assert (share.weight, share.factor * float(share.root)) == (weight, 3.0 * weight)
        assert float(mean_of(value, batch)) == 3.0
    assert float(weigh(torch.tensor([1.0, 3.0]), batch, 7).root) == 2.0, "one loss a device under DataParallel"


def test_metrics_of_a_loss_are_logged(tmp_path: Path) -> None:
    class Telling(nn.Linear):
        def forward(self, batch: Any) -> Any:
            error = (super().forward(batch["x"]) - batch["y"]).square().squeeze(1)
            return Loss(error.sum(), len(error), {"half": error.detach().mean() / 2})

    data = [{"x": torch.randn(3), "y": torch.randn(1)} for _ in range(16)]
    args = arguments(tmp_path, max_steps=4, logging_steps=2)
    trainer = BaseTrainer(model=Telling(3, 1), args=args, train_loader=DataLoader(data, batch_size=4))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    assert all(row["half"] == pytest.approx(row["loss"] / 2) for row in rows)


class Classifier(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_metrics_are_computed_from_what_a_plain_module_returns(tmp_path: Path) -> None:
    x = torch.randn(32, 3)
    data = [{"x": row, "labels": row.argmax(), "unused": 1} for row in x]

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    args = arguments(tmp_path, max_steps=40, learning_rate=0.1)
    trainer = BaseTrainer(
        model=Classifier(3, 3), args=args, train_dataset=data, eval_dataset=data, compute_metrics=accuracy
    )
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.9


class Tokens(nn.Linear):
    """A policy whose loss counts some samples more often than others."""

    def forward(self, batch: Any) -> Loss:
        x, count = batch
        return Loss((super().forward(x).squeeze(1).square() * count).sum(), count.sum())


def test_evaluation_weighs_as_training_does(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(6.0)[:, None], torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 9.0]))
    model, loader = Tokens(1, 1), DataLoader(data, batch_size=4)
    trainer = BaseTrainer(model=model, args=arguments(tmp_path), train_loader=loader, eval_loader=loader)
    with torch.no_grad():
        whole = model(data.tensors)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(whole.total / whole.weight), rel=1e-6)
