"""Exact accumulation, and no update that is not finite."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from etude import Loss
from etude.errors import NonFiniteError, ShortRunError
from tests.unit.engines.lightning.parts import Module, Net, TokenMean, Tokens, loader, make, same, saved, weights


class TokenModule(lightning.LightningModule):
    """A user's module that returns a Loss."""

    def __init__(self, as_mapping: bool = False) -> None:
        super().__init__()
        self.policy, self.as_mapping = TokenMean(), as_mapping

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.policy(batch)
        return {"loss": loss, "extra": 1} if self.as_mapping else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def update(root: Path, model: Any, size: int, accumulate: int) -> Tensor:
    """Return the weights after one optimizer step over all sixteen samples."""
    trainer = make(
        root, max_epochs=1, accumulate_grad_batches=accumulate, precision="64-true",
        optimizer={"type": "sgd", "lr": 0.1},
    )  # fmt: skip
    trainer.fit(model, DataLoader(Tokens(), batch_size=size))
    assert trainer.global_step == 1
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def relative(one: Tensor, other: Tensor) -> float:
    start = torch.cat([value.flatten() for value in TokenMean().state_dict().values()])
    return float((one - other).norm() / (other - start).norm())


@pytest.mark.slow
@pytest.mark.parametrize("model", [TokenMean, TokenModule, lambda: TokenModule(as_mapping=True)])
def test_no_split_of_a_batch_changes_the_update(tmp_path: Path, model: Any) -> None:
    whole = update(tmp_path, model(), 16, 1)
    for size, accumulate in ((4, 4), (1, 16), (3, 6)):
        assert relative(update(tmp_path, model(), size, accumulate), whole) < 1e-12


@pytest.mark.slow
def test_a_plain_mean_is_treated_as_lightning_alone_does(tmp_path: Path) -> None:
    ours, theirs = Module(), Module()
    data = [batch for batch in loader(24)]  # noqa: C416 - read once, so that both see the same samples
    make(tmp_path, max_epochs=2, accumulate_grad_batches=2, limit_train_batches=6).fit(
        _without_dropout(ours), Rows(data)
    )
    lightning.Trainer(
        max_epochs=2, accumulate_grad_batches=2, logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, limit_train_batches=6,
    ).fit(_without_dropout(theirs), Rows(data))  # fmt: skip
    assert same(weights(ours), weights(theirs))


class Rows:
    """A loader of ready-made batches."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def _without_dropout(module: Module) -> Module:
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return module


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("model", [Net, Module])
def test_a_batch_of_nan_stops_before_the_update_and_is_named(tmp_path: Path, model: Any, accumulate: int) -> None:
    before: list[Any] = []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            before.append(weights(pl_module))

    policy = model()
    trainer = make(tmp_path, max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[Watch()])
    with pytest.raises(
        NonFiniteError, match=r"step \d+, rank 0: loss is nan.*samples \[.*\b5\b.*No weight was changed"
    ):
        trainer.fit(policy, loader(bad=5))
    assert same(before[-1], weights(trainer.lightning_module)) if before else True
    assert all(bool(value.isfinite().all()) for value in policy.state_dict().values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip_val": 1.0}, {"gradient_clip_val": 1.0, "precision": "bf16-mixed"}]
)
def test_an_infinite_gradient_behind_a_finite_loss_is_found(tmp_path: Path, options: dict[str, Any]) -> None:
    class Steep(Net):
        def forward(self, batch: dict[str, Tensor]) -> Any:
            return {"loss": (self.net(batch["x"]) * 0.0).square().sum().sqrt()}

    with pytest.raises(NonFiniteError, match=r"gradient not finite in policy\.net"):
        make(tmp_path, max_epochs=1, **options).fit(Steep(), loader())


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}]
)
def test_gradients_are_clipped_as_by_lightning_alone(tmp_path: Path, clip: dict[str, Any]) -> None:
    found = []
    batches = list(loader(24))
    for kind in (make, _lightning_alone):
        module = Module()
        _without_dropout(module)
        trainer = kind(tmp_path, max_epochs=2, **clip)
        trainer.fit(module, Rows(batches))
        assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)
        found.append(weights(module))
    assert same(*found)


def _lightning_alone(root: Path, **options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(**quiet, enable_model_summary=False, accelerator="cpu", default_root_dir=root, **options)


@pytest.mark.slow
def test_a_module_that_optimises_by_itself_is_guarded_too(tmp_path: Path) -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.inner(batch)["loss"])
            optimizer.step()

    module = Manual()
    with pytest.raises(NonFiniteError, match=r"samples \["):
        make(tmp_path, max_epochs=1).fit(module, loader(bad=5))
    assert all(bool(value.isfinite().all()) for value in module.state_dict().values())
    assert "training_step" not in vars(module)


def test_every_batch_of_a_module_that_accumulates_by_itself_draws_anew(tmp_path: Path) -> None:
    drawn = []

    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            drawn.append(float(torch.rand(())))
            if batch_idx % 3 == 2:
                self.optimizers().step()  # type: ignore[union-attr]

    make(tmp_path, max_epochs=2).fit(Manual(), loader())
    assert len(drawn) == len(set(drawn)) == 12


@pytest.mark.slow
def test_half_precision_may_overflow_until_its_scale_is_spent(tmp_path: Path) -> None:
    policy = Net()
    with pytest.raises(NonFiniteError):
        half = MixedPrecision("16-mixed", "cpu")
        make(tmp_path, max_epochs=-1, max_steps=60, plugins=[half]).fit(policy, loader(samples=4, bad=1))
    assert all(bool(value.isfinite().all()) for value in policy.state_dict().values())


def test_a_loss_of_weight_zero_changes_nothing(tmp_path: Path) -> None:
    class Nothing(Net):
        def forward(self, batch: dict[str, Tensor]) -> Any:
            return Loss(self.net(batch["x"]).sum(), 0)

    policy = Nothing()
    start = weights(policy)
    make(tmp_path, max_steps=1, max_epochs=-1, optimizer={"type": "sgd", "lr": 1.0}).fit(policy, loader())
    assert same(start, weights(policy))
    assert math.isfinite(sum(float(value.sum()) for value in policy.state_dict().values()))


class At(lightning.Callback):
    """Do something with the module after its second step."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.act(pl_module)


def test_weights_that_an_update_has_broken_are_not_saved(tmp_path: Path) -> None:
    broken = At(lambda module: next(module.parameters()).data.fill_(math.inf))
    with pytest.raises(NonFiniteError, match=r"step 2: weights or buffers not finite in .* the last good checkpoint"):
        make(tmp_path, {"every_n_train_steps": 1}, max_epochs=1, callbacks=[broken]).fit(Net(), loader())
    assert len(saved(tmp_path)) == 1


def test_a_callback_that_exits_is_a_short_run(tmp_path: Path) -> None:
    with pytest.raises(ShortRunError, match=r"ended at step 2, before its time: the code called sys.exit\(0\)"):
        make(tmp_path, max_epochs=1, callbacks=[At(lambda _: sys.exit(0))]).fit(Net(), loader())
