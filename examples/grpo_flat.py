"""GRPO with no framework between you and it: `python examples/grpo_flat.py`.

Rollouts, advantages, loss and update, one after the other, on pure functions. A tiny model that knows nothing learns in
seconds to answer with digits. `GRPOTrainer` (the last lines say with which options) makes the same completions, rewards
and weights, bit for bit; what it adds is everything around these lines: checkpoints, ranks, engines, reports.

Shape letters: B completions, T tokens.
"""

import argparse

import torch
from torch import Tensor

from etude.algorithms.advantages import grpo
from etude.algorithms.aggregate import aggregate
from etude.algorithms.losses import ppo_clip
from etude.policies.language import LanguageModel
from etude.policies.language.sampling import Completion, Sampling
from etude.rng import STREAM_ROLLOUT, fold

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--compare", action="store_true", help="train the same with GRPOTrainer, and compare")
options = parser.parse_args()

PROMPTS = [f"count {letter}: " for letter in "abcdefgh"]
SEED, PROMPTS_PER_STEP, GROUP_SIZE, MAX_NEW_TOKENS, LR = 0, 4, 8, 16, 3e-3


def reward(text: str) -> float:
    """Return the share of characters that are digits."""
    return sum(character.isdigit() for character in text) / len(text) if text else 0.0


def padded(rows: list[list[float]], fill: float, dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype)


def as_batch(prompts: list[list[int]], completions: list[Completion]) -> dict[str, Tensor]:
    """Put prompts and what followed them into rows: only what was sampled counts."""
    pairs = list(zip(prompts, completions, strict=True))
    tokens = [prompt + completion.tokens for prompt, completion in pairs]
    sampled = [[0] * len(prompt) + [1] * len(completion.tokens) for prompt, completion in pairs]
    log_probs = [[0.0] * len(prompt) + completion.logprobs for prompt, completion in pairs]
    return {
        "input_ids": padded(tokens, policy.pad_token_id, torch.long),
        "attention_mask": padded([[1] * len(row) for row in tokens], 0, torch.long),
        "loss_mask": padded(sampled, 0, torch.float32),
        "old_log_probs": padded(log_probs, 0.0, torch.float32),
    }


torch.set_num_threads(1)
policy = LanguageModel.tiny(seed=0)
parameters = list(policy.parameters())
optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, fused=True)
sampling = Sampling(MAX_NEW_TOKENS)

for step in range(options.steps):
    # 1. Rollouts: a group of completions for each prompt. A key names the random numbers, so nothing else decides.
    positions = range(step * PROMPTS_PER_STEP, (step + 1) * PROMPTS_PER_STEP)
    prompts = [policy.encode(PROMPTS[position % len(PROMPTS)]) for position in positions]
    keys = [fold(fold(SEED, STREAM_ROLLOUT, step), position) >> 1 for position in positions]
    groups = policy.generate(prompts, sampling, n=GROUP_SIZE, keys=keys)
    completions = [completion for group in groups for completion in group]
    rewards_B = torch.tensor([reward(completion.text) for completion in completions])

    # 2. Advantages: how much better than the others of its group, in deviations of the group.
    group_ids = [position for position in positions for _ in range(GROUP_SIZE)]
    advantages_B = grpo(rewards_B, group_ids)

    # 3. Loss: the clipped objective by token, the mean of each completion, their mean.
    batch = as_batch([prompt for prompt in prompts for _ in range(GROUP_SIZE)], completions)
    mask_BT = batch["loss_mask"]
    log_probs_BT = policy.log_probs(batch)
    loss_BT = ppo_clip(log_probs_BT, batch["old_log_probs"], advantages_B[:, None] * mask_BT, mask_BT)
    loss = aggregate(loss_BT, mask_BT, "sequence_mean")

    # 4. Update: gradients no longer than 1, and a step of AdamW.
    (loss.total / loss.weight).backward()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if norm > 1.0:
        for gradient in gradients:
            gradient.mul_(1.0 / (norm + 1e-6))
    optimizer.step()
    optimizer.zero_grad()

    if step % 5 == 0 or step == options.steps - 1:
        print(f"step {step + 1}: reward {rewards_B.mean():.3f}, e.g. {completions[0].text!r}")

if options.compare:
    from etude import GRPOTrainer

    trainer = GRPOTrainer(
        LanguageModel.tiny(seed=0), lambda task, text: reward(text), PROMPTS, prompts_per_step=PROMPTS_PER_STEP,
        group_size=GROUP_SIZE, max_new_tokens=MAX_NEW_TOKENS, lr=LR, training_steps=options.steps, seed=SEED,
        shuffle=False, log_every=1, run=False, show_progress=False,
    )  # fmt: skip
    last = trainer.train().metrics["train/reward"]
    ours, theirs = policy.state_dict(), trainer.policy.state_dict()
    same = all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()
    print(f"GRPOTrainer: reward {last:.3f}, {'the same' if same else 'other'} weights")
