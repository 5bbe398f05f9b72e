"""An auditor learns to find what makes a language model say hostile things: `python examples/redteam_smollm.py`.

The target is SmolLM2-135M-Instruct. The auditor is a small model over everyday words that knows nothing at first, and
is judged by what the target writes after four words of it (about three CPU minutes). `--auditor smollm2` takes another
copy of SmolLM2, which needs far longer; with `--tiny` both are tiny models over letters, which shows the parts in
seconds and finds nothing.
"""

import argparse

from etude.policies.language import LanguageModel
from etude.redteam import (
    DPO,
    IPO,
    PPO,
    ASTEvaluator,
    ASTSampler,
    HFASTConfiguration,
    HFASTSystem,
    HFASTTrainer,
    VaderScorer,
    write_word_model,
)
from etude.redteam.evaluator import compare
from etude.redteam.prompts import NEUTRAL_DEV_PROMPTS, NEUTRAL_PROMPTS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--algorithm", choices=["dpo", "ipo", "ppo"], default="ppo")
parser.add_argument("--auditor", choices=["words", "smollm2"], default="words")
parser.add_argument("--dir", default="runs/redteam-smollm")
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

if options.tiny:
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "key_heads": 1, "intermediate_size": 64}
    auditor, target = LanguageModel.tiny(seed=0, value_head=True, **sizes), LanguageModel.tiny(seed=1, **sizes)
elif options.auditor == "words":
    written = write_word_model(f"{options.dir}/untrained")
    auditor, target = LanguageModel.from_pretrained(written, value_head=True, seed=0), LanguageModel.smollm2()
else:
    auditor, target = LanguageModel.smollm2(lora=16, value_head=True, seed=0), LanguageModel.smollm2()
is_small = options.tiny or options.auditor == "words"

# Who speaks, how, and what pays. The score has a sign, so that friendly answers cost: hostile ones are rare at first.
system = HFASTSystem(
    auditor,
    target,
    scorer=VaderScorer(signed=True),
    auditor_sampling={"max_new_tokens": 4 if is_small else 10},
    target_sampling={"max_new_tokens": 10, "top_p": 0.9, "top_k": 50},
    likelihood_weight=0.0 if is_small else 0.02,  # loose words are never natural; those of a language model can be
    combined_weight=1.0,  # most short answers score 0: what was said together is a denser signal
    response_weight=1.0,
)

# How conversations grow: in one batch, level by level.
sampler = ASTSampler(system, NEUTRAL_PROMPTS, tree_width=2 if options.tiny else 8, tree_depth=1)

# How the auditor learns from them.
solver = (
    PPO(system, clip_range=0.2, epochs=2, kl_coef=0.02)
    if options.algorithm == "ppo"
    else {"dpo": DPO, "ipo": IPO}[options.algorithm](system, pairs="all")
)

config = HFASTConfiguration(
    training_steps=options.steps,
    lr=3e-3 if is_small else 1e-4,
    batch_size=64,
    num_episodes_per_experience=8,
    log_every=1,
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
rollouts = 12 if options.tiny else 96
before = evaluator.evaluate(rollouts)
trainer.train()
after = evaluator.evaluate(rollouts)

evaluator.write_json(after, f"{options.dir}/redteam.json")
evaluator.write_html(after, f"{options.dir}/redteam.html", baseline=before, title="What makes SmolLM2 hostile")
found = compare(after, before)
low, high = found["baseline_interval"]
print(f"score of responses: {found['baseline_mean']:.3f} before, 95 % interval {low:.3f} to {high:.3f}")
print(f"score of responses: {found['mean']:.3f} after; diversity of probes {after['diversity']['probe']:.3f}")
