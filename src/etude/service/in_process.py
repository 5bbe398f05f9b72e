"""A training service in this process: the calls of the Tinker client, on the policy that a `Trainer` holds.

`forward_backward` adds to gradients, `optim_step` makes one step of Adam of them and clears them. Losses are sums over
tokens. On several ranks every rank makes the same calls with the same datums, and each computes its share of them.
Saved states are kept in memory, for as long as the service lives: what survives the process is the run's checkpoint.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from etude.algorithms import losses
from etude.algorithms.moments import Gather, alone
from etude.errors import ConfigError
from etude.policies.base import evaluating
from etude.policies.language.sampling import Sampling
from etude.service.datums import (
    AdamParams,
    ForwardBackwardOutput,
    Future,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SavedPath,
    numbers_of,
    tokens_of,
)
from etude.types.batch import Batch
from etude.types.trajectory import Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterator

LOSSES: Final[dict[str, dict[str, float]]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}
"""The losses by name, with what each takes in `loss_fn_config`; all take `entropy_coeff` too."""


class InProcessService:
    """The client of a service that is this process.

    Args:
        policy: What is trained and sampled from.
        optimizer: Makes the updates, an AdamW; None makes one.
        rows: Datums computed side by side.
        temperature: What log-probabilities are computed at: that of the rollouts.
        rank: This process's place in the group.
        world: How many ranks make the same calls.
        gather: How they exchange numbers.
    """

    def __init__(
        self,
        policy: Any,
        optimizer: Optimizer | None = None,
        *,
        rows: int = 32,
        temperature: float = 1.0,
        rank: int = 0,
        world: int = 1,
        gather: Gather = alone,
    ) -> None:
        self.policy, self.rows, self.temperature = policy, rows, temperature
        self.rank, self.world, self.gather = rank, world, gather
        self.optimizer: Optimizer = optimizer or AdamW([p for p in policy.parameters() if p.requires_grad])
        self.saved: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {}
        """Weights and optimizer state by path."""

    def create_lora_training_client(self, base_model: str | None = None, rank: int = 32, **_: Any) -> TrainingClient:
        """Return a client that trains the policy; one without adapters is refused, for a rank asks for them."""
        if rank and not getattr(self.policy, "is_lora", False):
            raise ConfigError(
                f"create_lora_training_client asks for adapters of rank {rank}, and the policy has none; build it with "
                "lora, or call create_training_client, which trains all weights"
            )
        return TrainingClient(self)

    def create_training_client(self, base_model: str | None = None, **_: Any) -> TrainingClient:
        """Return a client that trains the policy: whatever of it is trained."""
        return TrainingClient(self)

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        """Return a client that draws from saved weights; None draws from the policy as it is."""
        if model_path is not None and model_path not in self.saved:
            raise ConfigError(f"nothing was saved as {model_path!r}; saved are {', '.join(self.saved) or 'none'}")
        return SamplingClient(self, model_path)

    @contextmanager
    def weights_of(self, path: str | None) -> Iterator[None]:
        """Context in which the policy has saved weights, and then its own again."""
        if path is None:
            yield
            return
        own = _copied(self.policy.state_dict())
        self.policy.load_state_dict(self.saved[path][0])
        try:
            yield
        finally:
            self.policy.load_state_dict(own)


class TrainingClient:
    """Trains the policy of a service."""

    def __init__(self, service: InProcessService) -> None:
        self.service = service

    def forward(self, data: Sequence[Any], loss_fn: str = "cross_entropy", loss_fn_config: Any = None) -> Future:
        """Return what `forward_backward` would, and leave gradients alone."""
        with torch.no_grad():
            return Future(self._run(data, loss_fn, loss_fn_config, lambda loss: None))

    def forward_backward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Future:
        """Add the gradient of a loss, summed over the tokens of all datums, to those that are there."""
        return Future(self._run(data, loss_fn, loss_fn_config, lambda loss: loss.backward()))  # type: ignore[no-untyped-call]

    def optim_step(self, adam_params: Any = None) -> Future:
        """Make one step of Adam of the gradients that have been added up, and clear them."""
        params, optimizer = adam_params or AdamParams(), self.service.optimizer
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = float(params.learning_rate), (float(params.beta1), float(params.beta2))
            group["eps"] = float(params.eps)
            group["weight_decay"] = float(getattr(params, "weight_decay", 0.0))
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        most = float(getattr(params, "grad_clip_norm", 0.0) or 0.0)
        norm = nn.utils.clip_grad_norm_(trained, most or float("inf"), error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Future(OptimStepResponse({"grad_norm:mean": float(norm)}))

    def save_state(self, name: str) -> Future:
        """Keep weights and optimizer state under a name."""
        return self._save(f"memory://policy/weights/{name}", with_optimizer=True)

    def load_state(self, path: str) -> Future:
        """Take up saved weights; the optimizer begins anew."""
        self._load(path)
        self.service.optimizer.state.clear()
        return Future(None)

    def load_state_with_optimizer(self, path: str) -> Future:
        """Take up saved weights and optimizer state."""
        self._load(path)
        state = self.service.saved[path][1]
        if state is None:
            raise ConfigError(f"{path!r} was saved for sampling, without optimizer state")
        self.service.optimizer.load_state_dict(deepcopy(state))
        return Future(None)

    def save_weights_for_sampler(self, name: str) -> Future:
        """Keep the weights under a name, to draw from."""
        return self._save(f"memory://policy/sampler_weights/{name}", with_optimizer=False)

    def save_weights_and_get_sampling_client(self, name: str = "latest") -> SamplingClient:
        """Keep the weights, and return a client that draws from them."""
        return self.service.create_sampling_client(self.save_weights_for_sampler(name).result().path)

    def _save(self, path: str, *, with_optimizer: bool) -> Future:
        service = self.service
        state = deepcopy(service.optimizer.state_dict()) if with_optimizer else None
        service.saved[path] = (_copied(service.policy.state_dict()), state)
        return Future(SavedPath(path))

    def _load(self, path: str) -> None:
        if path not in self.service.saved:
            raise ConfigError(f"nothing was saved as {path!r}; saved are {', '.join(self.service.saved) or 'none'}")
        self.service.policy.load_state_dict(self.service.saved[path][0])

    def _run(
        self, data: Sequence[Any], loss_fn: str, config: Mapping[str, float] | None, end: Callable[[Tensor], None]
    ) -> ForwardBackwardOutput:
        service = self.service
        options = _options(loss_fn, config)
        own = list(range(service.rank, len(data), service.world))
        # Sharded weights are gathered layer by layer: every rank goes through as many parts as the fullest one.
        most = -(-len(data) // service.world)
        found: list[list[Any]] = []
        for start in range(0, most, service.rows):
            part = own[start : start + service.rows]
            batch = _rows(data, part or [0], getattr(service.policy, "pad_token_id", 0)).to(_device(service.policy))
            loss_BT, log_probs_BT = _losses(service.policy, batch, loss_fn, options, service.temperature)
            weight = float(bool(part)) * service.world  # gradients of ranks are averaged, and the loss is a sum
            end(loss_BT.sum() * weight)
            for row, index in enumerate(part):
                length = len(tokens_of(data[index].model_input))
                columns = slice(1, 1 + length)
                found.append([index, log_probs_BT[row, columns].tolist(), loss_BT[row, columns].tolist()])
        everyone = sorted(one for rank in service.gather(found) for one in rank)
        outputs = [{"logprobs": torch.tensor(p), "elementwise_loss": torch.tensor(e)} for _, p, e in everyone]
        total = sum(float(one["elementwise_loss"].double().sum()) for one in outputs)
        return ForwardBackwardOutput(outputs, {"loss:sum": total})


class SamplingClient:
    """Draws from the policy of a service, as it is or as it was saved."""

    def __init__(self, service: InProcessService, path: str | None = None) -> None:
        self.service, self.path = service, path

    def sample(
        self, prompt: Any, num_samples: int = 1, sampling_params: Any = None, include_prompt_logprobs: bool = False
    ) -> Future:
        """Return completions of a prompt with the log-probability of each token."""
        given = sampling_params
        stop = getattr(given, "stop", None) or ()
        words = [stop] if isinstance(stop, str) else list(stop)
        sampling = Sampling(
            max_new_tokens=getattr(given, "max_tokens", None) or 32,
            temperature=float(getattr(given, "temperature", 1.0)),
            top_p=float(getattr(given, "top_p", 1.0)),
            top_k=max(0, int(getattr(given, "top_k", 0))),
            stop=tuple(word for word in words if isinstance(word, str)),
            stop_tokens=tuple(word for word in words if isinstance(word, int)),
            seed=int(getattr(given, "seed", 0) or 0),
        )
        tokens = tokens_of(prompt)
        with self.service.weights_of(self.path):
            (drawn,) = self.service.policy.generate([tokens], sampling, n=num_samples, keys=[0])
        sequences = [SampledSequence(list(one.tokens), one.logprobs, one.finish_reason) for one in drawn]
        heard = self.compute_logprobs(prompt).result() if include_prompt_logprobs else None
        return Future(SampleResponse(sequences, heard))

    def compute_logprobs(self, prompt: Any) -> Future:
        """Return the log-probability of each token given those before it; None for the first."""
        tokens = tokens_of(prompt)
        whole = Batch.from_trajectories([Trajectory(tokens, [1] * len(tokens), 0.0)])
        with self.service.weights_of(self.path), torch.no_grad(), evaluating(self.service.policy):
            found = self.service.policy.log_probs(whole.to(_device(self.service.policy)))
        return Future([None, *found[0, 1:].tolist()])


def _options(loss_fn: str, config: Mapping[str, float] | None) -> dict[str, float]:
    if loss_fn not in LOSSES:
        raise ConfigError(f"unknown loss_fn {loss_fn!r}; choose from {', '.join(LOSSES)}")
    known = {**LOSSES[loss_fn], "entropy_coeff": 0.0}
    strange = [name for name in config or {} if name not in known]
    if strange:
        raise ConfigError(f"{loss_fn} has no option {strange[0]!r} in loss_fn_config; it takes {', '.join(known)}")
    return known | dict(config or {})


def _rows(data: Sequence[Any], indices: Sequence[int], pad: int) -> Batch:
    """Return datums as a batch: the whole text in each row, every number where its target token stands."""
    made = []
    for index in indices:
        inputs = {name: numbers_of(value) for name, value in data[index].loss_fn_inputs.items()}
        tokens, targets = tokens_of(data[index].model_input), inputs.pop("target_tokens").long().tolist()
        if len(tokens) != len(targets) or tokens[1:] != targets[:-1]:
            raise ConfigError(
                f"datum {index}: target_tokens must be the tokens of model_input, one further; a policy that reads "
                "whole texts predicts nothing else"
            )
        fields: dict[str, Any] = {}
        mask = inputs.pop("mask", inputs.pop("loss_mask", None))
        for name, numbers in inputs.items():
            if numbers.numel() != len(targets):
                raise ConfigError(f"datum {index}: {name} has {numbers.numel()} numbers for {len(targets)} targets")
            held = "token_advantages" if name == "advantages" else name
            fields[held] = torch.cat((torch.zeros(1), numbers.flatten().float().cpu()))
        counted = [1.0] * len(targets) if mask is None else mask.tolist()
        made.append(Trajectory([*tokens, targets[-1]], [0.0, *counted], 0.0, extra_fields=fields))
    return Batch.from_trajectories(made, pad_token_id=pad)


def _losses(
    policy: Any, batch: Batch, loss_fn: str, options: Mapping[str, float], heat: float
) -> tuple[Tensor, Tensor]:
    """Return the loss and the log-probability of each token (B, T)."""
    asked = {"with_entropy": True} if options["entropy_coeff"] else {}
    found = policy.log_probs(batch, temperature=heat, **asked)
    log_probs_BT = found if isinstance(found, Tensor) else found.log_probs
    mask_BT = batch["loss_mask"]
    if loss_fn == "cross_entropy":
        weights_BT = batch["weights"] if "weights" in batch.values else mask_BT
        loss_BT = losses.cross_entropy(log_probs_BT, torch.where(mask_BT != 0, weights_BT, 0.0))
    else:
        old_BT, advantages_BT = (_needed(batch, name, loss_fn) for name in ("old_log_probs", "advantages"))
        loss_BT = policy_loss(loss_fn, options)(log_probs_BT, old_BT, advantages_BT, mask_BT)
    if asked:
        loss_BT = loss_BT - options["entropy_coeff"] * torch.where(mask_BT != 0, found.entropy, 0.0)
    return loss_BT, log_probs_BT.detach()


def policy_loss(loss_fn: str, options: Mapping[str, float]) -> Callable[..., Tensor]:
    """Return the loss of a name by token, given log-probabilities, old ones, advantages and a mask."""
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", 0.0)
    if loss_fn == "ppo":
        return lambda *given: losses.ppo_clip(*given, clip_low=1.0 - low, clip_high=high - 1.0)
    if loss_fn == "cispo":
        return lambda *given: losses.cispo(*given, ratio_low=low, ratio_high=high)
    if loss_fn == "dro":
        return lambda *given: losses.dro(*given, beta=options["beta"])
    return losses.importance_sampling


def _needed(batch: Batch, name: str, loss_fn: str) -> Tensor:
    if name not in batch.values:
        theirs = "logprobs" if name == "old_log_probs" else name
        raise ConfigError(f"{loss_fn} needs {theirs!r} in loss_fn_inputs")
    found: Tensor = batch.values[name]
    return found


def _device(policy: nn.Module) -> torch.device:
    return next(policy.parameters()).device


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}
