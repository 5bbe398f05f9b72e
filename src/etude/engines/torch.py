"""The torch engine: one process, or many under torchrun, replicated (DDP) or sharded (FSDP2)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from etude.loop.distributed import Group
from etude.loop.session import Session
from etude.loop.strategy import make_strategy
from etude.types import Result

if TYPE_CHECKING:
    from etude.trainer import Trainer


class TorchEngine:
    """Train with plain PyTorch, in one process or under torchrun.

    Args:
        strategy: How several ranks share a policy: replicated (ddp, the default) or sharded (fsdp).
        find_unused_parameters: Let parameters go without a gradient in some steps, for conditional paths under ddp.
        sync_batch_norm: Normalise over the batches of all ranks where the policy has batch normalisation.
    """

    def __init__(
        self,
        strategy: Literal["auto", "ddp", "fsdp"] = "auto",
        find_unused_parameters: bool = False,
        sync_batch_norm: bool = True,
    ) -> None:
        self.strategy: Literal["auto", "ddp", "fsdp"] = strategy
        self.find_unused_parameters = find_unused_parameters
        self.sync_batch_norm = sync_batch_norm

    def run(self, trainer: Trainer, resume: str | Path = "auto") -> Result:
        """Train to the requested length and return what came of it."""
        group = Group.join(trainer.config.device)
        strategy = make_strategy(self.strategy, group, self.find_unused_parameters, self.sync_batch_norm)
        with Session(trainer, group, strategy).running(resume) as session:
            while not session.finished:
                session.take_step()
            return session.finish()
