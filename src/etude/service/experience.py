"""How a held trainer takes part in our loop: as the algorithm that makes experience of a step's rollouts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from etude.errors import ConfigError, DataError, NonFiniteError, one_line
from etude.loop.kept import Kept, of_rank, tensors_of, warn_left_out, with_ranks
from etude.rollouts.updates import weightless
from etude.service.base import BaseTrainer
from etude.service.checking import Floats, ask, check_prepared
from etude.service.gathering import gather_rollouts
from etude.service.self_hosted import OWNER, SelfHostedTrainer
from etude.types import Updates
from etude.types.batch import Batch
from etude.types.trajectory import Trajectory

if TYPE_CHECKING:
    from etude.service.hold import Holder

log = logging.getLogger("etude")


class _Adapter:
    """What both kinds share: rollouts of all ranks in one order, and the state of the held trainer."""

    takes_trajectories = True
    """Rollouts come as they are, not stacked."""

    def __init__(self, inner: BaseTrainer) -> None:
        self.inner = inner
        self.metrics: dict[str, tuple[float, float]] = {}
        self._holder: Holder
        self._kept: Kept

    def attach(self, trainer: Any) -> None:
        """Let the held trainer know who holds it, and find out what it keeps: before a checkpoint is taken up."""
        self._holder = trainer
        trainer.bind()
        inner, optimizers = self.inner, trainer.optimizers
        known = [inner._config, trainer, trainer.policy, optimizers, *optimizers.values(), *tensors_of(trainer.policy)]
        self._kept = Kept(inner, [*known, *self._known()])
        if trainer.session.group.is_main:
            warn_left_out(self._kept, type(inner).__name__)

    def _known(self) -> list[Any]:
        """Return what of the held trainer somebody else saves, or nobody needs to."""
        names = ("_value_network", "_training_client", "_noted", "_loss", "_teacher")
        return [getattr(self.inner, name) for name in names if getattr(self.inner, name, None) is not None]

    def whole(self, own: Sequence[Any]) -> list[Trajectory]:
        """Return the rollouts of all ranks; ranks call together."""
        return self._gathered(own)[0]

    def _gathered(self, own: Sequence[Any]) -> tuple[list[Trajectory], list[int]]:
        if not all(isinstance(one, Trajectory) for one in own):
            raise ConfigError(
                f"{type(self.inner).__name__} learns from trajectories, and the data gives "
                f"{type(own[0]).__name__}s; give rollouts, such as data: rollouts"
            )
        session = self._holder.session
        found = gather_rollouts(own, session.gather, session.group.world)
        for one in found[0]:
            if one.reward is not None and not math.isfinite(one.reward):
                name = f"group {one.get('group_id')}, run {one.get('run_id')}"
                raise NonFiniteError(f"step {session.progress.step}: the reward of {name} is {one.reward}")
        return found

    @property
    def solver(self) -> Any:
        """The user's own, behind this."""
        return self.inner

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of what the held trainer keeps on this rank."""
        return {"inner": deepcopy(self._kept.state_dict())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `snapshot` returned."""
        self._kept.load_state_dict(state["inner"])

    def state_dict(self) -> dict[str, Any]:
        """Return what the held trainer keeps, on each rank; every rank must call."""
        state, session = self.snapshot(), self._holder.session
        if session.group.world > 1:
            state["inner"] = with_ranks(state["inner"], session.gather)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the held trainer back what it kept."""
        self.restore({**state, "inner": of_rank(state["inner"], self._holder.session.group.rank)})


class WholeTrajectories(_Adapter):
    """For trainers that make the update themselves: a step is all its rollouts."""

    def experience(self, policy: Any, completed: Sequence[Any], *, rows: int | None = None) -> Updates:
        """Return the rollouts of all ranks as the one batch of a step."""
        return Updates([self.whole(completed)])

    def loss(self, policy: Any, batch: Any) -> Any:
        """Refuse: there is no loss outside of the update."""
        raise ConfigError(f"{type(self.inner).__name__} has no loss outside of its update")


class PreparedBatches(_Adapter):
    """For trainers on batches: `_prepare_batch` sees a whole step, and the loop trains on this rank's rows of it."""

    inner: SelfHostedTrainer

    def __init__(self, inner: SelfHostedTrainer, algorithm: Any = None) -> None:
        super().__init__(inner)
        if algorithm is not None:
            inner._loss = algorithm
        self.minibatches = 1
        self._floats = Floats()

    @property
    def algorithm(self) -> Any:
        """The algorithm whose loss is trained on, unless the held trainer has a loss of its own."""
        return self.inner._loss_algorithm

    @property
    def epochs(self) -> int:
        """Passes over each experience."""
        return int(getattr(self.algorithm, "epochs", 1))

    @property
    def temperature(self) -> float:
        """What completions must have been drawn at."""
        return float(getattr(self.algorithm, "temperature", self._sampled_at))

    @property
    def needs_greedy(self) -> bool:
        """Whether the algorithm compares completions with a greedy one."""
        return bool(getattr(self.algorithm, "needs_greedy", False))

    @property
    def _sampled_at(self) -> float:
        return float(getattr(getattr(self._holder.data, "sampling", None), "scale", 1.0))

    def attach(self, trainer: Any) -> None:
        """Let the loss compute log-probabilities at the temperature of the rollouts, unless it was given one."""
        self._holder = trainer
        algorithm, section = self.algorithm, self.inner._config.section("algorithm")
        if hasattr(algorithm, "temperature") and "temperature" not in section:
            algorithm.temperature = self._sampled_at
        self.minibatches = int(getattr(algorithm, "minibatches", 1))
        if hasattr(algorithm, "learn_age"):
            algorithm.learn_age(trainer.data, None if self.inner._mini_batch_size else self.minibatches)
        super().attach(trainer)

    def experience(self, policy: Any, completed: Sequence[Any], *, rows: int | None = None) -> Batch:
        """Let the held trainer prepare the rollouts of all ranks, and return this rank's rows of what it made."""
        holder, session = self._holder, self._holder.session
        trajectories, owners = self._gathered(completed)
        try:
            whole = Batch.from_trajectories(trajectories, pad_token_id=self.inner._pad_token_id)
        except ValueError as error:
            raise DataError(f"the rollouts of a step do not fit into one batch: {one_line(error)}") from error
        whole = whole.to(session.group.device)
        whole.metadata[OWNER] = owners
        prepared = holder.agree(lambda: self._prepared(whole))
        kept = (~prepared.is_padding).tolist()
        mine = [row for row, owner in enumerate(prepared[OWNER]) if owner == session.group.rank and kept[row]]
        own = prepared.select(mine) if mine else weightless(prepared.select([0]))
        return self._completed(policy, own, rows)

    def prepare(self, policy: Any, batch: Any) -> Batch:
        """Let the held trainer prepare a micro-batch of given data, which has no groups to be kept together."""
        given = Batch.of(batch).copy()
        if policy.training:
            return self._completed(policy, self._prepared(given), None)
        before = self.snapshot()  # in evaluation nothing may be learned
        try:
            return self._completed(policy, self._prepared(given), None)
        finally:
            self.restore(before)

    def loss(self, policy: Any, batch: Any) -> Any:
        """Return the loss of some rows: the held trainer's own, or the algorithm's."""
        return self.inner.compute_loss(policy, batch)

    def _prepared(self, given: Batch) -> Batch:
        inner = self.inner
        with torch.no_grad():
            found = ask(inner, "_prepare_batch", given.copy())
            needs = not inner._has_own_loss and hasattr(self.algorithm, "advantages")
            batch, metrics = check_prepared(inner, found, given, needs_advantages=needs)
            if "token_level_scores" not in batch.values and "rewards" in batch and "loss_mask" in batch.values:
                batch.values["token_level_scores"] = inner._reward_fn(batch)
        plain = self._floats(inner, {**inner._take_noted(), **metrics}, "_prepare_batch")
        self.metrics = {name: (value, 1.0) for name, value in plain.items()}
        if OWNER in given and OWNER not in batch:
            if len(batch) != len(given):
                raise DataError(
                    f"{type(inner).__name__}._prepare_batch returned {len(batch)} rows for {len(given)} in a batch of "
                    "its own; choose rows with batch.select(...), so that each is known again"
                )
            batch.metadata[OWNER] = given[OWNER]
        self._count(batch)
        return batch

    def _count(self, batch: Batch) -> None:
        """Settle what depends on a whole experience: its longest completion, and how many updates it is worth."""
        algorithm = self.algorithm
        if getattr(algorithm, "aggregation", "") == "length_normalised" and algorithm.length is None:
            batch.metadata["longest"] = max(1, int((batch["loss_mask"] != 0).sum(1).max()))
        size = self.inner._mini_batch_size
        if size:
            self.minibatches = max(1, -(-len(batch) // size))

    def _completed(self, policy: Any, own: Batch, rows: int | None) -> Batch:
        """Return rows with what the algorithm's loss needs beside their advantages."""
        algorithm = self.algorithm
        if self.inner._has_own_loss or not hasattr(algorithm, "advantages"):
            return own
        found: Batch = algorithm.experience(policy, own, rows=rows)
        if algorithm.needs_values and "returns" not in found.values:
            found.values["returns"] = found.values["advantages"] + found.values["values"]
        return found

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of what the held trainer and the algorithm keep."""
        state = super().snapshot()
        if hasattr(self.algorithm, "state_dict"):
            state["loss"] = deepcopy(self.algorithm.state_dict())
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give both back what they kept."""
        super().restore(state)
        if "loss" in state:
            self.algorithm.load_state_dict(state["loss"])
