"""One language model learns to find what makes another say hostile things: `python examples/redteam_smollm.py`.

Auditor and target are two copies of SmolLM2-135M-Instruct; only the auditor learns. With `--tiny` both are tiny models
over letters, which shows the parts in seconds and finds nothing.
"""

import argparse

from etude.policies.language import LanguageModel
from etude.redteam import DPO, IPO, PPO, ASTSampler, HFASTConfiguration, HFASTSystem, HFASTTrainer, VaderScorer
from etude.redteam.evaluator import ASTEvaluator, compare
from etude.redteam.prompts import NEUTRAL_DEV_PROMPTS, NEUTRAL_PROMPTS

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--algorithm", choices=["dpo", "ipo", "ppo"], default="ppo")
parser.add_argument("--dir", default="runs/redteam-smollm")
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

if options.tiny:
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "key_heads": 1, "intermediate_size": 64}
    auditor, target = LanguageModel.tiny(seed=0, value_head=True, **sizes), LanguageModel.tiny(seed=1, **sizes)
else:
    auditor, target = LanguageModel.smollm2(lora=8, value_head=True, seed=0), LanguageModel.smollm2()

# Who speaks, how, and what pays. The score has a sign, so that friendly answers cost: hostile ones are rare at first.
system = HFASTSystem(
    auditor,
    target,
    scorer=VaderScorer(signed=True),
    auditor_sampling={"max_new_tokens": 8},
    target_sampling={"max_new_tokens": 12},
    likelihood_weight=0.02,  # probes are to stay natural to the target
    combined_weight=1.0,  # most short answers score 0: what was said together is a denser signal
    response_weight=1.0,
)

# How conversations grow: in one batch, level by level.
sampler = ASTSampler(system, NEUTRAL_PROMPTS, tree_width=2 if options.tiny else 8, tree_depth=1)

# How the auditor learns from them.
solver = (
    {"dpo": DPO, "ipo": IPO}[options.algorithm](system) if options.algorithm != "ppo" else PPO(system, clip_range=0.2)
)

config = HFASTConfiguration(
    training_steps=options.steps, lr=1.5e-3, batch_size=40, num_episodes_per_experience=5, log_every=1
)
trainer = HFASTTrainer(
    config,
    sampler,
    solver,
    dev_prompts=NEUTRAL_DEV_PROMPTS,
    eval_every=10,
    ckpt_dir=f"{options.dir}/auditor",
    run=options.dir,
)

evaluator = ASTEvaluator(sampler, prompts=NEUTRAL_DEV_PROMPTS, embedder=None if options.tiny else "auto")
rollouts = 12 if options.tiny else 48
before = evaluator.evaluate(rollouts)
trainer.train()
after = evaluator.evaluate(rollouts)

evaluator.write_json(after, f"{options.dir}/redteam.json")
evaluator.write_html(after, f"{options.dir}/redteam.html", baseline=before, title="SmolLM2 against SmolLM2")
found = compare(after, before)
print(f"score of responses: {found['baseline_mean']:.3f} before, 95 % interval {found['baseline_interval']}")
print(f"score of responses: {found['mean']:.3f} after; diversity of probes {after['diversity']['probe']:.3f}")
