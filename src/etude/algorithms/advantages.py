"""Advantages and returns: how much better a completion, or a token, was than expected. Pure functions.

Shape letters: B rows (one completion each), T tokens or steps. Masks are 1 on what counts. Statistics are computed in
float64 from differences to the least reward of a group, so that equal rewards give exactly 0, and returned in the type
that came in, or float32 if that is less. A group of one has no baseline: its advantage is 0, or the reward itself with
`single="raw"`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from etude.algorithms.masked import masked_whiten, precise
from etude.algorithms.moments import Gather, alone

Ids = Sequence[Hashable] | Tensor
Std = Literal["unbiased", "population", "none"]
Single = Literal["zero", "raw"]


# ---- one number per completion ---------------------------------------------------------------------------------------


def grpo(
    rewards_B: Tensor,
    group_ids: Ids,
    *,
    run_ids: Ids | None = None,
    std: Std = "unbiased",
    eps: float = 1e-6,
    single: Single = "zero",
) -> Tensor:
    """Return A_i = (r_i - mean(r of the group)) / (std(r of the group) + eps).

    With `run_ids` the statistics have two stages: the mean of each run of a group, then mean and deviation over the
    runs, so that a run of many turns weighs no more than a run of one.

    Args:
        rewards_B: One reward per completion.
        group_ids: What was completed: rows of one prompt share it.
        run_ids: Which attempt at it: the turns of one run share it.
        std: Divide by n - 1 (unbiased), by n (population), or do not scale (none).
        eps: Added to the deviation.
        single: What a group of one gets: zero, or the raw reward (a baseline of 0 and a deviation of 1).
    """
    group_B, groups = _indices(group_ids, rewards_B)
    delta_B, low_G = _from_least(rewards_B, group_B, groups)
    if run_ids is None:
        mean_G, std_G, count_G = _moments(delta_B, group_B, groups, std)
    else:
        pairs = list(zip(group_B.tolist(), _listed(run_ids), strict=True))
        run_B, runs = _indices(pairs, rewards_B)
        run_mean_R, _, _ = _moments(delta_B, run_B, runs, "none")
        group_R = torch.zeros(runs, dtype=torch.long, device=group_B.device).scatter_(0, run_B, group_B)
        mean_G, std_G, count_G = _moments(run_mean_R, group_R, groups, std)
    scale_G = torch.ones_like(std_G) if std == "none" else std_G + eps
    centred_B = delta_B - mean_G[group_B]
    advantages_B = torch.where(centred_B == 0, 0.0, centred_B / scale_G[group_B])  # with eps 0, 0 / 0 would be NaN
    raw_B = (delta_B + low_G[group_B]) / (1.0 if std == "none" else 1.0 + eps)
    if run_ids is not None and single == "raw":  # one run of several turns keeps its mean and has a deviation of 1
        rows_B = torch.bincount(group_B, minlength=groups)[group_B]
        raw_B = torch.where(rows_B == 1, raw_B, (delta_B - mean_G[group_B]) / (1.0 if std == "none" else 1.0 + eps))
    return _alone(advantages_B, raw_B, count_G[group_B], single).to(_kind(rewards_B))


def dr_grpo(rewards_B: Tensor, group_ids: Ids, *, single: Single = "zero") -> Tensor:
    """Return A_i = r_i - mean(r of the group): GRPO without the division by the deviation."""
    return grpo(rewards_B, group_ids, std="none", single=single)


def rloo(rewards_B: Tensor, group_ids: Ids, *, single: Single = "zero") -> Tensor:
    """Return A_i = r_i - mean(r of the others of the group), which is n / (n - 1) times r_i - mean."""
    group_B, groups = _indices(group_ids, rewards_B)
    delta_B, low_G = _from_least(rewards_B, group_B, groups)
    mean_G, _, count_G = _moments(delta_B, group_B, groups, "none")
    count_B = count_G[group_B]
    advantages_B = (delta_B - mean_G[group_B]) * count_B / (count_B - 1).clamp(min=1)
    return _alone(advantages_B, delta_B + low_G[group_B], count_B, single).to(_kind(rewards_B))


def opo(rewards_B: Tensor, lengths_B: Tensor, group_ids: Ids, *, single: Single = "zero") -> Tensor:
    """Return A_i = r_i - sum(l_j r_j) / sum(l_j) over the group: the baseline of least variance, weighed by length."""
    group_B, groups = _indices(group_ids, rewards_B)
    delta_B, low_G = _from_least(rewards_B, group_B, groups)
    lengths_B = lengths_B.to(delta_B)
    zero_G = delta_B.new_zeros(groups)
    total_G = zero_G.index_add(0, group_B, lengths_B)
    baseline_G = zero_G.index_add(0, group_B, lengths_B * delta_B) / torch.where(total_G > 0, total_G, 1.0)
    count_G = torch.bincount(group_B, minlength=groups)
    advantages_B = delta_B - baseline_G[group_B]
    return _alone(advantages_B, delta_B + low_G[group_B], count_G[group_B], single).to(_kind(rewards_B))


def remax(rewards_B: Tensor, greedy_rewards_B: Tensor) -> Tensor:
    """Return A_i = r_i - r(the greedy completion of the same prompt)."""
    return precise(rewards_B) - precise(greedy_rewards_B)


def overlong_penalty(lengths_B: Tensor, *, longest: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Return what is added to rewards for length: 0 up to longest - buffer, falling to -penalty at longest (DAPO)."""
    over_B = lengths_B.double() - (longest - buffer)
    share_B = (over_B > 0).double() if buffer == 0 else (over_B / buffer).clamp(0.0, 1.0)
    return -penalty * share_B


