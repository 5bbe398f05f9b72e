"""The code of the Lightning trainer's document, with only imports, paths and sizes changed."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

pytest.importorskip("pyarrow")

from etude.data import LeRobotDataModule
from etude.engines.lightning import PolicyDatasetInteraction, Trainer
from etude.errors import ConfigError
from etude.policies.act import ACT
from tests.processes import reap, run_ranks, spawn
from tests.unit.data.lerobot.recordings import record
from tests.unit.engines.lightning.parts import Net, loader, weights

SMALL: dict[str, Any] = {
    "dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1, "n_vae_encoder_layers": 1,
    "chunk_size": 3, "latent_dim": 4,
}  # fmt: skip
QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _pusht(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a small dataset where lerobot would have downloaded it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    record(tmp_path / "hub" / "lerobot" / "pusht", (6, 5, 7))


def pusht() -> LeRobotDataModule:
    return LeRobotDataModule(repo_id="lerobot/pusht", batch_size=8, val_episodes=[1])


def test_basic_training() -> None:
    policy = ACT(**SMALL)
    datamodule = pusht()
    trainer = Trainer(max_epochs=2, **QUIET)
    trainer.fit(policy, datamodule)
    assert policy.is_built and trainer.global_step == 4
    logs = Path("experiments/lightning_logs/version_0")
    assert (logs / "hparams.yaml").is_file()
    assert list(logs.glob("events.out.tfevents.*"))
    (checkpoint,) = (logs / "checkpoints").iterdir()
    assert checkpoint.name == "epoch=1-step=4.ckpt"
    shown = yaml.safe_load((logs / "hparams.yaml").read_text())
    assert shown["policy"] == "ACT" and shown["chunk_size"] == 3


def test_with_experiment_name() -> None:
    trainer = Trainer(max_epochs=2, experiment_name="pusht_act_v1", **QUIET)
    trainer.fit(ACT(**SMALL), pusht())
    logs = Path("experiments/pusht_act_v1/version_0")
    assert {path.name.partition(".")[0] for path in logs.iterdir()} == {"checkpoints", "hparams", "events"}
    again = Trainer(max_epochs=1, experiment_name="pusht_act_v1", **QUIET)
    assert again.log_dir is not None and Path(again.log_dir).name == "version_1"


def test_custom_logger() -> None:
    trainer = Trainer(max_epochs=1, logger=CSVLogger("elsewhere", name="robot"), log_every_n_steps=1, **QUIET)
    trainer.fit(ACT(**SMALL), pusht())
    rows = Path("elsewhere/robot/version_0/metrics.csv").read_text()
    assert "train/loss" in rows and "val/loss" in rows and "train/kl" in rows
    assert not Path("experiments").exists()
    with pytest.raises(ConfigError, match="give your own logger its name"):
        Trainer(experiment_name="x", logger=CSVLogger("elsewhere"), **QUIET)


def test_wandb_logger(tmp_path: Path) -> None:
    """In a process of its own: wandb keeps one run a process, and another test may have left its own."""
    pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    def work() -> None:
        trainer = Trainer(max_epochs=1, logger=WandbLogger(project="robot", offline=True), **QUIET)
        trainer.fit(Net(), loader())
        assert trainer.global_step == 6
        trainer.logger.experiment.finish()  # type: ignore[union-attr]

    assert reap(spawn(work)) == [0]
    assert list((tmp_path / "wandb").rglob("run-*.wandb"))


def test_interface() -> None:
    assert issubclass(Trainer, lightning.Trainer)
    parameters = inspect.signature(Trainer).parameters
    expected = {
        "experiment_name": None, "accelerator": "auto", "devices": "auto", "precision": None, "max_epochs": None,
        "gradient_clip_val": None, "logger": None, "default_root_dir": "experiments", "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 1,
    }  # fmt: skip
    assert {name: parameters[name].default for name in expected} == expected
    trainer = Trainer(**QUIET)
    assert trainer.num_sanity_val_steps == 0  # type: ignore[attr-defined]
    assert Path(trainer.default_root_dir).name == "experiments"
    assert sum(isinstance(c, PolicyDatasetInteraction) for c in trainer.callbacks) == 1  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU", "ignore:Precision bf16-mixed is not supp")
def test_mixed_precision() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, precision="16-mixed", max_epochs=2, enable_progress_bar=False)
    trainer.fit(ACT(**SMALL), pusht())
    assert trainer.global_step == 4


def test_two_processes(tmp_path: Path) -> None:
    def work() -> None:
        trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, enable_progress_bar=False)
        policy = ACT(**SMALL)
        trainer.fit(policy, pusht())
        seen = float(sum(value.double().sum() for value in weights(policy).values()))
        found = {"sum": seen, "steps": trainer.global_step, "loss": float(trainer.callback_metrics["val/loss"])}
        (tmp_path / f"{trainer.global_rank}.json").write_text(json.dumps(found))

    torch.set_num_threads(1)
    assert run_ranks(work, 2) == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["steps"] == 2  # 13 frames, 8 a batch, 2 ranks: 1 batch each and epoch
    assert len(list(Path("experiments/lightning_logs/version_0/checkpoints").iterdir())) == 1


def test_development_mode() -> None:
    trainer = Trainer(fast_dev_run=True, **QUIET)
    trainer.fit(ACT(**SMALL), pusht())
    assert trainer.global_step == 1
    assert not Path("experiments").exists()


def test_overfit_on_a_small_subset() -> None:
    seen: list[list[int]] = []

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch["index"].tolist())

    datamodule = LeRobotDataModule(repo_id="lerobot/pusht", batch_size=4)
    trainer = Trainer(overfit_batches=2, max_epochs=3, callbacks=[Watch()], **QUIET)
    trainer.fit(ACT(**SMALL), datamodule)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3
