"""Losses by token, row or pair. Pure functions; `aggregate` makes one Loss of them.

Shape letters: B rows, T tokens, P pairs, V vocabulary. With r = exp(log p - log p_old) and A the advantage. What the
mask leaves out is replaced before it enters a formula, so that it can be anything and has no gradient. A ratio is
at most exp(20), and has no gradient there: no difference of log-probabilities overflows. Numbers of less than float32
are computed with, and come back, as float32.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from etude.algorithms.masked import masked_mean, precise

MAX_LOG_RATIO: Final = 20.0
"""Differences of log-probabilities are cut here before they become ratios: exp(20) is 5e8, exp(89) is no float32."""


def log_ratio(log_probs_BT: Tensor, old_log_probs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return log p - log p_old; 0 where the mask is 0."""
    counts_BT = mask_BT != 0
    old_BT = torch.where(counts_BT, precise(old_log_probs_BT.detach()), 0.0)
    return torch.where(counts_BT, precise(log_probs_BT), 0.0) - old_BT


def ratio(log_ratio_BT: Tensor) -> Tensor:
    """Return exp of a difference of log-probabilities, cut at `MAX_LOG_RATIO`, beyond which nothing moves."""
    return log_ratio_BT.clamp(max=MAX_LOG_RATIO).exp()


# ---- policy gradients ------------------------------------------------------------------------------------------------


