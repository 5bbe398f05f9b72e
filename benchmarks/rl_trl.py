"""GRPO steps of TRL, in a Python of its own, on the model, prompts, group size, lengths and rate that ours has."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROGRAM = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

given = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(given["path"], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(given["path"], padding_side="left")
costs, marks, generating, tokens = [], [], [], []

def reward(completions, **kwargs):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

class Clock(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        marks.append(time.process_time())
    def on_step_end(self, *args, **kwargs):
        costs.append(time.process_time() - marks[-1])

class Timed(GRPOTrainer):
    def _generate(self, *args, **kwargs):
        began = time.perf_counter()
        found = super()._generate(*args, **kwargs)
        generating.append(time.perf_counter() - began)
        tokens.append(sum(len(row) for row in found[1]))
        return found

config = GRPOConfig(
    output_dir=given["scratch"], per_device_train_batch_size=32, num_generations=8, max_completion_length=16,
    learning_rate=1e-6, max_steps=given["steps"] + 2, temperature=1.0, beta=0.0, num_iterations=1, use_cpu=True,
    bf16=False, fp16=False, gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1,
    disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=1.0, shuffle_dataset=False,
)
trainer = Timed(
    model=model, args=config, processing_class=tokenizer, reward_funcs=reward, callbacks=[Clock()],
    train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in given["prompts"]]),
)
marks.append(time.process_time())
trainer.train()
import statistics
print("FOUND " + json.dumps({
    "cpu": statistics.median(costs[2:]), "generate": statistics.median(generating[2:]),
    "tokens": statistics.median(tokens[2:]),
}))
"""


@dataclass(frozen=True)
class TRL:
    """A Python that has trl."""

    python: str

    @classmethod
    def find(cls) -> TRL | None:
        """Return the one that the environment names."""
        python = os.environ.get("ETUDE_TRL_PYTHON")
        return cls(python) if python else None

    def step_costs(self, model: str, steps: int) -> dict[str, float]:
        """Return the CPU seconds of a step, and what it generated in how long."""
        from etude.policies.language import LanguageModel
        from etude.rollouts.tasks import Addition, Digits

        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "model"
            policy = LanguageModel.tiny(seed=0) if model == "tiny" else LanguageModel.smollm2()
            policy.save_pretrained(path)
            prompts = [task.prompt for task in (Digits(64) if model == "tiny" else Addition(size=64))]
            given = {"path": str(path), "scratch": scratch, "steps": steps, "prompts": prompts}
            env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
            done = subprocess.run(
                [self.python, "-c", PROGRAM, json.dumps(given)], env=env, capture_output=True, text=True, check=False
            )
        line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
        if line is None:
            raise RuntimeError(f"TRL's run failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        found: dict[str, float] = json.loads(line.removeprefix("FOUND "))
        return found
