"""PolicyDatasetInteraction: a policy made without shapes takes them, statistics and windows from the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from etude.engines.lightning import PolicyDatasetInteraction, load_policy
from etude.errors import ConfigError, DataError
from etude.policies.mlp import MLP
from tests.unit.engines.lightning.parts import Moves, MovesModule, Net, Noisy, loader, make, same, weights


class LightningMoves(lightning.LightningDataModule):
    """A data module of Lightning's, which makes its data in `setup`, and has no validation."""

    def setup(self, stage: str) -> None:
        self.train_dataset = Moves()

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, 8, shuffle=True)


@pytest.mark.parametrize("given", [[], [PolicyDatasetInteraction()], PolicyDatasetInteraction()])
def test_it_is_injected_exactly_once(tmp_path: Path, given: Any) -> None:
    trainer = make(tmp_path, callbacks=[given] if not isinstance(given, list) else given)
    kinds = [type(callback) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    assert kinds.count(PolicyDatasetInteraction) == 1


@pytest.mark.slow
@pytest.mark.parametrize("module", [MovesModule, LightningMoves])
def test_a_policy_without_shapes_takes_them_from_the_data_module(tmp_path: Path, module: Any) -> None:
    policy, data = MLP(hidden=[8], chunk_size=4), module()
    assert not policy.is_built
    trainer = make(tmp_path, max_epochs=2)
    trainer.fit(policy, data)
    assert policy.is_built and policy.spec["observation.state"].shape == (3,)
    assert data.train_dataset.windows == [0, 1, 2, 3]
    assert torch.allclose(torch.as_tensor(policy.spec["action"].stats["mean"]), data.train_dataset.action.mean(0))  # type: ignore[index]
    assert policy.predict_action_chunk({"observation.state": torch.zeros(1, 3)}).shape == (1, 4, 2)
    assert trainer.global_step == 6
    assert {"train_dataloader", "val_dataloader"}.isdisjoint(vars(data))
    if module is MovesModule:
        assert data.val_dataset.windows == [0, 1, 2, 3]
        assert "val/loss" in trainer.callback_metrics


@pytest.mark.slow
def test_shapes_come_from_the_dataset_of_a_loader_too(tmp_path: Path) -> None:
    policy, dataset = MLP(hidden=[8], chunk_size=2), Moves()
    make(tmp_path, max_epochs=1).fit(policy, DataLoader(dataset, 8, shuffle=True))
    assert policy.is_built and dataset.windows == [0, 1]


@pytest.mark.slow
def test_a_lazy_policy_inside_a_lightning_module_is_built(tmp_path: Path) -> None:
    class Own(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.policy = MLP(hidden=[8], chunk_size=2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.policy(batch)

        def configure_optimizers(self) -> Any:
            assert self.policy.is_built
            return torch.optim.Adam(self.parameters())

    module = Own()
    start = make(tmp_path, max_epochs=1)
    start.fit(module, datamodule=LightningMoves())
    assert start.global_step == 3


def test_the_hook_works_by_itself(tmp_path: Path) -> None:
    policy = MLP(hidden=[8])
    module = nn.Sequential(policy)
    trainer = make(tmp_path)
    trainer.addressed = [DataLoader(Moves(), 8)]  # type: ignore[list-item]
    for _ in range(2):
        PolicyDatasetInteraction().on_fit_start(trainer, module)
    assert policy.is_built


def test_weights_follow_from_the_seed_alone(tmp_path: Path) -> None:
    found = []
    for seed in (1, 1, 2):
        policy = MLP(hidden=[8])
        torch.manual_seed(len(found))
        trainer = make(tmp_path, max_steps=1, max_epochs=-1, seed=seed)
        trainer.fit(policy, MovesModule())
        found.append(weights(policy))
    assert same(found[0], found[1]) and not same(found[0], found[2])


@pytest.mark.slow
def test_a_trained_policy_is_loaded_without_its_data(tmp_path: Path) -> None:
    policy = MLP(hidden=[8], chunk_size=2)
    make(tmp_path, {"every_n_epochs": 1}, max_epochs=1).fit(policy, MovesModule())
    loaded = load_policy(tmp_path / "saved")
    assert same(weights(policy), weights(loaded))
    seen = {"observation.state": torch.ones(1, 3)}
    assert torch.equal(loaded.select_action(seen), policy.eval().select_action(seen))  # type: ignore[operator]


def test_data_that_knows_no_shapes_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MLP takes its shapes from the data, but neither"):
        make(tmp_path).fit(MLP(), loader())


def test_what_is_no_policy_and_no_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a model is a torch\.nn\.Module"):
        make(tmp_path).fit("act", loader())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no data module"):
        make(tmp_path).fit(Net(), datamodule=3)
    with pytest.raises(ConfigError, match="clip with gradient_clip_val"):
        make(tmp_path, optimizer={"clip_norm": 1.0})
    with pytest.raises(ConfigError, match="plain name"):
        make(tmp_path, experiment_name="../x")
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        make(tmp_path, max_epoch=3)


@pytest.mark.slow
def test_a_policy_may_bring_its_optimizers_and_the_trainer_a_schedule(tmp_path: Path) -> None:
    class Own(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    trainer = make(tmp_path, max_epochs=1)
    trainer.fit(Own(), loader())
    assert isinstance(trainer.optimizers[0], torch.optim.SGD)
    trainer = make(tmp_path, max_epochs=1, optimizer={"lr": 1.0, "schedule": "cosine", "warmup_steps": 2})
    trainer.fit(Net(), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.2


def test_what_makes_no_batches_is_refused(tmp_path: Path) -> None:
    batches = [{"x": torch.ones(4, 4), "y": torch.ones(4, 1)} for _ in range(3)]
    for data in (Noisy(), batches):
        with pytest.raises(DataError, match="which makes no batches, and to Lightning a list or dictionary is"):
            make(tmp_path).fit(Net(), data)
    trainer = make(tmp_path, max_epochs=2)
    trainer.fit(Net(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert trainer.global_step == 6


@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 9}])
def test_a_generator_lasts_for_one_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    batches = [{"x": torch.ones(4, 4), "y": torch.ones(4, 1)} for _ in range(3)]
    trainer = make(tmp_path, max_epochs=1)
    trainer.fit(Net(), (batch for batch in batches))
    assert trainer.global_step == 3
    with pytest.raises(DataError, match="generator has no batch for epoch 1: it can be read only once"):
        make(tmp_path, **options).fit(Net(), (batch for batch in batches))


def test_a_policy_without_shapes_is_evaluated_on_loaders_and_from_checkpoints(tmp_path: Path) -> None:
    assert make(tmp_path).validate(MLP(hidden=[8]), DataLoader(Moves(), 8), verbose=False)[0]["val/loss"] > 0
    policy, loaded = MLP(hidden=[8]), MLP(hidden=[8])
    make(tmp_path, {"every_n_epochs": 1}, max_epochs=1).fit(policy, MovesModule())
    plain = [Moves()[index] for index in range(8)]  # without a spec
    make(tmp_path).validate(loaded, DataLoader(plain, 8), ckpt_path=tmp_path / "saved", verbose=False)  # type: ignore[arg-type]
    assert same(weights(policy), weights(loaded))