def ppo_clip(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *,
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None,
) -> Tensor:  # fmt: skip
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) by token.

    With `dual_clip` = c > 1, where A < 0 the objective is at least c A: a ratio that has exploded moves nothing.
    """
    return _clipped(
        log_ratio(log_probs_BT, old_log_probs_BT, mask_BT),
        _masked(advantages_BT, mask_BT),
        clip_low,
        clip_high,
        dual_clip,
    )


def _clipped(log_ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    ratio_BT = ratio(log_ratio_BT)
    objective_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(1.0 - low, 1.0 + high) * advantages_BT)
    if dual is not None:
        floor_BT = torch.maximum(objective_BT, dual * advantages_BT)
        objective_BT = torch.where(advantages_BT < 0, floor_BT, objective_BT)
    return -objective_BT


def clipped_fraction(
    log_ratio_BT: Tensor, advantages_BT: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """Return 1 by token where the clip of PPO cuts the gradient, else 0."""
    ratio_BT = log_ratio_BT.detach().exp()
    above_BT = (ratio_BT > 1.0 + clip_high) & (advantages_BT > 0)
    below_BT = (ratio_BT < 1.0 - clip_low) & (advantages_BT < 0)
    return (above_BT | below_BT).to(log_ratio_BT.dtype)


def gspo(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *,
    clip_low: float = 3e-4, clip_high: float = 4e-4,
) -> Tensor:  # fmt: skip
    """Return -min(s A, clip(s) A) of each row on its tokens, with s the ratio of whole sequences per token.

    s_i = exp(mean over the tokens of log p - log p_old). Advantages may differ by token: the gradient of a token then
    takes its own. Aggregate with sequence_mean: the mean over a row's tokens is the row's loss.
    """
    log_ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, mask_BT)
    length_B1 = (mask_BT != 0).sum(1, keepdim=True).clamp(min=1)
    sequence_B1 = log_ratio_BT.sum(1, keepdim=True) / length_B1
    # Each token carries the sequence's ratio and its own gradient; their mean over a row is the sequence's gradient.
    ratio_BT = sequence_B1.detach() + log_ratio_BT - log_ratio_BT.detach()
    return _clipped(ratio_BT, _masked(advantages_BT, mask_BT), clip_low, clip_high, None)


def gmpo(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *,
    clip_low: float = 0.4, clip_high: float = 0.4,
) -> Tensor:  # fmt: skip
    """Return -A exp(mean of the clipped log r) of each row on its tokens: a geometric mean, which outliers move little.

    Each log r is clipped to [-clip_low, clip_high] on the side where it would be rewarded for going further. A is the
    mean over a row. Aggregate with sequence_mean: every token of a row carries the row's loss.
    """
    row_B1 = masked_mean(_masked(advantages_BT, mask_BT), mask_BT, 1)[:, None]
    log_ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, mask_BT)
    near_BT = log_ratio_BT.clamp(-clip_low, clip_high)
    pessimist_BT = torch.where(row_B1 > 0, torch.minimum(log_ratio_BT, near_BT), torch.maximum(log_ratio_BT, near_BT))
    mean_B1 = masked_mean(pessimist_BT, mask_BT, 1)[:, None]
    return _masked((-row_B1 * ratio(mean_B1)).expand_as(log_ratio_BT), mask_BT)


def sapo(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *,
    tau_pos: float = 1.0, tau_neg: float = 1.05,
) -> Tensor:  # fmt: skip
    """Return -A (4 / tau) sigmoid(tau (r - 1)) by token, tau by the sign of A: a gate that closes softly."""
    advantages_BT = _masked(advantages_BT, mask_BT)
    ratio_BT = ratio(log_ratio(log_probs_BT, old_log_probs_BT, mask_BT))
    tau_BT = torch.full_like(advantages_BT, tau_neg).masked_fill(advantages_BT > 0, tau_pos)
    return _masked(-advantages_BT * (4.0 / tau_BT) * torch.sigmoid(tau_BT * (ratio_BT - 1.0)), mask_BT)


def truncated_weights(old_log_probs_BT: Tensor, rollout_log_probs_BT: Tensor, mask_BT: Tensor, *, cap: float) -> Tensor:
    """Return min(p_old / p_rollout, cap) by token, without gradient: what corrects for a sampler that is not p_old."""
    return ratio(log_ratio(old_log_probs_BT, rollout_log_probs_BT, mask_BT).detach()).clamp(max=cap)


def cispo(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *,
    ratio_low: float = 0.0, ratio_high: float = 4.0,
) -> Tensor:  # fmt: skip
    """Return -stop(clip(r, ratio_low, ratio_high)) A log p by token: no token loses its gradient."""
    log_probs_BT = _masked(log_probs_BT, mask_BT)
    ratio_BT = ratio(log_ratio(log_probs_BT, old_log_probs_BT, mask_BT).detach())
    log_probs_BT = log_probs_BT.clamp(min=torch.finfo(log_probs_BT.dtype).min)  # weight 0 times -inf is 0
    return -ratio_BT.clamp(ratio_low, ratio_high) * _masked(advantages_BT, mask_BT) * log_probs_BT


def importance_sampling(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """Return -r A by token; its gradient at r = 1 is that of REINFORCE."""
    ratio_BT = ratio(log_ratio(log_probs_BT, old_log_probs_BT, mask_BT))
    return _masked(-ratio_BT * _masked(advantages_BT, mask_BT), mask_BT)


def dro(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, beta: float = 0.05
) -> Tensor:
    """Return -(log p A - beta / 2 (log p - log p_old)^2) by token: a square holds the policy near the old one."""
    log_probs_BT = _masked(log_probs_BT, mask_BT)
    delta_BT = log_ratio(log_probs_BT, old_log_probs_BT, mask_BT)
    return -(log_probs_BT * _masked(advantages_BT, mask_BT) - 0.5 * beta * delta_BT**2)


# ---- from given text -------------------------------------------------------------------------------------------------


def cross_entropy(log_probs_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Return -w log p by token; weights may have any sign, and tokens of weight 0 have no part."""
    return -precise(weights_BT) * _masked(log_probs_BT, weights_BT)


def preference_logits(chosen_P: Tensor, rejected_P: Tensor, ref_chosen_P: Tensor, ref_rejected_P: Tensor) -> Tensor:
    """Return h = (log p - log p_ref of the chosen) - (the same of the rejected), by pair."""
    return (chosen_P - rejected_P) - (ref_chosen_P - ref_rejected_P)


