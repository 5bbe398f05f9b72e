"""Losses and their gradients against formulas written out in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.algorithms import losses

GENERATOR = np.random.default_rng(0)
MASK = np.array([[0, 1, 1, 1, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
NEW = -2 * GENERATOR.random((3, 5))
OLD = NEW + GENERATOR.normal(0, 0.6, (3, 5))
ADVANTAGES = GENERATOR.normal(0, 1, (3, 5))
LENGTHS = np.maximum(MASK.sum(1, keepdims=True), 1)
RATIO = np.exp(NEW - OLD)
SEQUENCE = np.exp(((NEW - OLD) * MASK).sum(1, keepdims=True) / LENGTHS)


def dirty(values: np.ndarray) -> Tensor:
    """Put NaN where the mask is 0: a loss that looks there gives itself away."""
    return torch.as_tensor(np.where(MASK == 1, values, np.nan))


def value_and_gradient(loss: Callable[[Tensor], Tensor]) -> tuple[np.ndarray, np.ndarray]:
    log_probs = dirty(NEW).requires_grad_()
    found = loss(log_probs)
    found.sum().backward()
    assert log_probs.grad is not None
    return found.detach().numpy(), log_probs.grad.numpy()


def policy_loss(function: Callable[..., Tensor], **options: float) -> Callable[[Tensor], Tensor]:
    return lambda log_probs: function(log_probs, dirty(OLD), dirty(ADVANTAGES), torch.as_tensor(MASK), **options)


def clip_by_hand(low: float, high: float, dual: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    value, slope = np.zeros((3, 5)), np.zeros((3, 5))
    for at in zip(*np.nonzero(MASK), strict=True):
        ratio, advantage = RATIO[at], ADVANTAGES[at]
        bounded = min(max(ratio, 1 - low), 1 + high)
        objective, moves = min(ratio * advantage, bounded * advantage), ratio * advantage <= bounded * advantage
        if dual is not None and advantage < 0 and objective < dual * advantage:
            objective, moves = dual * advantage, False
        value[at], slope[at] = -objective, -ratio * advantage if moves else 0.0
    return value, slope


def importance_by_hand() -> tuple[np.ndarray, np.ndarray]:
    found = -RATIO * ADVANTAGES * MASK
    return found, found


def cispo_by_hand(low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    slope = -np.clip(RATIO, low, high) * ADVANTAGES * MASK
    return slope * NEW, slope


def dro_by_hand(beta: float) -> tuple[np.ndarray, np.ndarray]:
    value = -(NEW * ADVANTAGES - 0.5 * beta * (NEW - OLD) ** 2) * MASK
    return value, -(ADVANTAGES - beta * (NEW - OLD)) * MASK


@pytest.mark.parametrize(
    "loss, expected",
    [
        (policy_loss(losses.ppo_clip), clip_by_hand(0.2, 0.2)),
        (policy_loss(losses.ppo_clip, clip_low=0.1, clip_high=0.4), clip_by_hand(0.1, 0.4)),
        (policy_loss(losses.ppo_clip, dual_clip=1.3), clip_by_hand(0.2, 0.2, 1.3)),
        (policy_loss(losses.importance_sampling), importance_by_hand()),
        (policy_loss(losses.cispo), cispo_by_hand(0.0, 4.0)),
        (policy_loss(losses.cispo, ratio_low=0.8, ratio_high=1.2), cispo_by_hand(0.8, 1.2)),
        (policy_loss(losses.dro, beta=0.3), dro_by_hand(0.3)),
    ],
    ids=["ppo", "asymmetric", "dual", "importance", "cispo", "cispo-clipped", "dro"],
)
def test_policy_losses_and_gradients(loss: Callable[[Tensor], Tensor], expected: tuple[np.ndarray, np.ndarray]) -> None:
    value, gradient = value_and_gradient(loss)
    np.testing.assert_allclose(value, expected[0], atol=1e-12)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-12)
    assert np.abs(gradient).sum() > 0


@pytest.mark.parametrize("low, high", [(0.5, 0.5), (0.01, 0.02)])
def test_gspo_clips_whole_sequences(low: float, high: float) -> None:
    loss = policy_loss(losses.gspo, clip_low=low, clip_high=high)
    advantages = np.array([[1.0], [-2.0], [3.0]])
    value, slope = np.zeros((3, 5)), np.zeros((3, 5))
    for row in range(2):
        ratio, advantage = SEQUENCE[row, 0], advantages[row, 0]
        bounded = min(max(ratio, 1 - low), 1 + high)
        moves = ratio * advantage <= bounded * advantage
        value[row] = -min(ratio * advantage, bounded * advantage) * MASK[row]
        # d s / d log p_t = s / length; the loss of the row is the mean over its tokens
        slope[row] = -advantage * ratio / LENGTHS[row] * MASK[row] * moves
    log_probs = dirty(NEW).requires_grad_()
    spread = torch.as_tensor(advantages).expand(3, 5)
    found = losses.gspo(log_probs, dirty(OLD), spread, torch.as_tensor(MASK), clip_low=low, clip_high=high)
    (found.sum(1) / torch.as_tensor(LENGTHS[:, 0])).sum().backward()
    np.testing.assert_allclose(found.detach().numpy(), value, atol=1e-12)
    assert log_probs.grad is not None
    np.testing.assert_allclose(log_probs.grad.numpy(), slope, atol=1e-12)
    assert value_and_gradient(loss)[0].shape == (3, 5)


def test_published_examples_of_service_losses() -> None:
    log_probs, advantages = torch.tensor([[0.0, 5.0, -5.0]], requires_grad=True), torch.tensor([[1.0, 2.0, 3.0]])
    masked = losses.cispo(
        log_probs, torch.zeros(1, 3), advantages, torch.tensor([[1, 1, 0]]), ratio_low=0.8, ratio_high=1.2
    )
    assert masked.tolist()[0] == pytest.approx([0.0, -12.0, 0.0])
    ppo = losses.ppo_clip(log_probs, torch.zeros(1, 3), advantages, torch.ones(1, 3))
    assert ppo.tolist()[0] == pytest.approx([-1.0, -2.4, -0.0202], abs=1e-4)


def test_the_share_of_clipped_tokens_is_where_the_gradient_is_cut() -> None:
    _, gradient = value_and_gradient(policy_loss(losses.ppo_clip))
    ratio = losses.log_ratio(torch.as_tensor(NEW), torch.as_tensor(OLD), torch.as_tensor(MASK))
    clipped = losses.clipped_fraction(ratio, torch.as_tensor(ADVANTAGES)).numpy()
    np.testing.assert_array_equal(clipped[MASK == 1], gradient[MASK == 1] == 0)


def test_cross_entropy_takes_weights_of_any_sign() -> None:
    weights = np.where(MASK == 1, ADVANTAGES, 0.0)
    value, gradient = value_and_gradient(lambda log_probs: losses.cross_entropy(log_probs, torch.as_tensor(weights)))
    np.testing.assert_allclose(value, -weights * NEW, atol=1e-12)
    np.testing.assert_allclose(gradient, -weights, atol=1e-12)


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_and_ipo(beta: float, smoothing: float) -> None:
    sides = np.random.default_rng(1).normal(0, 3, (4, 6))
    chosen, rejected, ref_chosen, ref_rejected = (torch.as_tensor(side) for side in sides)
    chosen.requires_grad_()
    h = (sides[0] - sides[2]) - (sides[1] - sides[3])
    logits = losses.preference_logits(chosen, rejected, ref_chosen, ref_rejected)
    np.testing.assert_allclose(logits.detach().numpy(), h, atol=1e-12)
    sigmoid = 1 / (1 + np.exp(-beta * h))
    kept, flipped = np.logaddexp(0, -beta * h), np.logaddexp(0, beta * h)  # -log sigmoid of h, and of -h
    found = losses.dpo(logits, beta=beta, label_smoothing=smoothing)
    np.testing.assert_allclose(found.detach().numpy(), (1 - smoothing) * kept + smoothing * flipped, atol=1e-9)
    found.sum().backward(retain_graph=True)
    assert chosen.grad is not None
    slope = -beta * ((1 - smoothing) * (1 - sigmoid) - smoothing * sigmoid)
    np.testing.assert_allclose(chosen.grad.numpy(), slope, atol=1e-9)
    chosen.grad = None
    square = losses.ipo(logits, beta=beta)
    np.testing.assert_allclose(square.detach().numpy(), (h - 1 / (2 * beta)) ** 2, atol=1e-9)
    square.sum().backward()
    np.testing.assert_allclose(chosen.grad.numpy(), 2 * (h - 1 / (2 * beta)), atol=1e-9)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_takes_the_worse_of_near_and_far(clip: float | None) -> None:
    values, old, returns = np.random.default_rng(2).normal(0, 1, (3, 3, 5))
    expected, slope = np.zeros((3, 5)), np.zeros((3, 5))
    for at in zip(*np.nonzero(MASK), strict=True):
        far = (values[at] - returns[at]) ** 2
        step = values[at] - old[at]
        near = far if clip is None else (old[at] + min(max(step, -clip), clip) - returns[at]) ** 2
        expected[at] = 0.5 * max(far, near)
        slope[at] = values[at] - returns[at] if far >= near else 0.0
    predicted = dirty(values).requires_grad_()
    mask = torch.as_tensor(MASK)
    found = losses.value_loss(predicted, dirty(returns), mask, old_values_BT=dirty(old), clip=clip)
    found.sum().backward()
    assert predicted.grad is not None
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(predicted.grad.numpy(), slope, atol=1e-12)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_full_kl_over_the_vocabulary(direction: str) -> None:
    student, teacher = np.random.default_rng(3).normal(0, 1, (2, 3, 5, 4))
    p = np.exp(student) / np.exp(student).sum(-1, keepdims=True)
    q = np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True)
    if direction == "reverse":
        value = (p * np.log(p / q)).sum(-1)
        slope = p * (np.log(p / q) - value[..., None])
    else:
        value = (q * np.log(q / p)).sum(-1)
        slope = p - q
    logits = torch.as_tensor(np.where(MASK[..., None] == 1, student, np.nan)).requires_grad_()
    found = losses.full_kl(logits, torch.as_tensor(teacher), torch.as_tensor(MASK), direction=direction)  # type: ignore[arg-type]
    found.sum().backward()
    assert logits.grad is not None
    np.testing.assert_allclose(found.detach().numpy(), value * MASK, atol=1e-12)
    np.testing.assert_allclose(logits.grad.numpy(), slope * MASK[..., None], atol=1e-12)


def test_tokens_that_neither_can_choose_add_nothing_to_the_kl() -> None:
    logits = torch.tensor([[[0.0, 1.0, -math.inf]]], requires_grad=True)
    teacher = torch.tensor([[[1.0, 0.0, -math.inf]]])
    found = losses.full_kl(logits, teacher, torch.ones(1, 1))
    found.sum().backward()
    assert found.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
