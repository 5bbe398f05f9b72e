"""On-policy distillation: the student writes, the teacher grades every token.

Shape letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from etude.algorithms import losses
from etude.algorithms.advantages import discounted_returns
from etude.algorithms.aggregate import aggregate
from etude.algorithms.masked import precise
from etude.algorithms.policy_gradient import PolicyGradient
from etude.errors import ConfigError
from etude.types import Loss
from etude.types.batch import Batch


@dataclass(kw_only=True)
class Distillation(PolicyGradient):
    """Minimise KL(student, teacher) on the student's own text: A = coef (log p_teacher - log p_student) by token."""

    teacher: Any = None
    """A policy, or the path of a language model; None expects `teacher_log_probs` in the batch."""
    coef: float = 1.0
    """Weight of the teacher's grade."""
    discount: float = 0.0
    """How far a token is credited with the grades of those after it: 0 is itself alone."""
    kind: Literal["sampled", "full"] = "sampled"
    """Grade the sampled tokens, or compare whole distributions (needs `logits(batch)` of student and teacher)."""
    direction: Literal["reverse", "forward"] = "reverse"
    """With kind: full, KL(student, teacher) or KL(teacher, student)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "full" and self.teacher is None:
            raise ConfigError("distillation of whole distributions needs a teacher")
        if self.overlong_length is not None or self.drop_equal_groups:
            raise ConfigError("distillation knows no rewards: leave overlong_length and drop_equal_groups out")
        if self.kind == "full" and (self.kl_coef or self.entropy_coef or self.discount or self.tis_cap is not None):
            raise ConfigError(
                "kind: full compares distributions alone; leave out kl_coef, entropy_coef, discount and tis_cap"
            )

    def estimate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the teacher's grade of each token as its advantage."""
        batch.require("old_log_probs", "teacher_log_probs")
        mask_BT = batch["loss_mask"]
        grades_BT = losses.distillation_advantages(batch["old_log_probs"], batch["teacher_log_probs"], mask_BT)
        return {"advantages": self.coef * discounted_returns(grades_BT, mask_BT, gamma=self.discount)}

    def loss(self, policy: Any, batch: Any) -> Loss:
        """Return the loss of some rows."""
        if self.kind == "sampled":
            return super().loss(policy, batch)
        text = Batch.of(batch).require("input_ids", "loss_mask")
        teacher = self._teacher(text)
        logits_BTV, teacher_BTV = both_logits(policy, teacher, text, self.temperature)
        divergence_BT = losses.full_kl(logits_BTV, teacher_BTV, text["loss_mask"], direction=self.direction)
        metrics = {"teacher_kl": divergence_BT.detach()}
        return aggregate(
            self.coef * divergence_BT, text["loss_mask"], self.aggregation, length=self.length, metrics=metrics
        )

    def experience(self, policy: Any, batch: Any, *, rows: int | None = None) -> Batch:
        """Return a whole experience with the teacher's grades; whole distributions are compared in `loss`."""
        return Batch.of(batch) if self.kind == "full" else super().experience(policy, batch, rows=rows)

    def token_metrics(self, log_probs_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return what is worth watching, the divergence from the teacher first."""
        metrics = super().token_metrics(log_probs_BT, batch)
        if "teacher_log_probs" in batch.values:
            metrics["teacher_kl"] = losses.log_ratio(log_probs_BT, batch["teacher_log_probs"], batch["loss_mask"])
        return metrics

    def _ask_policy(self, policy: Any, batch: Batch, rows: int) -> None:
        super()._ask_policy(policy, batch, rows)
        if "teacher_log_probs" not in batch.values and "advantages" not in batch.values:
            teacher = self._teacher(batch)
            batch.values["teacher_log_probs"] = self._in_parts(batch, rows, lambda part: self._log_probs(teacher, part))

    def _teacher(self, batch: Batch) -> Any:
        if self.teacher is None:
            raise ConfigError("distillation needs a teacher, or teacher_log_probs in the batch")
        self.teacher = ready_teacher(self.teacher, batch["input_ids"].device)
        return self.teacher


def ready_teacher(teacher: Any, device: torch.device) -> Any:
    """Return a teacher where it is needed; the path of a language model is loaded, frozen."""
    if isinstance(teacher, str):
        from etude.registry import POLICY_REGISTRY

        loaded: Any = POLICY_REGISTRY.get("language")(path=teacher)
        teacher = loaded.requires_grad_(False).eval()
    move = getattr(teacher, "to", None)
    return move(device) if callable(move) else teacher


def both_logits(student: Any, teacher: Any, text: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the logits of student and teacher (B, T, V), divided by the temperature; no gradient of the teacher's."""
    for each, name in ((student, "student"), (teacher, "teacher")):
        if not callable(getattr(each, "logits", None)):
            raise ConfigError(f"distillation of whole distributions needs a {name} with logits(batch)")
    with torch.no_grad():
        teacher_BTV = precise(teacher.logits(text)) / temperature
    logits_BTV = precise(student.logits(text)) / temperature
    if logits_BTV.shape != teacher_BTV.shape:
        sizes = f"{logits_BTV.shape[-1]} and {teacher_BTV.shape[-1]}"
        raise ConfigError(f"student and teacher have vocabularies of {sizes} tokens; kind: sampled needs no more "
                          "than the tokens of the text in common")  # fmt: skip
    return logits_BTV, teacher_BTV
