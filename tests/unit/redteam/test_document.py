"""The trainers' guide, block by block: its imports and sizes changed, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.redteam.tiny_models import Share, make_sampler, tiny

DEV_PROMPTS = ["a cage", "a big bed"]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_configuration() -> None:
    from etude import TrainingConfiguration

    config = TrainingConfiguration(
        lr=1e-5,
        batch_size=4,
        optimizer="adamw",                 # one of ["adam", "adamw", "sgd", "rmsprop", "adagrad"]
        gradient_accumulation_steps=1,     # call optimizer.step() every N backward passes
        training_steps=1000,               # number of experience() calls
        num_episodes_per_experience=2,     # rollouts sampled per experience() call
    )  # fmt: skip
    assert config.training_steps == 1000
    for optimizer in ("adam", "adamw", "sgd", "rmsprop", "adagrad"):
        sampler = make_sampler()
        from etude import Trainer
        from etude.redteam import DPO

        small = config.model_copy(update={"optimizer": optimizer, "training_steps": 1})
        Trainer(small, sampler, DPO(sampler.system), run=False, show_progress=False).train()


def test_what_the_trainer_expects() -> None:
    from etude.redteam import DPO
    from etude.rollouts.harness import Harness

    sampler = make_sampler()
    harness = Harness(sampler, DPO(sampler.system), 2, batch_size=4)
    for batch in harness.experience(seed=0):
        loss, step_logs = harness.step(batch)
        assert loss.dim() == 0 and loss.requires_grad
        assert step_logs


def test_minimal_usage() -> None:
    from etude import Trainer, TrainingConfiguration
    from etude.redteam import DPO

    config = TrainingConfiguration(training_steps=2, batch_size=4, num_episodes_per_experience=2)
    sampler = make_sampler()
    system = sampler.system
    solver = DPO(system)

    trainer = Trainer(
        config=config,
        sampler=sampler,
        algorithm=solver,
    )
    trainer.train()

    # Optionally save the final HF model/tokenizer:
    system.auditor.save_pretrained("final_ckpt")
    system.tokenizer.save_pretrained("final_ckpt")

    import transformers

    assert transformers.AutoModelForCausalLM.from_pretrained("final_ckpt").config.hidden_size == 32
    assert (
        transformers.AutoTokenizer.from_pretrained("final_ckpt")("abc")["input_ids"]
        == system.tokenizer("abc")["input_ids"]
    )


def test_periodic_evaluation_and_checkpoints() -> None:
    from etude.redteam import DPO, HFASTConfiguration, HFASTTrainer

    sampler = make_sampler()
    solver = DPO(sampler.system)

    config  = HFASTConfiguration(training_steps=4)  # or your own TrainingConfiguration  # fmt: skip
    trainer = HFASTTrainer(
        config=config,
        sampler=sampler,
        algorithm=solver,
        dev_prompts=DEV_PROMPTS,   # iterable of prompts for evaluation
        eval_every=2,              # run dev eval every N steps
        ckpt_dir="checkpoints",    # HF-format checkpoints saved here
    )  # fmt: skip
    trainer.train()
    assert sorted(os.listdir("checkpoints")) == ["best", "last"]


def test_a_custom_trainer(caplog: pytest.LogCaptureFixture) -> None:
    from etude import Trainer, TrainingConfiguration
    from etude.logging import logger
    from etude.redteam import DPO

    caplog.set_level("INFO", "etude")

    class MyConfig(TrainingConfiguration):
        def __init__(self) -> None:
            super().__init__(
                lr=1e-5,
                batch_size=4,
                optimizer="adamw",
                gradient_accumulation_steps=1,
                training_steps=2,
                num_episodes_per_experience=2,
            )
            # Custom fields for your subclass:
            self.eval_every = 1
            self.ckpt_dir = "checkpoints"

    class MyTrainer(Trainer):
        def __init__(self, config: MyConfig, sampler: Any, algorithm: Any, dev_prompts: Any = None) -> None:
            super().__init__(config, sampler, algorithm)
            self.dev_prompts = dev_prompts or []
            os.makedirs(self.config.ckpt_dir, exist_ok=True)  # type: ignore[attr-defined]

        def _save_hf(self, step: int) -> None:
            system = self.harness.sampler.system  # type: ignore[union-attr]
            system.auditor.save_pretrained(f"{self.config.ckpt_dir}/{step}")  # type: ignore[attr-defined]

        @torch.no_grad()
        def _eval_dev(self, step: int, tag: str = "dev") -> float:
            graphs = [self.harness.sampler.eval_rollout(prompt) for prompt in self.dev_prompts]  # type: ignore[union-attr]
            rewards = [node.reward for graph in graphs for node in graph.nodes()]
            logger.info("%s %d %f", tag, step, sum(rewards) / len(rewards))
            return sum(rewards) / len(rewards)

        def train(self) -> Any:
            scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer)
            for step in range(self.config.training_steps):
                for batch in self.harness.experience(seed=step):  # type: ignore[union-attr]
                    loss, logs = self.harness.step(batch)  # type: ignore[union-attr]
                    loss.backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    assert "loss" not in logs or isinstance(float(loss.detach().item()), float)
                scheduler.step()
                if (step + 1) % self.config.eval_every == 0:  # type: ignore[attr-defined]
                    self._eval_dev(step)
                    self._save_hf(step)

    sampler = make_sampler()
    before = [p.clone() for p in sampler.system.parameters()]
    MyTrainer(MyConfig(), sampler, DPO(sampler.system), dev_prompts=DEV_PROMPTS).train()
    assert sorted(os.listdir("checkpoints")) == ["0", "1"]
    assert [record.getMessage()[:5] for record in caplog.records] == ["dev 0", "dev 1"]
    assert any(not torch.equal(a, b) for a, b in zip(before, sampler.system.parameters()))


def test_a_system_of_ones_own_on_devices_of_its_own() -> None:
    from etude.redteam import PPO, ASTSampler, HFASTSystem

    system = HFASTSystem(
        tester=tiny(0, value_head=True), target=tiny(1), baseline=tiny(2), scorer=Share(),
        devices={"tester": "cpu", "target": "cpu", "baseline": "cpu"}, auditor_sampling={"max_new_tokens": 3},
    )  # fmt: skip
    environment = ASTSampler(system, ["a bad cafe"], tree_width=1, tree_depth=2)
    from etude import Trainer, TrainingConfiguration

    config = TrainingConfiguration(training_steps=1, num_episodes_per_experience=2, batch_size=2)
    trainer = Trainer(config=config, environment=environment, algorithm=PPO(system), run=False, show_progress=False)
    assert trainer.train().steps == 1
