"""Ready-made loaders of every kind: what they yield are batches, and what may be samples is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from etude import Loss
from etude.engines.huggingface import BaseTrainer
from etude.errors import ConfigError, DataError
from tests.unit.engines.huggingface.parts import Noisy, arguments, same, weights

BATCHES = [{"x": torch.randn(4, 6), "y": torch.randn(4, 1)} for _ in range(8)]


class Linear(nn.Module):
    """A model without dropout that takes a batch whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": (self.net(batch["x"]) - batch["y"]).square().mean()}


class OwnLoader:
    """An iterable of batches of no known make."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from BATCHES


class SizedLoader(OwnLoader):
    """The same, with a length."""

    def __len__(self) -> int:
        return len(BATCHES)


def train(directory: Path, loader: Any, **options: Any) -> BaseTrainer:
    trainer = BaseTrainer(
        Linear(), arguments(directory, **{"num_train_epochs": 2, **options}), train_loader=loader, eval_loader=BATCHES
    )
    trainer.train()
    return trainer


def by_hand(steps: int) -> dict[str, Tensor]:
    model = Linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (steps - step) / steps))
    for step in range(steps):
        optimizer.zero_grad()
        model(BATCHES[step % len(BATCHES)])["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.state_dict()


@pytest.mark.parametrize("loader", [BATCHES, tuple(BATCHES), SizedLoader()], ids=["list", "tuple", "iterable"])
def test_ready_made_batches_are_not_batched_again(loader: Any, tmp_path: Path) -> None:
    trainer = train(tmp_path, loader)
    assert trainer.state.global_step == 16
    found = weights(trainer)
    for name, value in by_hand(16).items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    "loader",
    [OwnLoader(), lambda: iter(BATCHES), (batch for batch in BATCHES * 2)],
    ids=["iterable", "function", "once"],
)
def test_batches_without_a_length_need_a_number_of_steps(loader: Any, tmp_path: Path) -> None:
    assert same(weights(train(tmp_path, loader, max_steps=16)), weights(train(tmp_path, BATCHES)))


def test_a_generator_that_is_too_short_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ended after 8 items, enough for 8 steps, and it can be read only once"):
        train(tmp_path, (batch for batch in BATCHES), max_steps=16)


def test_lists_of_batches_resume_exactly(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 2}
    whole = weights(train(tmp_path / "whole", BATCHES, **options))
    train(tmp_path / "cut", BATCHES, **options)
    resumed = BaseTrainer(Linear(), arguments(tmp_path / "cut", num_train_epochs=2, **options), train_loader=BATCHES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-5"))
    assert same(weights(resumed), whole)


class Stream(IterableDataset[Any]):
    """Yields samples, or batches; nobody can tell."""

    def __iter__(self) -> Iterator[Any]:
        yield from Noisy()


class Rows:
    """A dataset by duck typing alone."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return Noisy()[index]


