"""One model in training: gradients that add up, steps of Adam, and its whole state as tensors by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from etude.errors import CheckpointError, DataError, NonFiniteError
from etude.policies.language.targets import target_batches, target_log_probs
from etude.service.datums import AdamParams
from etude.service.named_losses import config_of, loss_by_token, require_inputs
from etude.service.server.codec import Work

WEIGHTS, FIRST, SECOND, STEPS = "weights.", "first_moment.", "second_moment.", "steps."


class BrokenStep(NonFiniteError):
    """A step that left weights which are no numbers: the model is of no use, and restored from what was before."""


@dataclass(frozen=True)
class Passed:
    """What a forward pass came to."""

    outputs: list[dict[str, Tensor]]
    metrics: dict[str, float]
    tokens: int


def require_work(work: Work, *, context: int, vocabulary: int) -> None:
    """Refuse work that the model cannot do."""
    config_of(work.loss_fn, work.config)
    for number, row in enumerate(work.rows):
        where = f"datum {number}"
        require_inputs(work.loss_fn, row.inputs, where)
        if len(row.tokens) > context:
            raise DataError(f"{where} has {len(row.tokens)} tokens, and the model sees {context} at most")
        targets = row.inputs["target_tokens"]
        least = min(*row.tokens, int(targets.min()))
        most = max(*row.tokens, int(targets.max()))
        if least < 0 or most >= vocabulary:
            wrong = least if least < 0 else most
            raise DataError(f"{where} has the token {wrong}; the model knows 0 to {vocabulary - 1}")
        _require_finite(row.inputs, where)


def _require_finite(inputs: Mapping[str, Tensor], where: str) -> None:
    """Refuse numbers that are not finite where they count."""
    mask = inputs.get("mask")
    for name, value in inputs.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            bad = ~value.isfinite() if mask is None or name == "mask" else ~value.isfinite() & (mask != 0)
            if bool(bad.any()):
                raise DataError(f"{where}: {name} holds {float(value[bad][0])}, which is not finite")


class TrainedModel:
    """A policy with its optimizer."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.names = [name for name, one in policy.named_parameters() if one.requires_grad]
        self._weights = [one for one in policy.parameters() if one.requires_grad]
        self.optimizer = AdamW(self._weights, lr=0.0)
        self.lost: str | None = None
        """Why gradients were lost: the next step is then refused, for it would be one of a part of them."""

    @property
    def is_clean(self) -> bool:
        """Whether no gradients are waiting for a step."""
        return self.lost is None and all(one.grad is None for one in self._weights)

    def run(self, work: Work) -> Passed:
        """Make a forward pass, and unless told otherwise add its gradients to those that are there."""
        config = config_of(work.loss_fn, work.config)
        outputs: list[dict[str, Tensor]] = [{} for _ in work.rows]
        total = 0.0
        with torch.set_grad_enabled(not work.forward_only):
            for batch in target_batches([len(row.tokens) for row in work.rows]):
                rows = [work.rows[number] for number in batch]
                found = target_log_probs(
                    self.policy, [row.tokens for row in rows], [row.inputs["target_tokens"] for row in rows]
                )
                losses = [
                    loss_by_token(work.loss_fn, config, log_probs, row.inputs)
                    for log_probs, row in zip(found, rows, strict=True)
                ]
                if not work.forward_only:
                    torch.cat([loss.reshape(-1) for loss in losses]).sum().backward()  # type: ignore[no-untyped-call]
                for number, log_probs, loss in zip(batch, found, losses, strict=True):
                    outputs[number] = {"logprobs": log_probs.detach(), "elementwise_loss": loss.detach()}
        total = sum(float(one["elementwise_loss"].double().sum()) for one in outputs)
        if not math.isfinite(total):
            raise NonFiniteError(f"the {work.loss_fn} loss is not finite: {total}; look at the numbers that were sent")
        return Passed(outputs, {"loss:sum": total}, sum(len(row.tokens) for row in work.rows))

    def lose_gradients(self, why: str) -> None:
        """Forget gradients of which a part could not be computed."""
        self.optimizer.zero_grad(set_to_none=True)
        self.lost = why

    def step(self, params: AdamParams) -> dict[str, float]:
        """Make one step of Adam of the gradients that have been added up, and clear them."""
        why, self.lost = self.lost, None
        if why is not None:
            self.optimizer.zero_grad(set_to_none=True)
            raise DataError(f"no step was made: {why}")
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
            group["eps"], group["weight_decay"] = params.eps, params.weight_decay
        present = [one for one in self._weights if one.grad is not None]
        norm = float(nn.utils.clip_grad_norm_(present, params.grad_clip_norm or float("inf")))
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError("the gradients are not finite; no step was made, and they were cleared")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if present and not all(map(math.isfinite, torch._foreach_norm([one.detach() for one in present], math.inf))):
            raise BrokenStep(
                "this step would make weights that are not finite, and was taken back; look at its parameters"
            )
        return {"grad_norm:mean": norm}

    def clear(self) -> None:
        """Forget gradients, as a step that is refused does."""
        self.lost = None
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """Return what is trained, by name."""
        return {WEIGHTS + name: one.detach() for name, one in zip(self.names, self._weights, strict=True)}

    def state(self) -> dict[str, Tensor]:
        """Return what is trained and what the optimizer remembers, by name."""
        found = self.weights()
        for name, weight in zip(self.names, self._weights, strict=True):
            held = self.optimizer.state.get(weight)
            if held:
                found[FIRST + name], found[SECOND + name] = held["exp_avg"], held["exp_avg_sq"]
                found[STEPS + name] = held["step"]
        return found

    def load(self, tensors: Mapping[str, Tensor], *, with_optimizer: bool) -> None:
        """Take up a state; gradients are forgotten, and without its part the optimizer begins anew."""
        load_weights(self.policy, tensors)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.lost = None
        if not with_optimizer:
            return
        for name, weight in zip(self.names, self._weights, strict=True):
            if FIRST + name in tensors:
                self.optimizer.state[weight] = {
                    "step": tensors[STEPS + name].clone(),
                    "exp_avg": tensors[FIRST + name].clone(),
                    "exp_avg_sq": tensors[SECOND + name].clone(),
                }


def load_weights(policy: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give a policy saved weights; refuse those of another shape or of other layers."""
    own = {name: one for name, one in policy.named_parameters() if one.requires_grad}
    given = {name[len(WEIGHTS) :]: one for name, one in tensors.items() if name.startswith(WEIGHTS)}
    if own.keys() != given.keys() or any(own[name].shape != one.shape for name, one in given.items()):
        raise CheckpointError("the saved weights are of another base model, rank or choice of layers")
    with torch.no_grad():
        for name, one in given.items():
            own[name].copy_(one)
