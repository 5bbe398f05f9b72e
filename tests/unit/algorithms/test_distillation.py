"""On-policy distillation: the gradient depends on the teacher, and leads to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.algorithms import Distillation
from etude.errors import ConfigError
from etude.types import Batch, Trajectory
from tests.unit.algorithms.stand_in import VOCABULARY, Bigram, gradients, rollouts


def written_by(policy: Bigram, seed: int, rows: int = 64, length: int = 4) -> Batch:
    """Sample texts from the policy itself."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.ones(rows, 1, dtype=torch.long)
    for _ in range(length):
        weights = policy.table[tokens[:, -1]].detach().softmax(1)
        tokens = torch.cat((tokens, torch.multinomial(weights, 1, generator=generator)), 1)
    return Batch.from_trajectories([Trajectory(row, [0] + [1] * length) for row in tokens.tolist()])


def test_the_gradient_changes_with_the_teacher_and_is_what_the_formula_says() -> None:
    student, batch = Bigram(0), rollouts()
    del batch.values["old_log_probs"]
    found = []
    for teacher in (Bigram(1), Bigram(2)):
        algorithm = Distillation(teacher=teacher)
        experience = algorithm.experience(student, batch)
        _, _, grads = gradients(algorithm, student, experience)
        ids, mask = batch["input_ids"].numpy(), batch["loss_mask"].numpy()
        log_s, log_t = (p.table.detach().log_softmax(1).numpy() for p in (student, teacher))
        expected, kl = np.zeros((VOCABULARY, VOCABULARY)), 0.0
        for i, t in zip(*np.nonzero(mask), strict=True):
            before, token = ids[i, t - 1], ids[i, t]
            advantage = log_t[before, token] - log_s[before, token]
            expected[before] -= advantage * (np.eye(VOCABULARY)[token] - np.exp(log_s[before]))
            kl -= advantage
        np.testing.assert_allclose(grads[0].numpy(), expected, atol=1e-6)
        metrics = algorithm.loss(student, experience).metrics
        assert float(metrics["teacher_kl"]) == pytest.approx(kl / mask.sum(), abs=1e-6)
        found.append(grads[0])
    assert (found[0] - found[1]).abs().max() > 0.1


def test_a_teacher_equal_to_the_student_asks_for_nothing() -> None:
    student, batch = Bigram(3), rollouts()
    del batch.values["old_log_probs"]
    for algorithm in (Distillation(teacher=Bigram(3)), Distillation(teacher=Bigram(3), kind="full")):
        _, _, grads = gradients(algorithm, student, algorithm.prepare(student, batch))
        assert grads[0].abs().max() < 1e-12


def test_grades_of_later_tokens_may_be_credited() -> None:
    mask = torch.tensor([[0, 1, 1, 1]])
    batch = Batch({"loss_mask": mask, "input_ids": mask, "old_log_probs": torch.zeros(1, 4)})
    batch.values["teacher_log_probs"] = torch.tensor([[9.0, 1.0, 2.0, 3.0]])
    found = Distillation(discount=0.5, coef=2.0).advantages(batch).values["advantages"]
    assert found.tolist() == [[0.0, 5.5, 7.0, 6.0]]
    alone = Distillation().advantages(batch).values["advantages"]
    assert alone.tolist() == [[0.0, 1.0, 2.0, 3.0]]


@pytest.mark.parametrize("kind", ["sampled", "full"])
def test_the_student_approaches_the_teacher(kind: str) -> None:
    student, teacher = Bigram(0), Bigram(1)
    algorithm = Distillation(teacher=teacher, kind=kind)  # type: ignore[arg-type]

    def divergence() -> float:
        log_s, log_t = student.table.detach().log_softmax(1), teacher.table.detach().log_softmax(1)
        return float((log_s.exp() * (log_s - log_t)).sum(1).mean())

    first = divergence()
    for step in range(40):
        batch = algorithm.prepare(student, written_by(student, step))
        loss = algorithm.loss(student, batch)
        student.zero_grad()
        (loss.total / loss.weight).backward()
        with torch.no_grad():
            student.table -= 2.0 * student.table.grad  # type: ignore[operator]
    assert divergence() < 0.5 * first


def test_grades_may_come_with_the_batch_and_a_teacher_is_needed_otherwise() -> None:
    student, batch = Bigram(), rollouts()
    with pytest.raises(ConfigError, match="needs a teacher"):
        Distillation().prepare(student, batch)
    with pytest.raises(ConfigError, match="needs a teacher"):
        Distillation(kind="full")
    batch.values["teacher_log_probs"] = batch["old_log_probs"] + 1.0
    prepared = Distillation().prepare(student, batch)
    assert prepared.values["advantages"][batch["loss_mask"] == 1].unique().tolist() == [1.0]

    class Mute:
        def log_probs(self, batch: Batch) -> torch.Tensor:
            return batch["loss_mask"]

    with pytest.raises(ConfigError, match=r"student with logits\(batch\)"):
        Distillation(teacher=Bigram(), kind="full").loss(Mute(), batch)