@pytest.mark.parametrize(
    "loader, message",
    [
        (Noisy(), "train_loader is a Noisy, which holds samples and makes no batches: wrap it as DataLoader"),
        (Rows(), "train_loader is a Rows, which holds samples and makes no batches; it must be a DataLoader"),
        (Stream(), "which may yield samples or batches: wrap it as DataLoader.*None for batches"),
        ([Noisy()[i] for i in range(4)], "a list whose first item looks like one sample"),
        ([{"x": 1.0, "y": 2.0}], "a list whose first item looks like one sample"),
        ({"x": torch.ones(4, 6)}, "train_loader is a dict, which holds samples"),
        (torch.ones(4, 6), "train_loader is a Tensor, which holds samples"),
        (3, "train_loader is a int; it must be a DataLoader or an iterable of batches"),
    ],
)
def test_what_may_be_samples_is_refused_at_once(loader: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        BaseTrainer(Linear(), arguments(tmp_path), train_loader=loader)


def test_batches_that_are_lists_of_samples_are_batches(tmp_path: Path) -> None:
    class Joined(BaseTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            return model({name: torch.stack([sample[name] for sample in inputs]) for name in ("x", "y")})["loss"]

    data = Noisy(8, augment=False)
    batches = [[data[i] for i in range(start, start + 4)] for start in (0, 4)]
    trainer = Joined(Linear(), arguments(tmp_path, num_train_epochs=1), train_loader=batches, eval_loader=batches)
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_dataloader_of_batches_says_that_it_holds_batches(tmp_path: Path) -> None:
    ragged = [{"x": torch.ones(3, 6), "y": torch.ones(3, 1), "lengths": torch.ones(7)} for _ in range(4)]
    with pytest.raises(DataError, match="looks like one sample"):
        train(tmp_path, ragged)
    assert train(tmp_path, DataLoader(ragged, batch_size=None)).state.global_step == 8  # type: ignore[arg-type]


# -- evaluation ---------------------------------------------------------


def error_of(model: Any, batch: Any) -> Tensor:
    return (model.net(batch["x"]) - batch["y"]).square().squeeze(1)


RETURNED = {
    "loss": lambda errors: Loss(errors.sum(), len(errors)),
    "dictionary": lambda errors: {"loss": errors.mean(), "worst": errors.detach().max()},
    "dictionary of a loss": lambda errors: {"loss": Loss(errors.sum(), len(errors)), "errors": errors},
    "weighed dictionary": lambda errors: {"loss": errors.mean(), "weight": len(errors)},
    "scalar": lambda errors: errors.mean(),
    "tuple": lambda errors: (errors.mean(), errors),
    "long tuple": lambda errors: (errors.mean(), errors, errors * 2),
}


@pytest.mark.parametrize("form", RETURNED)
@pytest.mark.parametrize("heeds", [True, False], ids=["with outputs", "without"])
def test_whatever_compute_loss_returns_is_evaluated(form: str, heeds: bool, tmp_path: Path) -> None:
    class Own(BaseTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            errors = error_of(model, inputs)
            found = RETURNED[form](errors)
            return (found, {"errors": errors}) if heeds and return_outputs else found

    data = Noisy(7, augment=False)
    loader = DataLoader(data, batch_size=4)
    trainer = Own(
        Linear(),
        arguments(tmp_path, num_train_epochs=1, eval_strategy="epoch"),
        train_loader=loader,
        eval_loader=loader,
    )
    trainer.train()
    with torch.no_grad():
        expected = error_of(trainer.model, {"x": data.x, "y": data.y})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.mean().item(), rel=1e-6)
    predicted = trainer.predict(data)
    assert predicted.metrics["test_loss"] == pytest.approx(expected.mean().item(), rel=1e-6)
    if heeds or form == "dictionary of a loss":
        torch.testing.assert_close(torch.from_numpy(predicted.predictions), expected)


def test_a_compute_loss_without_return_outputs_is_evaluated(tmp_path: Path) -> None:
    class Short(BaseTrainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return Loss(error_of(model, inputs).sum(), len(inputs["x"]))

    trainer = Short(Linear(), arguments(tmp_path, num_train_epochs=1), train_loader=BATCHES, eval_loader=BATCHES)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_the_mean_is_over_samples_whatever_the_batch_size_of_the_arguments(tmp_path: Path) -> None:
    data = Noisy(37, augment=False)
    options = {"per_device_eval_batch_size": 3}
    loader = DataLoader(data, batch_size=16)
    trainer = BaseTrainer(Linear(), arguments(tmp_path, **options), train_loader=loader, eval_loader=loader)
    with torch.no_grad():
        expected = error_of(trainer.model, {"x": data.x, "y": data.y}).mean().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_batch_where_nothing_counts_is_evaluated(tmp_path: Path) -> None:
    class Masked(BaseTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            return Loss((error_of(model, inputs) * inputs["mask"]).sum(), inputs["mask"].sum())

    batches = [{**batch, "mask": torch.full((4,), float(number))} for number, batch in enumerate(BATCHES[:2])]
    trainer = Masked(Linear(), arguments(tmp_path), train_loader=batches, eval_loader=batches)
    with torch.no_grad():
        expected = error_of(trainer.model, BATCHES[1]).mean().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_several_loaders_are_evaluated_by_name(tmp_path: Path) -> None:
    loaders = {"near": DataLoader(Noisy(9, augment=False), batch_size=4), "far": BATCHES}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "near_loss", "save_strategy": "epoch"}
    trainer = BaseTrainer(
        Linear(), arguments(tmp_path, num_train_epochs=2, eval_strategy="epoch", **best),
        train_loader=BATCHES, eval_loader=loaders,
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    assert {"eval_near_loss", "eval_far_loss"} <= found.keys()
    assert trainer.state.best_metric == pytest.approx(min(
        row["eval_near_loss"] for row in trainer.state.log_history if "eval_near_loss" in row
    ))  # fmt: skip
    other = trainer.evaluate(DataLoader(Noisy(9, augment=False), batch_size=2))
    assert other["eval_loss"] == pytest.approx(found["eval_near_loss"], rel=1e-6)


def test_an_evaluation_that_has_nothing_left_says_so(tmp_path: Path) -> None:
    trainer = BaseTrainer(Linear(), arguments(tmp_path), train_loader=BATCHES, eval_loader=(batch for batch in BATCHES))
    trainer.evaluate()
    with pytest.raises(DataError, match="generator gave nothing to evaluate; if it can be read once, pass a function"):
        trainer.evaluate()


def test_a_loader_and_a_dataset_for_evaluation_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give eval_loader or eval_dataset, not both"):
        BaseTrainer(Linear(), arguments(tmp_path), train_loader=BATCHES, eval_loader=BATCHES, eval_dataset=Noisy())


@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True}, {"neftune_noise_alpha": 1.0}, {"label_smoothing_factor": 0.1}]
)
def test_options_that_ask_too_much_of_a_plain_module_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} needs a model with .*, which Linear has not"):
        BaseTrainer(Linear(), arguments(tmp_path, **options), train_loader=BATCHES)
