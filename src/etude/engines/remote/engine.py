"""The engine `remote`: our loop here, the model and its updates on a service that the Tinker client can use."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from etude.engines.remote.connection import RemoteService, Wanted
from etude.engines.remote.policy import RemotePolicy
from etude.engines.remote.step import RemoteStepper, require_adam
from etude.errors import CheckpointError, ConfigError, Interrupted
from etude.loop.distributed import Group
from etude.loop.session import Session
from etude.loop.strategy import Strategy
from etude.types import Result

if TYPE_CHECKING:
    from etude.trainer import Trainer

log = logging.getLogger("etude")
_SAVED = "saved_on_service"


class RemoteEngine:
    """Train on a service that speaks to the official Tinker client, such as `etude serve`.

    The policy of the configuration gives the tokenizer; its weights are the service's, which computes, updates and
    draws. A checkpoint holds the name of what was saved there and everything of the loop. Needs the extra `service`.

    Args:
        url: Where the service is, such as http://127.0.0.1:8000.
        base_model: The model's name on the service; None takes the only one it offers.
        lora_rank: Rank of the adapters, 0 for all weights; None is that of the policy here.
        api_key: The key, from the environment: "${env:TINKER_API_KEY}"; None reads that variable.
        seed: Seed of the adapters; None is the seed of the run.
        timeout_s: How long one call may take, an absence of the service included, before the run ends.
    """

    def __init__(
        self,
        url: str,
        base_model: str | None = None,
        lora_rank: int | None = None,
        api_key: str | None = None,
        seed: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.url, self.base_model, self.lora_rank, self.seed = url, base_model, lora_rank, seed
        self.timeout_s = timeout_s
        self._api_key = api_key

    def connect(self, trainer: Trainer) -> RemoteService:
        """Return the service, which is not called yet."""
        rank = rank_of(trainer.policy) if self.lora_rank is None else self.lora_rank
        seed = trainer.config.seed if self.seed is None else self.seed
        wanted = Wanted(self.base_model, rank, seed)
        return RemoteService(self.url, wanted, api_key=self._api_key, timeout_s=self.timeout_s)

    def run(self, trainer: Trainer, resume: str | Path = "auto") -> Result:
        """Train to the requested length and return what came of it."""
        group = Group.join(trainer.config.device)
        _refuse(trainer, group)
        service, local = self.connect(trainer), trainer.policy
        trainer.policy = RemotePolicy(local, service)
        strategy = OnService(group, service, trainer)
        session = Session(trainer, group, strategy, None if trainer.is_manual else RemoteStepper)
        service.glance = lambda is_away: _leave_if_asked(session, is_away)
        try:
            with session.running(resume):
                while not session.finished:
                    session.take_step()
                return session.finish()
        finally:
            trainer.policy = local
            service.close()


class OnService(Strategy):
    """The weights are on a service: a checkpoint has the name under which they were saved there."""

    def __init__(self, group: Group, service: RemoteService, trainer: Trainer) -> None:
        super().__init__(group)
        self._service, self._trainer = service, trainer

    def state_dict(self) -> dict[str, Any]:
        """Save on the service, and return the name as text in bytes."""
        path = self._service.saved(f"step-{self._trainer.progress.step:06d}")
        return {_SAVED: torch.tensor(list(path.encode()), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was saved on the service."""
        saved = state.get(_SAVED)
        if not isinstance(saved, Tensor):
            raise CheckpointError(
                "the checkpoint has weights, and engine remote goes on from what a service has saved; give another "
                "run, or resume='never' to start afresh"
            )
        self._service.restore(bytes(saved.tolist()).decode())


def rank_of(policy: Any) -> int:
    """Return the rank of a policy's adapters; 0 where all weights are trained."""
    if not getattr(policy, "is_lora", False):
        return 0
    return int(policy.model.active_peft_config.r)


def _leave_if_asked(session: Session, is_away: bool) -> None:
    """Leave after a stop signal: a step that nothing has come of yet, saved; or one that nobody answers, as it was."""
    if is_away and session.signals.is_pressing():
        message = f"stopped while the service was away; the last checkpoint is {session.record.last}"
        raise Interrupted(session.signals.received, message)
    if session.pulse.phase == "data":
        session.heed_signals()


def _refuse(trainer: Trainer, group: Group) -> None:
    config = trainer.config
    if group.world > 1:
        raise ConfigError(f"engine remote is one process, for the service computes; {group.world} ranks were started")
    for name, plain in (("precision", "float32"), ("ema_decay", None), ("freeze", None), ("compile", False)):
        value = getattr(config, name)
        if value and value != plain:
            raise ConfigError(f"training.{name}: engine remote leaves the weights to the service; leave {name} out")
    if not trainer.is_manual:
        require_adam(config)
