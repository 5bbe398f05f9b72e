"""An algorithm apart from its trainer: plain functions that a test can call."""

import torch

from etude.algorithms.advantages import gae, token_rewards
from etude.types import Batch


def compute_my_advantages(batch: Batch, discount_factor: float = 0.99, gae_lambda: float = 0.95) -> Batch:
    """Compute generalised advantages, with the mean reward of the batch as the value of every state.

    Args:
        batch: Batch with rewards.
        discount_factor: Discount factor gamma.
        gae_lambda: GAE lambda parameter.

    Returns:
        Batch with advantages added: of each row, the mean over its tokens.
    """
    rewards = batch.metadata["rewards"]
    mask = batch.values["loss_mask"]
    values = rewards.mean().expand_as(mask)
    by_token, _ = gae(token_rewards(rewards, mask), values, mask, gamma=discount_factor, lam=gae_lambda)
    counted = (mask != 0).sum(1).clamp(min=1)
    batch.metadata["advantages"] = (by_token.sum(1) / counted).tolist()
    return batch


def compute_custom_loss(log_probs: torch.Tensor, advantages: torch.Tensor, clip_range: float = 0.2) -> torch.Tensor:
    """Compute the clipped loss of PPO, for log-probabilities that were those of the sampler."""
    ratio = torch.exp(log_probs - log_probs.detach())
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()