def informative(rewards_B: Tensor, group_ids: Ids) -> Tensor:
    """Return which rows belong to a group whose rewards are not all equal (B,): the others teach nothing (DAPO)."""
    group_B, groups = _indices(group_ids, rewards_B)
    delta_B, _ = _from_least(rewards_B, group_B, groups)
    return delta_B.new_zeros(groups).scatter_reduce(0, group_B, delta_B, "amax", include_self=True)[group_B] > 0


# ---- one number per token --------------------------------------------------------------------------------------------


def spread(advantages_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the advantage of each row on all its tokens that count, and 0 elsewhere."""
    return torch.where(mask_BT != 0, advantages_B[:, None], 0.0)


def token_rewards(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Return rewards by token: the reward of a row stands on its last token that counts (nowhere in an empty row)."""
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    if not mask_BT.shape[1]:
        return rewards_B.new_zeros(mask_BT.shape)
    last_B1 = torch.where(mask_BT != 0, position_T, -1).amax(1, keepdim=True)
    return torch.where(position_T == last_B1, rewards_B[:, None], 0.0)


def reinforce_plus_plus(
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    eps: float = 1e-8,
    gather: Gather = alone,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns): discounted returns, normalised over all tokens of the whole batch at once.

    A_it = (G_it - mean(G)) / sqrt(var(G) + eps), mean and population variance over every token that counts, on all
    ranks where `gather` is given.
    """
    returns_BT = discounted_returns(token_rewards_BT, mask_BT, gamma=gamma)
    return masked_whiten(returns_BT, mask_BT, eps=eps, gather=gather), returns_BT


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_B: Tensor | None = None,
    done_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and returns: A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t.

    `values_BT[:, t]` is the value of the state in which token t was chosen. Steps that do not count are stepped over:
    t + 1 is the next one that counts. After the last one stands `bootstrap_B` (0 if the episode ended there, the value
    of the last state if it was cut off). `done_BT` ends episodes within a row. Returns are A + V; both are 0 where
    nothing counts.
    """
    counts_BT = mask_BT != 0
    values_BT = torch.where(counts_BT, precise(values_BT), 0.0)
    rewards_BT = torch.where(counts_BT, precise(rewards_BT), 0.0)
    next_B = rewards_BT.new_zeros(rewards_BT.shape[0]) if bootstrap_B is None else bootstrap_B.to(rewards_BT)
    carried_B = torch.zeros_like(next_B)
    advantages_BT = torch.zeros_like(rewards_BT)
    for t in reversed(range(rewards_BT.shape[1])):
        after_B, later_B = next_B, carried_B
        if done_BT is not None:  # what comes after an end is not looked at, whatever it holds
            alive_B = done_BT[:, t] == 0
            after_B, later_B = torch.where(alive_B, next_B, 0.0), torch.where(alive_B, carried_B, 0.0)
        delta_B = rewards_BT[:, t] + gamma * after_B - values_BT[:, t]
        advantage_B = delta_B + gamma * lam * later_B
        counts_B = counts_BT[:, t]
        advantages_BT[:, t] = torch.where(counts_B, advantage_B, 0.0)
        carried_B = torch.where(counts_B, advantage_B, carried_B)
        next_B = torch.where(counts_B, values_BT[:, t], next_B)
    return advantages_BT, advantages_BT + values_BT


def discounted_returns(
    rewards_BT: Tensor, mask_BT: Tensor | None = None, *, gamma: float, bootstrap_B: Tensor | None = None
) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1} over the steps that count; after the last one stands `bootstrap_B` (0)."""
    columns = rewards_BT.shape[-1]
    return n_step_returns(rewards_BT, mask_BT, n=max(columns, 1), gamma=gamma, bootstrap_B=bootstrap_B)


def n_step_returns(
    rewards_BT: Tensor,
    mask_BT: Tensor | None = None,
    *,
    n: int,
    gamma: float,
    values_BT: Tensor | None = None,
    bootstrap_B: Tensor | None = None,
) -> Tensor:
    """Return G_t = sum over j < n of gamma^j r_{t+j}, plus gamma^n V_{t+n} where values are given.

    Only steps that count are counted. A sum that reaches the end of the row stops there and adds gamma^k times
    `bootstrap_B` (0), k steps on. A 1-D tensor of rewards is one row.
    """
    if rewards_BT.dim() == 1:
        mask_BT = None if mask_BT is None else mask_BT[None]
        values_BT = None if values_BT is None else values_BT[None]
        row_BT = rewards_BT[None]
        return n_step_returns(row_BT, mask_BT, n=n, gamma=gamma, values_BT=values_BT, bootstrap_B=bootstrap_B)[0]
    counts_BT = torch.ones_like(rewards_BT, dtype=torch.bool) if mask_BT is None else mask_BT != 0
    # The steps that count, moved to the front: then step t + j stands j columns on.
    order_BT = torch.argsort((~counts_BT).to(torch.uint8), dim=1, stable=True)
    rewards_BT = torch.where(counts_BT, precise(rewards_BT), 0.0).gather(1, order_BT)
    length_B = counts_BT.sum(1)
    returns_BT = _windows(rewards_BT, n, gamma)
    if values_BT is not None and n < rewards_BT.shape[1]:
        later_BT = torch.where(counts_BT, precise(values_BT), 0.0).gather(1, order_BT)[:, n:]
        returns_BT[:, : rewards_BT.shape[1] - n] += gamma**n * later_BT
    if bootstrap_B is not None:
        left_BT = length_B[:, None] - torch.arange(rewards_BT.shape[1], device=rewards_BT.device)
        at_end_BT = (left_BT >= 1) & (left_BT <= n)
        discount_BT = torch.pow(gamma, left_BT.clamp(min=0).to(rewards_BT.dtype))
        returns_BT = returns_BT + torch.where(at_end_BT, discount_BT * bootstrap_B[:, None].to(rewards_BT), 0.0)
    found_BT = torch.zeros_like(returns_BT).scatter(1, order_BT, returns_BT)
    return torch.where(counts_BT, found_BT, 0.0)


def _windows(rewards_BT: Tensor, n: int, gamma: float) -> Tensor:
    """Return the discounted sum of the next n rewards at each step."""
    total_BT = torch.zeros_like(rewards_BT)
    columns = rewards_BT.shape[1]
    if n >= columns:  # to the end: one pass backwards
        carried_B = rewards_BT.new_zeros(rewards_BT.shape[0])
        for t in reversed(range(columns)):
            carried_B = rewards_BT[:, t] + gamma * carried_B
            total_BT[:, t] = carried_B
        return total_BT
    for j in range(n):
        total_BT[:, : columns - j] += gamma**j * rewards_BT[:, j:]
    return total_BT


# ---- groups ----------------------------------------------------------------------------------------------------------


def _listed(ids: Ids) -> list[Hashable]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def _indices(ids: Ids, like_B: Tensor) -> tuple[Tensor, int]:
    """Return the groups as 0, 1, 2, ... in the order they appear, and how many there are."""
    listed = _listed(ids)
    if len(listed) != like_B.shape[0]:
        raise ValueError(f"{len(listed)} group ids for {like_B.shape[0]} rewards")
    known: dict[Hashable, int] = {}
    found = [known.setdefault(item, len(known)) for item in listed]
    return torch.tensor(found, dtype=torch.long, device=like_B.device), len(known)


def _kind(rewards_B: Tensor) -> torch.dtype:
    """Return the type of advantages: that of the rewards, and float32 for whole numbers and for less."""
    return precise(rewards_B).dtype if rewards_B.is_floating_point() else torch.float32


def _from_least(rewards_B: Tensor, group_B: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    exact_B = rewards_B.detach().double()
    low_G = exact_B.new_zeros(groups).scatter_reduce(0, group_B, exact_B, "amin", include_self=False)
    return exact_B - low_G[group_B], low_G


def _moments(values_B: Tensor, group_B: Tensor, groups: int, std: Std) -> tuple[Tensor, Tensor, Tensor]:
    zero_G = values_B.new_zeros(groups)
    count_G = torch.bincount(group_B, minlength=groups)
    mean_G = zero_G.index_add(0, group_B, values_B) / count_G
    if std == "none":
        return mean_G, zero_G, count_G
    squares_G = zero_G.index_add(0, group_B, (values_B - mean_G[group_B]) ** 2)
    divisor_G = (count_G - 1).clamp(min=1) if std == "unbiased" else count_G
    return mean_G, (squares_G / divisor_G).sqrt(), count_G


def _alone(advantages_B: Tensor, raw_B: Tensor, count_B: Tensor, single: Single) -> Tensor:
    return torch.where(count_B > 1, advantages_B, raw_B if single == "raw" else 0.0)
