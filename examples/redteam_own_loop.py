"""A red-team trainer with a loop of its own: `python examples/redteam_own_loop.py`.

The loop collects experience, learns from it batch by batch with accumulation and a schedule, evaluates, keeps the best
auditor as a Hugging Face directory and stops early. The models are tiny and speak in letters; the auditor learns, in
seconds, to write the letter that is scored.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch

from etude import Trainer, TrainingConfiguration
from etude.logging import logger
from etude.policies.language import LanguageModel
from etude.redteam import PPO, ASTSampler, HFASTSystem
from etude.rollouts.system import Scorer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=25)
parser.add_argument("--dir", default="runs/redteam-own-loop")
options = parser.parse_args()


class LetterE(Scorer):
    """The share of the letter e: a stand-in for what a classifier would find bad."""

    def score(self, texts: Sequence[str]) -> list[float]:
        return [text.count("e") / max(1, len(text)) for text in texts]


class MyConfig(TrainingConfiguration):
    def __init__(self) -> None:
        super().__init__(
            lr=1e-2,
            batch_size=8,
            optimizer="adamw",
            gradient_accumulation_steps=2,
            training_steps=options.steps,
            num_episodes_per_experience=4,
        )
        # Fields of your own:
        self.eval_every = 5
        self.patience = 3
        self.ckpt_dir = f"{options.dir}/auditor"


class MyTrainer(Trainer):
    """Evaluates on dev prompts, keeps the best auditor, and stops when it no longer improves."""

    def __init__(self, config: MyConfig, sampler: Any, algorithm: Any, dev_prompts: Sequence[str]) -> None:
        super().__init__(config, sampler, algorithm)
        self.sampler, self.dev_prompts = sampler, list(dev_prompts)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, config.training_steps)
        os.makedirs(config.ckpt_dir, exist_ok=True)

    def save_hf(self) -> None:
        self.sampler.system.auditor.save_pretrained(f"{self.config.ckpt_dir}/best")

    @torch.no_grad()
    def eval_dev(self) -> float:
        graphs = self.sampler.eval_rollouts(self.dev_prompts)
        rewards = [node.reward for graph in graphs for node in graph.nodes()]
        return sum(rewards) / len(rewards)

    def train(self) -> float:
        """Train, and return the best score on the dev prompts."""
        config, harness = self.config, self.harness
        best, stalled, waiting = self.eval_dev(), 0, 0
        print(f"before: {best:.3f}")
        for step in range(config.training_steps):
            for batch in harness.experience(seed=step):  # the same seed gives the same rollouts
                loss, logs = harness.step(batch)
                (loss / config.gradient_accumulation_steps).backward()
                waiting += 1
                if waiting == config.gradient_accumulation_steps:
                    torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    waiting = 0
            self.scheduler.step()
            if (step + 1) % config.eval_every:
                continue
            score = self.eval_dev()
            logger.info("step %d: score %.3f, loss %.3f", step + 1, score, loss.item())
            rate = self.scheduler.get_last_lr()[0]
            print(f"step {step + 1}: score {score:.3f}, reward {logs['reward']:.3f}, lr {rate:.4f}")
            best, stalled = (score, 0) if score > best else (best, stalled + 1)
            if stalled == 0:
                self.save_hf()
            if stalled == config.patience:
                print(f"stopped: no better than {best:.3f} in {stalled} evaluations")
                break
        return best


torch.manual_seed(0)
torch.set_num_threads(1)
sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "key_heads": 1, "intermediate_size": 64}
system = HFASTSystem(
    LanguageModel.tiny("abcdefghij ", seed=0, value_head=True, **sizes),
    LanguageModel.tiny("abcdefghij ", seed=1, **sizes),
    scorer=LetterE(),
    auditor_sampling={"max_new_tokens": 4},
    target_sampling={"max_new_tokens": 4},
    likelihood_weight=0.0,
    combined_weight=1.0,
)
sampler = ASTSampler(system, ["a bad cafe", "i hide", "each idea"], tree_width=8, tree_depth=1)
trainer = MyTrainer(MyConfig(), sampler, PPO(system), dev_prompts=["a cage", "a big bed"])
print(f"best: {trainer.train():.3f}")
