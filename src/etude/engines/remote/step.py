"""`RemoteStepper`: one optimizer step on a service, from the same micro-batches and with the same account of them.

What a loss of ours weighs each token with is found by differentiating it by the log-probabilities, which is cheap: the
model has no part in it. A loss that the service knows by name then needs one call; any other one is sent as a
cross-entropy whose weights are its derivatives at the present log-probabilities, which have to be asked for first.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from etude.engines.remote.connection import numbers
from etude.engines.remote.named import CROSS_ENTROPY, named_loss
from etude.engines.remote.policy import RemotePolicy, Text, inputs_at, place
from etude.errors import ConfigError
from etude.loop import guard
from etude.loop.step import Stepper, Totals
from etude.loop.weighing import Account
from etude.rng import fold, seed_everything
from etude.types import split_loss
from etude.types.batch import Batch

if TYPE_CHECKING:
    from etude.loop.session import Session

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}


@dataclass
class _Asked:
    """Log-probabilities that a loss asked for, and what came of them."""

    batch: Any
    texts: Sequence[Text]
    log_probs_BT: Tensor


class RemoteStepper(Stepper):
    """Takes the steps of a session on a service."""

    def __init__(self, session: Session) -> None:
        config = session.config
        super().__init__(
            session.strategy, session.optimizations, session.names, session.precision, None, session.pulse,
            seed=config.seed, batch_size=config.batch_size, accumulate=config.gradient_accumulation_steps,
            ids=session.data.ids,
        )  # fmt: skip
        self.meter, self._trainer = session.meter, session.trainer
        policy: Any = session.policy
        self._policy: RemotePolicy = policy
        self._named = named_loss(session.trainer)

    def _run_group(
        self, step: int, update: int, micros: Sequence[Any], stop_signal: int, seconds: float, env_steps: int
    ) -> Totals:
        finding = next((found for at, one in enumerate(micros) if (found := guard.check_rewards(one, at))), None)
        if finding:
            guard.stop(self.group, step, finding, self.ids(step))
        self.pulse.enter("loss")
        account = Account(self.nominal, len(micros))
        with torch.no_grad():
            prepared = [self._trainer.prepare_batch(one) for one in micros]
        keys = [fold(self.key, step, at, update) if update else fold(self.key, step, at) for at in range(len(micros))]
        if self._by_name(prepared):
            self._update_by_name(step, prepared, keys, account)
        else:
            self._update_by_derivative(step, prepared, keys, account)
        return Totals(account.mean, account.weight, stop_signal, seconds, env_steps)

    def _by_name(self, micros: Sequence[Any]) -> bool:
        named = self._named
        if named is None or not named.by_advantage:
            return named is not None
        return all(isinstance(one, Batch) and "old_log_probs" in one.values for one in micros)

    # ---- a loss that the service knows -------------------------------------------------------------------------------

    def _update_by_name(self, step: int, micros: Sequence[Any], keys: Sequence[int], account: Account) -> None:
        named = self._named
        assert named is not None
        even = [_even(one) for one in micros] if named.by_advantage else list(micros)
        weighed = Account(self.nominal, len(micros))
        asked = self._differentiate_all(even, keys, weighed, self._stand_in)
        weighed.read(_Unheard())  # type: ignore[arg-type]
        scale = weighed.correction(1)
        data = []
        for micro, one in zip(micros, asked, strict=True):
            weights_BT = -_derivative(one) * scale
            fields = {"weights": weights_BT}
            if named.by_advantage:
                advantages_BT = _by_token(micro["advantages"], weights_BT)
                self._require_finite(step, "advantages", advantages_BT, one)
                fields = {"advantages": advantages_BT * weights_BT, "logprobs": micro["old_log_probs"]}
            for name, value in fields.items():
                self._require_finite(step, name, value, one)
            data += self._data(one.texts, fields)
        found = self._send(step, data, named.loss_fn, named.config)
        # The loss and what is told about it, at the log-probabilities that the update was made at.
        answers = iter(_placed(asked, found))
        self._differentiate_all(micros, keys, account, lambda batch, texts: next(answers), backward=False)
        self._close(step, account)

    def _stand_in(self, batch: Any, texts: Sequence[Text]) -> Tensor:
        """Return log-probabilities at which all ratios are 1, so that nothing is clipped."""
        if self._named is not None and self._named.by_advantage:
            old: Tensor = batch["old_log_probs"]
            return old.detach().float().clone()
        return torch.zeros(batch["input_ids"].shape)

    # ---- any other loss ----------------------------------------------------------------------------------------------

    def _update_by_derivative(self, step: int, micros: Sequence[Any], keys: Sequence[int], account: Account) -> None:
        asked = self._differentiate_all(micros, keys, account, self._policy.ask)
        self._close(step, account)
        data = []
        for one in asked:
            weights_BT = -_derivative(one) * account.correction(1)
            self._require_finite(step, "derivatives of the loss", weights_BT, one)
            data += self._data(one.texts, {"weights": weights_BT})
        self._send(step, data, CROSS_ENTROPY.loss_fn, {})

    # ---- what both do ------------------------------------------------------------------------------------------------

    def _differentiate_all(
        self, micros: Sequence[Any], keys: Sequence[int], account: Account, answer: Any, *, backward: bool = True
    ) -> list[_Asked]:
        """Add every micro-batch to an account; return what each asked for, differentiated."""
        found: list[_Asked] = []

        def noted(batch: Any, texts: Sequence[Text]) -> Tensor:
            log_probs_BT: Tensor = answer(batch, texts).requires_grad_()
            found.append(_Asked(batch, texts, log_probs_BT))
            return log_probs_BT

        for micro, key in zip(micros, keys, strict=True):
            seed_everything(key)
            with self._policy.answering(noted):
                share = split_loss(self._trainer.compute_loss(self._policy, micro), micro)
            start = account.add(*share)
            if backward and share[0].requires_grad:
                share[0].backward(torch.tensor(start, dtype=share[0].dtype))  # type: ignore[no-untyped-call]
        return found

    def _close(self, step: int, account: Account) -> None:
        account.read(self.meter)
        if not account.is_finite:
            at_fault = account.first_bad()
            guard.stop(self.group, step, at_fault and at_fault[1], self.ids(step))

    def _require_finite(self, step: int, name: str, value_BT: Tensor, one: _Asked) -> None:
        counted = [value_BT[text.row, text.places_N][text.counted_N] for text in one.texts]
        if counted and not bool(torch.cat(counted).isfinite().all()):
            guard.stop(self.group, step, f"{name} not finite", self.ids(step))

    def _data(self, texts: Sequence[Text], fields: Mapping[str, Tensor]) -> list[Any]:
        service = self._policy.service
        inputs = inputs_at(texts, **fields)
        return [service.datum(text.tokens[:-1], one) for text, one in zip(texts, inputs, strict=True)]

    def _send(self, step: int, data: list[Any], loss_fn: str, config: Mapping[str, float]) -> list[Tensor]:
        """Send gradients and step back to back; return the log-probabilities of each datum."""
        if not data:
            return []
        self.pulse.enter("update")
        service = self._policy.service
        (optimization,) = self.optimizations.values()
        optimization.set_rate(step)
        done = service.send(data, loss_fn, config)
        stepped = service.send_step(adam_of(optimization))
        passed, updated = service.receive(done), service.receive(stepped)
        norm = (updated.metrics or {}).get("grad_norm:mean")
        self.norms = {} if norm is None else dict.fromkeys(self.optimizations, float(norm))
        self._updated = True
        return [numbers(one["logprobs"]) for one in passed.loss_fn_outputs]


class _Unheard:
    """Takes the place of a meter where numbers are not to be told."""

    def add(self, name: str, value: Any, weight: float) -> None:
        """Do nothing."""


def adam_of(optimization: Any) -> dict[str, float]:
    """Return the parameters of a step of Adam, as services take them."""
    group = {**_ADAM, **optimization.optimizer.param_groups[0]}
    beta1, beta2 = group["betas"]
    return {
        "learning_rate": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"]),
        "weight_decay": float(group.get("weight_decay", 0.0)), "grad_clip_norm": float(optimization.clip_norm or 0.0),
    }  # fmt: skip


def require_adam(config: Any) -> None:
    """Refuse an optimizer that services do not have."""
    named = config.named_optimizers()
    (first, *others) = named.values()
    is_adam = first.type == "adamw" or (first.type == "adam" and not first.weight_decay)
    strange = set(first.params) - {"betas", "eps"}
    if others or not is_adam or strange:
        raise ConfigError(
            "training.optimizer: a training service makes steps of AdamW for all weights alike; use one optimizer, "
            "adamw, whose params are betas and eps"
        )


def _even(micro: Any) -> Any:
    """Return a micro-batch in which every token has the advantage 1."""
    micro = micro.copy()
    micro.values["advantages"] = torch.ones_like(micro["old_log_probs"])
    return micro


def _by_token(advantages: Tensor, like_BT: Tensor) -> Tensor:
    return (advantages[:, None] if advantages.dim() == 1 else advantages).to(like_BT).expand_as(like_BT)


def _derivative(one: _Asked) -> Tensor:
    grad = one.log_probs_BT.grad
    return torch.zeros_like(one.log_probs_BT) if grad is None else grad


def _placed(asked: Sequence[_Asked], found: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probabilities of all datums as tensors (B, T), one for each time a loss asked."""
    placed, rest = [], list(found)
    for one in asked:
        own, rest = rest[: len(one.texts)], rest[len(one.texts) :]
        placed.append(place(one.batch, one.texts, own))
    return placed
