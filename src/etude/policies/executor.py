"""The action executor: turns chunks of actions into one action at a time, for evaluation, serving and export alike.

Shape letters: B rows, H horizon, A action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from etude.errors import ConfigError

Observation = Mapping[str, Tensor]
OnPlan = Callable[[Sequence[int], dict[str, Tensor], Tensor], None]
"""Told of new chunks: the slots, what they saw (B, ...), and the chunks (B, H, *A)."""


@dataclass
class _Slot:
    """What one robot still has to do, and what it saw."""

    sums: Tensor | None = None
    """Weighted sum of what the chunks say about each coming step, (steps, *A)."""
    counts: list[int] = field(default_factory=list)
    """How many chunks spoke about each coming step."""
    until_next: int = 0
    """Steps until the next chunk is wanted."""
    seen: deque[dict[str, Tensor]] = field(default_factory=deque)


class ActionExecutor:
    """Execute the first `n_action_steps` of every chunk, for any number of independent slots.

    Args:
        horizon: Actions in a chunk.
        n_action_steps: Actions between one chunk and the next; None is all that the horizon allows, or 1 when
            ensembling.
        temporal_ensemble_coeff: Average what overlapping chunks say about a step, with weights `exp(-m * i)`, the
            oldest chunk first (i = 0), as in the ACT paper; None executes the newest chunk alone.
        latency_steps: Steps that pass while a chunk is computed: it takes over that much later, without its past part.
        observation_steps: Distances in time of the observations a policy wants, like [-1, 0]; None is the last alone.
    """

    def __init__(
        self,
        horizon: int,
        *,
        n_action_steps: int | None = None,
        temporal_ensemble_coeff: float | None = None,
        latency_steps: int = 0,
        observation_steps: Sequence[int] | None = None,
    ) -> None:
        if n_action_steps is None:
            n_action_steps = horizon - latency_steps if temporal_ensemble_coeff is None else 1
        if latency_steps < 0:
            raise ConfigError(f"latency_steps must not be negative, got {latency_steps}")
        if n_action_steps < 1 or n_action_steps + latency_steps > horizon:
            raise ConfigError(
                f"n_action_steps + latency_steps must lie between 1 and the {horizon} actions of a chunk, "
                f"got {n_action_steps} + {latency_steps}"
            )
        if observation_steps is not None and (not observation_steps or max(observation_steps) > 0):
            raise ConfigError(f"observation_steps must be distances into the past, got {list(observation_steps)}")
        self.horizon, self.n_action_steps, self.latency_steps = horizon, n_action_steps, latency_steps
        self.temporal_ensemble_coeff = temporal_ensemble_coeff
        self.observation_steps = None if observation_steps is None else list(observation_steps)
        exponents = torch.arange(horizon, dtype=torch.float64)
        weights = torch.exp(-(temporal_ensemble_coeff or 0.0) * exponents)
        self._weights, self._norms = weights.tolist(), weights.cumsum(0).tolist()
        self._slots: dict[int, _Slot] = {}
        self.on_plan: OnPlan | None = None
        """Told of every chunk that `select` asks for, by whoever wants to know what was planned."""

    def settings(self) -> dict[str, Any]:
        """Return what to save to make such an executor again."""
        return {
            "n_action_steps": self.n_action_steps,
            "temporal_ensemble_coeff": self.temporal_ensemble_coeff,
            "latency_steps": self.latency_steps,
        }

    def reset(self, slots: Sequence[int] | None = None) -> None:
        """Forget what was planned and seen: in some slots, or in all."""
        for slot in list(self._slots) if slots is None else slots:
            self._slots.pop(int(slot), None)

    def select(
        self,
        observation: Observation,
        predict: Callable[[dict[str, Tensor]], Tensor],
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Return one action per row, asking `predict` for chunks (B, H, *A) of those rows that want one.

        Args:
            observation: Tensors of shape (B, ...), one row per slot, without time.
            predict: Makes chunks from a batch of observations, with time where `observation_steps` asks for it.
            slots: The slot of each row; the row's number unless given.
        """
        rows = next(iter(observation.values())).shape[0]
        slots = range(rows) if slots is None else slots
        if len(slots) != rows:
            raise ValueError(f"{rows} rows of observations came for {len(slots)} slots")
        if self.observation_steps is not None:
            for row, slot in enumerate(slots):
                self.observe(slot, {name: value[row] for name, value in observation.items()})
        due = [row for row, slot in enumerate(slots) if self.is_due(slot)]
        if due:
            if self.observation_steps is not None:
                wanted = [self.window(slots[row]) for row in due]
                batch = {name: torch.stack([window[name] for window in wanted]) for name in observation}
            elif len(due) == rows:
                batch = dict(observation)
            else:
                batch = {name: value[due] for name, value in observation.items()}
            chunks = predict(batch)
            if self.on_plan is not None:
                self.on_plan([slots[row] for row in due], batch, chunks)
            for row, chunk in zip(due, chunks, strict=True):
                self.schedule(slots[row], chunk)
        return torch.stack([self.next_action(slot) for slot in slots])

    # ---- the parts, for callers that predict while the robot moves ---------------------------------------------------

    def observe(self, slot: int, observation: Observation) -> None:
        """Remember what a slot saw; the first observation also stands for the time before it."""
        if self.observation_steps is None:
            return
        seen, depth = self._slot(slot).seen, 1 - min(self.observation_steps)
        seen.append(dict(observation))
        while len(seen) < depth:
            seen.append(dict(observation))
        while len(seen) > depth:
            seen.popleft()

    def window(self, slot: int) -> dict[str, Tensor]:
        """Return the observations of a slot at `observation_steps`, stacked in time, (T, ...)."""
        if self.observation_steps is None:
            raise ValueError("this executor keeps no history; it was made without observation_steps")
        seen = self._slot(slot).seen
        frames = [seen[step - 1] for step in self.observation_steps]
        return {name: torch.stack([frame[name] for frame in frames]) for name in frames[0]}

    def is_due(self, slot: int) -> bool:
        """Tell whether a slot wants a chunk before its next action."""
        return self._slot(slot).until_next <= 0

    def planned(self, slot: int) -> int:
        """Return for how many steps a slot has actions."""
        return len(self._slot(slot).counts)

    def until_due(self, slot: int) -> int:
        """Return after how many steps a slot wants a chunk: as configured, or when nothing is left."""
        state = self._slot(slot)
        return max(0, min(state.until_next, len(state.counts)))

    def will_look(self, slot: int) -> bool:
        """Tell whether what a slot sees next can become part of what a chunk is made from."""
        past = 0 if self.observation_steps is None else -min(self.observation_steps)
        return self._slot(slot).until_next <= past

    def schedule(self, slot: int, chunk: Any) -> None:
        """Take a chunk made from what the slot sees now; it takes over after the latency, or when nothing is left.

        Args:
            slot: Whose actions they are.
            chunk: Actions (H, *A) from now on; tensor or array.
        """
        planned = self.planned(slot)
        self._merge(slot, torch.as_tensor(chunk), skip=min(self.latency_steps, planned))

    def deliver(self, slot: int, chunk: Any, elapsed_steps: int) -> None:
        """Take a chunk made from what the slot saw `elapsed_steps` ago: its actions for the past are dropped.

        The next one is wanted `n_action_steps` after what this one was made from.
        """
        actions = torch.as_tensor(chunk)[elapsed_steps:]
        if not len(actions):
            raise ValueError(f"a chunk of {len(chunk)} actions came after {elapsed_steps} steps; nothing of it is left")
        self._merge(slot, actions, skip=0)
        self._slot(slot).until_next = self.n_action_steps - elapsed_steps

    def next_action(self, slot: int) -> Tensor:
        """Return the action of a slot for this step, and go on to the next."""
        state = self._slot(slot)
        if state.sums is None or not state.counts:
            raise ValueError(f"slot {slot} has no actions left; give it a chunk first")
        count = state.counts.pop(0)
        action, state.sums = state.sums[0], state.sums[1:]
        state.until_next -= 1
        return action if count == 1 else action / self._norms[count - 1]

    def _slot(self, slot: int) -> _Slot:
        return self._slots.setdefault(int(slot), _Slot())

    def _merge(self, slot: int, actions: Tensor, skip: int) -> None:
        """Let `actions[skip:]` speak about the steps from `skip` on."""
        state = self._slot(slot)
        state.until_next = self.n_action_steps
        if state.sums is None:
            state.sums, state.counts = actions[skip:], [1] * (len(actions) - skip)
            return
        if self.temporal_ensemble_coeff is None:
            # What was planned up to there stays; everything later gives way.
            state.sums = torch.cat([state.sums[:skip], actions[skip:]])
            state.counts = [1] * len(state.sums)
            return
        shared = min(len(state.counts), len(actions))
        weights = [self._weights[count] for count in state.counts[skip:shared]]
        column = torch.tensor(weights, dtype=actions.dtype, device=actions.device)
        column = column.reshape(-1, *[1] * (actions.dim() - 1))
        parts = [state.sums[:skip], state.sums[skip:shared] + actions[skip:shared] * column]
        # One of these is empty: the part only the old plan covers, or the part only the new chunk covers.
        parts += [state.sums[shared:], actions[shared:]]
        state.sums = torch.cat(parts)
        counts = state.counts
        state.counts = counts[:skip] + [c + 1 for c in counts[skip:shared]] + counts[shared:]
        state.counts += [1] * (len(actions) - shared)


class Executing:
    """What executes chunks of `horizon` actions, in a way that can be chosen again."""

    horizon: int
    executor: ActionExecutor

    @property
    def observation_delta_indices(self) -> list[int] | None:
        """Distances in frames of the observations in a batch; None is the present one, without a time dimension."""
        raise NotImplementedError

    def set_execution(
        self,
        n_action_steps: int | None = None,
        temporal_ensemble_coeff: float | None = None,
        latency_steps: int = 0,
    ) -> None:
        """Choose how chunks are executed; also afterwards, on a trained policy. Forgets what was planned."""
        self.executor = ActionExecutor(
            self.horizon,
            n_action_steps=n_action_steps,
            temporal_ensemble_coeff=temporal_ensemble_coeff,
            latency_steps=latency_steps,
            observation_steps=self.observation_delta_indices,
        )
