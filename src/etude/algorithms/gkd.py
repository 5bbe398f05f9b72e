"""GKD: learning from a teacher's whole distributions, on given texts and on the student's own.

Shape letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from etude.algorithms import losses
from etude.algorithms.aggregate import Aggregation, aggregate
from etude.algorithms.distillation import both_logits, ready_teacher
from etude.errors import ConfigError
from etude.types import Loss
from etude.types.batch import Batch
from etude.types.trajectory import Trajectory


@dataclass(kw_only=True)
class GKD:
    """Minimise the generalised Jensen-Shannon divergence between teacher and student.

    Of given texts (`prompt` and `completion`), a share is written anew by the student in training; rollouts are all
    the student's own.
    """

    teacher: Any
    """A policy with logits(batch), or the path of a language model."""
    beta: float = 0.5
    """From 0, KL(teacher, student), to 1, KL(student, teacher); between, how much of the mixture is the teacher's."""
    on_policy: float = 0.5
    """Share of the texts whose completion the student writes itself (the lambda of GKD)."""
    max_new_tokens: int = 128
    """Tokens that the student writes at most."""
    temperature: float = 1.0
    """Divides the logits of both, also where the student writes."""
    aggregation: Aggregation = "token_mean"
    """How tokens become one loss: token_mean, token_sum, sequence_mean or length_normalised."""
    length: int | None = None
    """Constant length for length_normalised, which needs one."""

    def __post_init__(self) -> None:
        if self.teacher is None:
            raise ConfigError("gkd needs a teacher")
        if not 0 <= self.beta <= 1 or not 0 <= self.on_policy <= 1:
            raise ConfigError("beta and on_policy must be in [0, 1]")
        if self.temperature <= 0 or self.max_new_tokens < 1:
            raise ConfigError("temperature must be positive and max_new_tokens at least 1")
        if self.aggregation == "length_normalised" and self.length is None:
            raise ConfigError("length_normalised divides by a constant that no cut of a batch changes: give a length")

    def experience(self, policy: Any, batch: Any, *, rows: int | None = None) -> Batch:
        """Return rollouts as they are: the student wrote them."""
        found = Batch.of(batch).copy()
        found.metadata["on_policy"] = True
        return found

    def prepare(self, policy: Any, batch: Any) -> Batch:
        """Return a batch in which the student wrote some completions itself; none in evaluation or of rollouts."""
        text = Batch.of(batch).require("input_ids", "loss_mask")
        if "on_policy" in text or not getattr(policy, "training", True):
            return text
        own = (torch.rand(len(text)) < self.on_policy).tolist()
        keys = torch.randint(1 << 62, (len(text),)).tolist()
        counted = (text["loss_mask"] != 0).tolist()
        chosen = [row for row in range(len(text)) if own[row] and any(counted[row])]
        return self._rewritten(policy, text, {row: keys[row] for row in chosen}, counted) if chosen else text

    def _rewritten(self, policy: Any, text: Batch, keys: dict[int, int], counted: list[list[bool]]) -> Batch:
        from etude.policies.language.sampling import Sampling

        if not callable(getattr(policy, "generate", None)):
            raise ConfigError("on_policy needs a policy that writes text (generate); set on_policy: 0 for given text")
        real = text["attention_mask"] if "attention_mask" in text.values else torch.ones_like(text["input_ids"])
        rows = [[token for token, there in zip(ids, kept, strict=True) if there]
                for ids, kept in zip(text["input_ids"].tolist(), real.tolist(), strict=True)]  # fmt: skip
        masks = [[int(count) for count, there in zip(mask, kept, strict=True) if there]
                 for mask, kept in zip(counted, real.tolist(), strict=True)]  # fmt: skip
        prompts = {row: rows[row][: masks[row].index(1)] for row in keys}
        sampling = Sampling(max_new_tokens=self.max_new_tokens, temperature=self.temperature)
        written = policy.generate(list(prompts.values()), sampling, n=1, keys=list(keys.values()))
        for (row, prompt), (completion,) in zip(prompts.items(), written, strict=True):
            rows[row] = [*prompt, *completion.tokens]
            masks[row] = [0] * len(prompt) + [1] * len(completion.tokens)
        trajectories = [Trajectory(row, mask) for row, mask in zip(rows, masks, strict=True)]
        found = Batch.from_trajectories(trajectories, pad_token_id=policy.pad_token_id).to(text["input_ids"].device)
        if "is_padding" in text.values:
            found.values["is_padding"] = text["is_padding"]
        return found

    def loss(self, policy: Any, batch: Any) -> Loss:
        """Return the divergence over the tokens that count."""
        text = Batch.of(batch).require("input_ids", "loss_mask")
        mask_BT = text["loss_mask"]
        self.teacher = ready_teacher(self.teacher, text["input_ids"].device)
        logits_BTV, teacher_BTV = both_logits(policy, self.teacher, text, self.temperature)
        loss_BT = losses.generalised_jsd(logits_BTV, teacher_BTV, mask_BT, beta=self.beta)
        return aggregate(loss_BT, mask_BT, self.aggregation, length=self.length)
