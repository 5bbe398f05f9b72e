"""LeRobotDataModule: splits by episode, and serves Etude, torch and Lightning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")

import etude
from etude.config.build import build
from etude.config.load import load
from etude.config.training import TrainingConfiguration
from etude.data import Augment, LeRobotDataModule, LeRobotDataset, Mixture, as_data, evaluation_batches
from etude.data.lerobot.layout import BOOKKEEPING
from etude.data.module import find_dataset, split_episodes
from etude.errors import ConfigError, DataError
from etude.registry import DATASET_BUILDER_REGISTRY
from etude.types.protocols import Place
from tests.unit.data.lerobot.recordings import everything, record
from tests.unit.data.sources import same, taken


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return record(tmp_path / "d", (6, 5, 7, 4, 8))


def test_whole_episodes_are_held_out_by_seed(root: Path) -> None:
    module = LeRobotDataModule(root=root, val_fraction=0.4)
    train, held_out = module.train_dataset, module.val_dataset
    assert isinstance(train, LeRobotDataset) and isinstance(held_out, LeRobotDataset)
    assert len(held_out.episodes) == 2
    assert sorted(train.episodes + held_out.episodes) == list(range(5))
    again = LeRobotDataModule(root=root, val_fraction=0.4).val_dataset
    assert isinstance(again, LeRobotDataset) and again.episodes == held_out.episodes
    assert len({tuple(split_episodes(range(100), 0.1, seed)) for seed in range(5)}) == 5
    chosen = LeRobotDataModule(root=root, val_episodes=[3]).train_dataset
    assert isinstance(chosen, LeRobotDataset) and chosen.episodes == [0, 1, 2, 4]


def test_statistics_are_those_of_training_alone(root: Path) -> None:
    module = LeRobotDataModule(root=root, val_fraction=0.4)
    assert isinstance(module.train_dataset, LeRobotDataset)
    values = everything(module.train_dataset)["action"]
    stats = module.eval_data().spec["action"].stats  # type: ignore[index]
    assert torch.allclose(stats["mean"], values.mean(0))
    assert same(stats, module.spec["action"].stats)


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"features": ["action", "observation.state"]}, {"action", "observation.state"}),
        ({"features": ["observation.*"], "exclude": ["*wrist"]}, {"observation.state", "observation.images.top"}),
        ({"exclude": ["observation.images.*"]}, {"action", "observation.state"}),
        ({"exclude": ["action"], "cameras": ["wrist"]}, {"observation.state", "observation.images.wrist"}),
    ],
)
def test_features_can_be_chosen_and_left_out(tmp_path: Path, options: dict[str, Any], kept: set[str]) -> None:
    root = record(tmp_path / "c", (6, 5), cameras=True)
    module = LeRobotDataModule(root=root, val_fraction=0.4, **options)
    assert set(module.spec.features) == {*kept, "task_index"}
    for data in (module.train_data(), module.eval_data()):
        ((batch,),) = taken(data, [0], Place(batch_size=4))
        assert set(batch) == {*kept, *BOOKKEEPING}
    everything_there = LeRobotDataset(root)
    assert {"action", "observation.images.top"} <= set(everything_there.source.columns)


def test_a_feature_left_out_may_be_broken(tmp_path: Path) -> None:
    root = record(tmp_path / "c", (6, 5), cameras=True)
    next(root.rglob("*.mp4")).unlink()
    with pytest.raises(DataError, match="no such file"):
        LeRobotDataModule(root=root).train_data()
    assert len(LeRobotDataModule(root=root, exclude=["observation.images.top"]).train_dataset) == 11


@pytest.mark.parametrize(
    "options, message",
    [
        ({"features": ["observation.stat"]}, r"features names 'observation.stat'.*did you mean 'observation.state'"),
        (
            {"exclude": ["actions"]},
            r"names 'actions'.*none of observation.state, action; did you mean 'action'",
        ),
        ({"exclude": ["*"]}, "leave no feature of observation.state, action"),
        ({"exclude": ["index"]}, "which every batch has and cannot do without"),
        ({"features": "action"}, "must be a list of names or patterns, got the text 'action'"),
    ],
)
def test_a_choice_that_matches_nothing_is_refused(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        LeRobotDataModule(root=root, **options).train_data()


def test_etude_takes_its_data_from_the_module(root: Path) -> None:
    module = LeRobotDataModule(root=root, val_fraction=0.4)
    module.use_windows(observation=None, action=[0, 1])
    ((batch,),) = taken(as_data(module), [0], Place(batch_size=4))
    assert batch["action"].shape == (4, 2, 2)
    held_out = module.val_dataset
    assert isinstance(held_out, LeRobotDataset)
    batches = list(evaluation_batches(module, Place(batch_size=4)))
    assert torch.cat([one["episode_index"] for one in batches]).unique().tolist() == held_out.episodes
    assert batches[0]["action"].shape == (4, 2, 2)


class Linear(nn.Module):
    observation_delta_indices = None
    action_delta_indices = (0, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 6)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        error = (self.net(batch["observation.state"] / 1000).view(-1, 3, 2) - batch["action"] / 1000).square()
        return {"loss": error[~batch["action_is_pad"]].mean()}


@pytest.mark.slow
def test_a_policy_trains_and_evaluates_on_it(root: Path, tmp_path: Path) -> None:
    module = LeRobotDataModule(root=root, val_fraction=0.4)
    config = TrainingConfiguration(training_steps=3, batch_size=4, log_every=1, evaluate_every=3)
    trainer = etude.Trainer(
        Linear(), module, eval_data=module, config=config, run=tmp_path / "run", loggers=[], show_progress=False
    )
    result = trainer.fit()
    assert result.steps == 3 and {"train/loss", "eval/loss"} <= set(result.metrics)


def test_the_trainer_evaluates_on_what_is_held_out_by_itself(root: Path) -> None:
    def trainer(module: LeRobotDataModule, **options: Any) -> etude.Trainer:
        torch.manual_seed(0)
        return etude.Trainer(Linear(), module, run=False, loggers=[], show_progress=False, **options)

    config = TrainingConfiguration(training_steps=2, batch_size=4)
    module = LeRobotDataModule(root=root, val_episodes=[1, 3])
    found = trainer(module, config=config).fit().metrics["eval/loss"]
    assert found == trainer(module, config=config, eval_data=module).fit().metrics["eval/loss"]
    assert "eval/loss" not in trainer(module, config=config, eval_data=False).fit().metrics
    assert "eval/loss" not in trainer(LeRobotDataModule(root=root), config=config).fit().metrics
    mixed = LeRobotDataModule(mix={str(root): 1.0, str(record(root.parent / "e")): 2.0}, val_fraction=0.4)
    assert "eval/loss" in trainer(mixed, config=config).fit().metrics


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_torch_loaders_give_whole_batches(root: Path, workers: int) -> None:
    module = LeRobotDataModule(root=root, batch_size=8, val_fraction=0.2, num_workers=workers)
    loader = module.train_dataloader()
    seen = torch.cat([batch["index"] for batch in loader])
    assert isinstance(module.train_dataset, LeRobotDataset)
    assert sorted(seen.tolist()) == sorted(everything(module.train_dataset)["index"].tolist())
    del loader


@pytest.mark.slow
def test_lightning_trains_on_it(root: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)
            self.validated = 0

        def training_step(self, batch: Any, _: int) -> Any:
            return (self.net(batch["observation.state"] / 1000) - batch["action"] / 1000).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.validated += len(batch["action"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    model, module = Model(), LeRobotDataModule(root=root, val_episodes=[1], batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(model, datamodule=module.as_lightning())
    assert model.validated == 5 and trainer.global_step == 4


def test_augmentation_is_for_training_only(tmp_path: Path) -> None:
    root = record(tmp_path / "d", cameras=True)
    plain = LeRobotDataModule(root=root, val_episodes=[1])
    changed = LeRobotDataModule(root=root, val_episodes=[1], augment={"crop": 4})
    assert isinstance(changed.train_dataset, LeRobotDataset) and isinstance(changed.train_dataset.augment, Augment)
    place = Place(batch_size=8)
    before, after = taken(as_data(plain), [0], place)[0][0], taken(as_data(changed), [0], place)[0][0]
    assert torch.equal(before["index"], after["index"])
    assert not torch.equal(before["observation.images.top"], after["observation.images.top"])
    assert same(taken(as_data(changed), [0], place), [[after]])
    assert same(list(evaluation_batches(plain, place)), list(evaluation_batches(changed, place)))


def test_several_datasets_are_mixed_by_weight(root: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "o", (9, 9, 9))
    module = LeRobotDataModule(mix={str(root): 1.0, str(other): 3.0}, val_fraction=0.3)
    assert isinstance(module.train_dataset, Mixture) and isinstance(module.val_dataset, Mixture)
    steps = taken(as_data(module), list(range(32)), Place(batch_size=32))
    origins = torch.cat([batch["dataset_index"] for (batch,) in steps])
    assert origins.float().mean() == 0.75
    assert len(module.tasks) == 2
    with pytest.raises(DataError, match="with mix use val_fraction"):
        LeRobotDataModule(mix={str(root): 1.0, str(other): 1.0}, val_episodes=[0])


def test_a_dataset_by_name_is_found_or_the_remedy_told(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    assert find_dataset("d") == root
    assert len(LeRobotDataModule("d").train_dataset) == 30
    with pytest.raises(DataError, match=r"'lerobot/pusht' is not on this machine .*hf download lerobot/pusht"):
        LeRobotDataModule("lerobot/pusht")
    with pytest.raises(DataError, match="for a directory use root"):
        LeRobotDataModule("../d")


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "exactly one of repo_id, root and mix"),
        ({"repo_id": "a/b", "root": "x"}, "exactly one"),
        ({"root": "x", "val_fraction": 1.5}, "val_fraction must lie"),
        ({"mix": {}}, "mix names no dataset"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        LeRobotDataModule(**options)


def test_too_few_episodes_are_told(tmp_path: Path, root: Path) -> None:
    single = LeRobotDataModule(root=record(tmp_path / "one", (6,)), val_fraction=0.5)
    with pytest.raises(DataError, match="one episode cannot be split"):
        single.train_data()
    with pytest.raises(DataError, match="all 5 episodes are held out"):
        LeRobotDataModule(root=root, val_episodes=range(5)).train_data()
    with pytest.raises(DataError, match="no episodes are held out"):
        LeRobotDataModule(root=root).eval_data()
    with pytest.raises(DataError, match="val_episodes names episode 9"):
        LeRobotDataModule(root=root, val_episodes=[9]).train_data()


def test_a_part_may_be_served_alone_as_stored_configurations_ask(root: Path) -> None:
    assert DATASET_BUILDER_REGISTRY.get("lerobot") is LeRobotDataModule
    parts: dict[str, Any] = {
        name: LeRobotDataModule(root=root, split=name, val_fraction=0.4)  # type: ignore[arg-type]
        for name in ("all", "train", "validation")
    }
    lengths = {name: part.train_data().length for name, part in parts.items()}
    assert lengths["train"] + lengths["validation"] == lengths["all"] == 30
    assert lengths == {name: part.eval_data().length for name, part in parts.items()}
    assert not any(part.has_validation for part in parts.values())
    train, validation = parts["train"].train_data(), parts["validation"].train_data()
    assert same(train.spec["action"].stats, validation.spec["action"].stats)
    assert LeRobotDataModule(root=root, split="train").val_dataset is not None, "a tenth unless told"
    with pytest.raises(DataError, match="split must be"):
        LeRobotDataModule(root=root, split="test")  # type: ignore[arg-type]


def test_what_holds_nothing_out_is_evaluated_on_whole(root: Path) -> None:
    batches = evaluation_batches(LeRobotDataModule(root=root), Place(batch_size=30))
    assert [len(batch["action"]) for batch in batches] == [30]


def test_a_configuration_needs_no_second_block_for_evaluation(root: Path, tmp_path: Path) -> None:
    text = f"""
policy: {{type: mlp, params: {{hidden: [8]}}}}
data: {{type: lerobot, params: {{root: {root}, val_episodes: [1, 3]}}}}
training: {{training_steps: 1, evaluate_every: 1, batch_size: 4}}
"""
    (tmp_path / "one.yaml").write_text(text)
    metrics = build(load(tmp_path / "one.yaml"), run=tmp_path / "run").fit().metrics
    assert metrics["eval/loss"] > 0
    (tmp_path / "bad.yaml").write_text(text.replace("val_episodes: [1, 3]", "batch_size: 4, camera: top"))
    wrong = r"(?s)batch_size: is passed by the framework.*camera: .*did you mean 'cameras'"
    with pytest.raises(ConfigError, match=wrong):
        load(tmp_path / "bad.yaml")


def test_a_dataset_that_is_not_there_comes_with_how_to_record_it(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no such directory; .*: etude record --env ENV --root \S+/absent .*list presets"
    ):
        LeRobotDataModule(root=tmp_path / "absent").train_data()
