"""The code of the guide to custom trainers, as it stands there but for imports, paths and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainingArguments

pytest.importorskip("pyarrow")

from etude.data.lerobot.reader import LeRobotDataset

# In policy/act/trainer.py
from etude.engines.huggingface import BaseTrainer
from etude.policies import ACTPolicy
from tests.processes import reap, run_example, run_ranks, spawn
from tests.unit.data.lerobot.recordings import record
from tests.unit.engines.huggingface.parts import same


class ACTTrainer(BaseTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        """
        How the loss is computed by Trainer. By default, all models return a tuple (loss, ...)
        """
        # The `model` is your `ACTPolicy` instance.
        # The `inputs` are a batch from your `DataLoader`.

        # The forward pass of your model should return a dictionary of losses.
        loss_dict = model(**inputs)

        # The trainer expects a single loss value.
        # You can sum them or return the primary loss.
        loss = loss_dict["loss"]

        return (loss, loss_dict) if return_outputs else loss


SMALL: dict[str, Any] = {
    "dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1, "n_vae_encoder_layers": 1,
    "chunk_size": 3, "latent_dim": 4,
}  # fmt: skip


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LeRobotDataset:
    """Leave a pretrained policy and recorded demonstrations in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    record(tmp_path / "demonstrations", (6, 5, 7))
    policy = ACTPolicy(**SMALL)
    train_dataset = LeRobotDataset(tmp_path / "demonstrations")
    train_dataset.use_windows(action=policy.action_delta_indices)
    policy.build(train_dataset.spec)
    policy.save_pretrained("pretrained")
    return train_dataset


def train(train_dataset: LeRobotDataset, **options: Any) -> ACTTrainer:
    """In train.py (simplified)."""
    # 1. Load your model and datasets
    model = ACTPolicy.from_pretrained("pretrained")
    train_loader = DataLoader(train_dataset, batch_size=2, shuffle=True)

    # 2. Define Training Arguments
    training_args = TrainingArguments(
        output_dir="ckpt/my_act_model",
        num_train_epochs=5,
        learning_rate=1e-4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        fp16=True,  # Enable mixed-precision
        # ... and many more options
        **options,
    )

    # 3. Instantiate your custom trainer
    trainer = ACTTrainer(
        model=model,
        args=training_args,
        train_loader=train_loader,  # Pass the pre-made loader
    )

    # 4. Start training
    trainer.train()
    return trainer


@pytest.mark.slow
def test_the_guide_trains_in_half_precision_with_accumulation(prepared: LeRobotDataset) -> None:
    trainer = train(prepared, report_to=["tensorboard"], lr_scheduler_type="cosine", logging_steps=2)
    before, after = ACTPolicy.from_pretrained("pretrained").state_dict(), trainer.model.state_dict()
    assert trainer.state.global_step == 15  # 18 frames, 2 a batch, 4 batches a step, 5 epochs
    assert not same(dict(before), dict(after))
    assert all(torch.isfinite(value).all() for value in after.values())
    assert trainer.accelerator.scaler is not None, "fp16 must not be dropped without a word"
    assert same(dict(ACTPolicy.from_pretrained("ckpt/my_act_model/checkpoint-15").state_dict()), dict(after))
    assert list(Path("ckpt/my_act_model").rglob("events.out.tfevents.*"))
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 1e-5


@pytest.mark.slow
def test_the_guide_trains_on_two_processes(prepared: LeRobotDataset) -> None:
    def work() -> None:
        torch.set_num_threads(1)
        trainer = train(prepared, use_cpu=True)
        assert trainer.state.global_step == 10  # 9 batches, 5 for each rank, 4 a step
        torch.save(trainer.model.state_dict(), f"rank-{trainer.args.process_index}.pt")

    assert run_ranks(work, 2) == [0, 0]
    first, second = (torch.load(f"rank-{rank}.pt", weights_only=True) for rank in range(2))
    assert same(first, second)
    assert same(dict(ACTPolicy.from_pretrained("ckpt/my_act_model/checkpoint-10").state_dict()), first)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


@pytest.mark.slow
def test_a_mean_read_from_a_policys_loss_is_weighed_as_the_loss_itself(prepared: LeRobotDataset) -> None:
    """The trainer of the guide makes the update of a BaseTrainer that sees the whole loss, on any split of a batch."""
    found = []
    for kind, size in ((BaseTrainer, 16), (ACTTrainer, 16), (ACTTrainer, 4), (ACTTrainer, 1)):
        torch.manual_seed(0)
        model = ACTPolicy(**SMALL, dropout=0.0, use_vae=False)
        model.build(prepared.spec)
        start = flat(model)
        args = TrainingArguments(
            output_dir="split", max_steps=1, gradient_accumulation_steps=16 // size, learning_rate=0.1, optim="sgd",
            max_grad_norm=0.0, use_cpu=True, disable_tqdm=True, save_strategy="no", lr_scheduler_type="constant",
        )  # fmt: skip
        data = torch.utils.data.Subset(prepared, range(16))
        kind(model=model, args=args, train_loader=DataLoader(data, batch_size=size)).train()
        found.append(flat(model))
    moved = (found[0] - start).norm()
    assert moved > 0 and all((other - found[0]).norm() / moved < 1e-4 for other in found[1:])


@pytest.mark.slow
def test_wandb_hears_of_the_run(prepared: LeRobotDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: wandb keeps one run a process, and would lend it to other tests."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")

    def work() -> None:
        import wandb

        torch.set_num_threads(1)
        trainer = train(prepared, report_to=["wandb"], logging_steps=2, use_cpu=True, save_strategy="no")
        assert trainer.state.global_step == 15
        wandb.finish()

    assert reap(spawn(work)) == [0]
    assert list(Path("wandb").rglob("run-*.wandb"))


@pytest.mark.slow
def test_the_example_runs(repository: Path, tmp_path: Path, child_env: dict[str, str]) -> None:
    path = repository / "examples" / "huggingface_trainer.py"
    assert len(path.read_text().splitlines()) <= 120
    done = run_example(path, cwd=tmp_path, env=child_env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same weights" in done.stdout