def dpo(logits_P: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Return -log sigmoid(beta h) by pair; with smoothing e, (1 - e) of it and e of the same for -h."""
    logits_P = precise(logits_P)
    kept = -functional.logsigmoid(beta * logits_P)
    return (
        kept
        if not label_smoothing
        else (1 - label_smoothing) * kept - label_smoothing * functional.logsigmoid(-beta * logits_P)
    )


def ipo(logits_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return (h - 1 / (2 beta))^2 by pair: the margin is to be just so large, and no larger."""
    return (precise(logits_P) - 1.0 / (2.0 * beta)) ** 2


def robust_dpo(logits_P: Tensor, *, beta: float = 0.1, noise: float = 0.0) -> Tensor:
    """Return ((1 - e) l(h) - e l(-h)) / (1 - 2 e), l = -log sigmoid(beta h): unbiased where a share e is flipped."""
    logits_P = precise(logits_P)
    kept, flipped = functional.logsigmoid(beta * logits_P), functional.logsigmoid(-beta * logits_P)
    return (noise * flipped - (1 - noise) * kept) / (1 - 2 * noise)


def hinge(logits_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return max(0, 1 - beta h) by pair (SLiC)."""
    return (1.0 - beta * precise(logits_P)).clamp(min=0.0)


def apo_zero(chosen_gain_P: Tensor, rejected_gain_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return 1 - sigmoid(beta c) + sigmoid(beta r): the chosen is made likelier, the rejected less likely."""
    chosen_P, rejected_P = beta * precise(chosen_gain_P), beta * precise(rejected_gain_P)
    return torch.sigmoid(-chosen_P) + torch.sigmoid(rejected_P)


def apo_down(chosen_gain_P: Tensor, rejected_gain_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return sigmoid(beta c) + 1 - sigmoid(beta (c - r)): both are made less likely, the rejected more so."""
    chosen_P, rejected_P = beta * precise(chosen_gain_P), beta * precise(rejected_gain_P)
    return torch.sigmoid(chosen_P) + torch.sigmoid(rejected_P - chosen_P)


def simpo(chosen_mean_P: Tensor, rejected_mean_P: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """Return -log sigmoid(beta (c - r) - gamma) by pair, from mean log-probabilities: a margin, and no reference."""
    return -functional.logsigmoid(beta * (precise(chosen_mean_P) - precise(rejected_mean_P)) - gamma)


def log_odds_ratio(chosen_mean_P: Tensor, rejected_mean_P: Tensor) -> Tensor:
    """Return log(odds(c) / odds(r)) by pair, odds(x) = p / (1 - p) with p = exp(x) of mean log-probabilities."""
    return _log_odds(precise(chosen_mean_P)) - _log_odds(precise(rejected_mean_P))


def _log_odds(mean_P: Tensor) -> Tensor:
    mean_P = mean_P.clamp(max=-1e-6)  # at p = 1 the odds have no end
    return mean_P - torch.log(-torch.expm1(mean_P))


def orpo(chosen_mean_P: Tensor, rejected_mean_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return -c - beta log sigmoid(log odds ratio) by pair: imitate the chosen, and tell it from the rejected."""
    return -precise(chosen_mean_P) - beta * functional.logsigmoid(log_odds_ratio(chosen_mean_P, rejected_mean_P))


def kto(gain_B: Tensor, desirable_B: Tensor, baseline_B: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return 1 - sigmoid(beta (g - z)) of a desirable text and 1 - sigmoid(beta (z - g)) of an undesirable one."""
    away_B = precise(gain_B) - baseline_B.detach()
    return torch.sigmoid(torch.where(desirable_B != 0, -beta * away_B, beta * away_B))


def bradley_terry(
    chosen_score_P: Tensor, rejected_score_P: Tensor, *, margin_P: Tensor | None = None, center: float = 0.0
) -> Tensor:
    """Return -log sigmoid(c - r - margin) + center (c + r)^2 by pair: the second term holds scores about 0."""
    chosen_P, rejected_P = precise(chosen_score_P), precise(rejected_score_P)
    apart_P = chosen_P - rejected_P if margin_P is None else chosen_P - rejected_P - margin_P
    return center * (chosen_P + rejected_P) ** 2 - functional.logsigmoid(apart_P)


# ---- from a teacher --------------------------------------------------------------------------------------------------


def distillation_advantages(log_probs_BT: Tensor, teacher_log_probs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return A = log p_teacher - log p by token, without gradient.

    Sampled tokens rewarded so minimise KL(p, p_teacher). The difference itself is no loss: its gradient is that of
    log p alone, whoever the teacher.
    """
    return -log_ratio(log_probs_BT, teacher_log_probs_BT, mask_BT).detach()


def full_kl(
    logits_BTV: Tensor,
    teacher_logits_BTV: Tensor,
    mask_BT: Tensor,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
) -> Tensor:
    """Return KL over the whole vocabulary by token: reverse is KL(p, p_teacher), forward KL(p_teacher, p)."""
    counts_BT1 = (mask_BT != 0)[..., None]
    log_p_BTV = torch.where(counts_BT1, precise(logits_BTV), 0.0).log_softmax(-1)
    log_t_BTV = torch.where(counts_BT1, precise(teacher_logits_BTV.detach()), 0.0).log_softmax(-1)
    first, second = (log_p_BTV, log_t_BTV) if direction == "reverse" else (log_t_BTV, log_p_BTV)
    # A token that the first never chooses adds nothing, even if the second says minus infinity too.
    gap_BTV = torch.where(first == -torch.inf, 0.0, first - second)
    return _masked((first.exp() * gap_BTV).sum(-1), mask_BT)


def generalised_jsd(logits_BTV: Tensor, teacher_logits_BTV: Tensor, mask_BT: Tensor, *, beta: float = 0.5) -> Tensor:
    """Return beta KL(t, m) + (1 - beta) KL(p, m) by token, with m = beta t + (1 - beta) p, t the teacher's.

    Where beta is 0 or 1 that is 0; as usual, 0 stands for KL(t, p) and 1 for KL(p, t), to which it tends when divided
    by beta, or by 1 - beta.
    """
    if beta in (0, 1):
        direction: Literal["reverse", "forward"] = "forward" if beta == 0 else "reverse"
        return full_kl(logits_BTV, teacher_logits_BTV, mask_BT, direction=direction)
    counts_BT1 = (mask_BT != 0)[..., None]
    log_p_BTV = torch.where(counts_BT1, precise(logits_BTV), 0.0).log_softmax(-1)
    log_t_BTV = torch.where(counts_BT1, precise(teacher_logits_BTV.detach()), 0.0).log_softmax(-1)
    nobody_BTV = (log_p_BTV == -torch.inf) & (log_t_BTV == -torch.inf)  # the logarithm of their mean has no gradient
    shares = [torch.where(nobody_BTV, 0.0, log) for log in (log_p_BTV + math.log1p(-beta), log_t_BTV + math.log(beta))]
    log_m_BTV = torch.logaddexp(*shares)
    found = []
    for log_BTV in (log_t_BTV, log_p_BTV):
        gap_BTV = torch.where(log_BTV == -torch.inf, 0.0, log_BTV - log_m_BTV)
        found.append((log_BTV.exp() * gap_BTV).sum(-1))
    return _masked(beta * found[0] + (1 - beta) * found[1], mask_BT)


# ---- values ----------------------------------------------------------------------------------------------------------


def value_loss(
    values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    old_values_BT: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:
    """Return (V - G)^2 / 2 by token; with `clip`, the greater of that and the same of V kept within clip of V_old."""
    values_BT, returns_BT = _masked(values_BT, mask_BT), _masked(returns_BT, mask_BT)
    error_BT = (values_BT - returns_BT) ** 2
    if clip is None or old_values_BT is None:
        return 0.5 * error_BT
    old_BT = _masked(old_values_BT.detach(), mask_BT)
    near_BT = old_BT + (values_BT - old_BT).clamp(-clip, clip)
    return 0.5 * torch.maximum(error_BT, (near_BT - returns_BT) ** 2)


def _masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT != 0, precise(values_BT), 0.0)
