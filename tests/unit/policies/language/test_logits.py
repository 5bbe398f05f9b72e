"""Whole distributions: the logits of the counted tokens, and distillation that compares them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude import Trainer, TrainingConfiguration
from etude.algorithms import Distillation
from etude.errors import ConfigError
from etude.policies.language import LanguageModel
from etude.rollouts.text import TextRollouts

from .samples import SMALL, make_batch

PAIRS = [([5, 6, 7, 8], [9, 10, 0]), ([5, 6, 7, 8], [11, 12]), ([20, 21], [22, 23])]


def by_hand(policy: LanguageModel, pairs: Any = PAIRS) -> dict[tuple[int, int], np.ndarray]:
    """Return the logits of each completion's tokens from the plain model, row by row."""
    found = {}
    for row, (prompt, completion) in enumerate(pairs):
        with torch.no_grad():
            out = policy.model(torch.tensor([prompt + completion])).logits[0].double().numpy()
        for place in range(len(prompt), len(prompt) + len(completion)):
            found[row, place] = out[place - 1]
    return found


def test_logits_are_those_of_the_plain_model_at_the_tokens_they_predict() -> None:
    policy = LanguageModel.tiny(**SMALL, seed=3)
    batch = make_batch(PAIRS)
    found, expected = policy.logits(batch), by_hand(policy)
    assert found.shape == (*batch["input_ids"].shape, len(next(iter(expected.values()))))
    for place, logits in expected.items():
        np.testing.assert_allclose(found[place].detach().numpy(), logits, atol=1e-5)
    assert found.detach()[batch["loss_mask"] == 0].abs().sum() == 0
    picked = found.log_softmax(-1).gather(-1, batch["input_ids"][..., None]).squeeze(-1)
    kept = torch.where(batch["loss_mask"] != 0, picked, 0.0).detach()
    np.testing.assert_allclose(kept.numpy(), policy.log_probs(batch).detach().numpy(), atol=1e-5)
    nothing = policy.logits(make_batch([([5, 6], [])]))
    nothing.sum().backward()
    assert nothing.abs().sum() == 0 and all(p.grad is not None for p in policy.parameters())


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_full_distillation_is_the_divergence_and_its_gradient_depends_on_the_teacher(direction: Any) -> None:
    student, batch = LanguageModel.tiny(**SMALL, seed=0), make_batch(PAIRS)
    gradients = []
    for seed in (1, 2):
        teacher = LanguageModel.tiny(**SMALL, seed=seed)
        loss = Distillation(teacher=teacher, kind="full", direction=direction, temperature=2.0).loss(student, batch)
        ours, theirs = by_hand(student), by_hand(teacher)
        expected = 0.0
        for place in ours:
            p, q = (np.exp(x / 2) / np.exp(x / 2).sum() for x in (ours[place], theirs[place]))
            p, q = (p, q) if direction == "reverse" else (q, p)
            expected += float((p * np.log(p / q)).sum())
        assert float(loss.total.detach()) == pytest.approx(expected, rel=1e-4) and float(loss.weight) == len(ours)
        student.zero_grad()
        loss.total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]))
        assert all(p.grad is None for p in teacher.parameters())
    assert (gradients[0] - gradients[1]).abs().max() > 0.01


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher_on_its_own_text() -> None:
    found = []

    class Kept(Distillation):
        def loss(self, policy: Any, batch: Any) -> Any:
            loss = super().loss(policy, batch)
            found.append(float(loss.metrics["teacher_kl"]))
            return loss

    teacher = LanguageModel.tiny(seed=5)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter *= 1.5  # a teacher that is sure of something
    data = TextRollouts("digits", prompts_per_step=4, group_size=4, max_new_tokens=8)
    config = TrainingConfiguration(lr=3e-3, batch_size=16, training_steps=20)
    algorithm = Kept(teacher=teacher.requires_grad_(False).eval(), kind="full")
    Trainer(LanguageModel.tiny(seed=0), data, algorithm, config=config, run=False, show_progress=False).fit()
    assert found[-1] < 0.5 * found[0]


def test_what_full_distillation_cannot_use_is_refused() -> None:
    teacher = LanguageModel.tiny("ab", **SMALL)
    with pytest.raises(ConfigError, match="vocabularies of"):
        Distillation(teacher=teacher, kind="full").loss(LanguageModel.tiny(**SMALL), make_batch([([1, 2], [3])]))
    with pytest.raises(ConfigError, match="leave out kl_coef"):
        Distillation(teacher=teacher, kind="full", kl_coef=0.1)
