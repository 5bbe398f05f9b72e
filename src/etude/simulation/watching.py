"""Watch episodes: keep what the policy saw, planned and did, at a bounded number of steps and some 5 us a step.

Shape letters: P kept steps, S state, H horizon, A action, K samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.policies.executor import ActionExecutor
from etude.rng import fold, generators_kept
from etude.simulation.actors import Actor, PolicyActor, Seat
from etude.simulation.environments.base import Array, Environment, HasScene, Observation, StepOutcome
from etude.simulation.episodes import Job
from etude.simulation.traces import EpisodeTrace
from etude.types import DataSpec
from etude.types.names import ACTION

MOST_POINTS = 96
"""Steps kept of an episode; a longer one keeps every second, fourth, eighth ... of its steps."""
_SAMPLE_STREAM = 11


@dataclass
class _Plan:
    """A chunk, and what it says about the coming steps beside the one before it."""

    begun: int
    chunk_HA: Array
    disagreement_H: Array
    uncertainty: float

    def says(self, step: int) -> tuple[Array, float]:
        """Return the action for a step, and the disagreement about it."""
        age = min(step - self.begun, len(self.chunk_HA) - 1)
        return self.chunk_HA[age], self.disagreement_H[age] if age < len(self.disagreement_H) else np.nan


@dataclass
class _Watched:
    """An episode that is being watched."""

    scene: dict[str, float]
    features: tuple[str, ...]
    names: tuple[str, ...]
    step: int = 0
    stride: int = 1
    plan: _Plan | None = None
    ended: bool = False
    points: list[tuple[int, Array, Array, _Plan | None]] = field(default_factory=list)


class EpisodeWatch:
    """A witness that keeps what happens in episodes; it draws no random number that anybody else would have drawn.

    Args:
        actor: Who acts; of a policy that plans in chunks, the plans are kept as well.
        samples: Plans to draw each time for the uncertainty of a policy that draws; 0 draws none.
    """

    def __init__(self, actor: Actor, samples: int = 0) -> None:
        self._policy: Any = actor.policy if isinstance(actor, PolicyActor) else None
        executor = getattr(self._policy, "executor", None)
        self._executor = executor if isinstance(executor, ActionExecutor) else None
        draws = self._executor is not None and getattr(self._policy, "noise_shape", None) is not None
        self._samples = samples if draws else 0
        self._unit_A = _action_unit(getattr(self._policy, "spec", None))
        self._running: dict[tuple[str, int], _Watched] = {}
        self._fresh: dict[int, tuple[dict[str, Tensor], Tensor]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of new plans for a while."""
        if self._executor is None:
            yield
            return
        before, self._executor.on_plan = self._executor.on_plan, self._hear
        try:
            yield
        finally:
            self._executor.on_plan = before

    def _hear(self, slots: Sequence[int], batch: dict[str, Tensor], chunks: Tensor) -> None:
        # Within the time that the policy is measured by: nothing but references.
        for row, slot in enumerate(slots):
            kept = {name: value[row : row + 1] for name, value in batch.items()} if self._samples else {}
            self._fresh[slot] = kept, chunks[row]

    # ---- a witness ---------------------------------------------------------------------------------------------------

    def began(self, job: Job, env: Environment, observation: Observation) -> None:
        """Keep where things are."""
        features, names = state_features(env.spec, observation)
        if isinstance(env, HasScene):
            scene = {name: float(value) for name, value in env.scene().items()}
        else:
            scene = dict(zip(names, _state_of(observation, features).tolist(), strict=True))
        self._running[job.env, job.episode] = _Watched(scene, features, names)

    def saw(self, job: Job, seat: Seat, action: Array, outcome: StepOutcome) -> None:
        """Keep a step, if it is one of those that are kept."""
        running = self._running[job.env, job.episode]
        step = running.step
        if (fresh := self._fresh.pop(seat.slot, None)) is not None:
            running.plan = self._make_plan(running.plan, step, seat, *fresh)
        if step % running.stride == 0:
            state = _state_of(seat.observation, running.features)
            running.points.append((step, state, np.array(action, np.float32).reshape(-1), running.plan))
            if len(running.points) > MOST_POINTS:
                running.points, running.stride = running.points[::2], running.stride * 2
        running.step, running.ended = step + 1, outcome.terminated

    def lost(self, job: Job, error: Exception) -> None:
        """End it all, as an evaluation does without a witness."""
        raise error

    def take(self, env: str, episode: int) -> EpisodeTrace:
        """Return what was kept of an episode that has ended."""
        running = self._running.pop((env, episode))
        steps = np.array([step for step, *_ in running.points], np.float32)
        said = [plan.says(step) if plan else None for step, _, _, plan in running.points]
        actions = np.stack([action for _, _, action, _ in running.points])
        nothing = np.full(actions.shape[1], np.nan, np.float32)
        plans = [plan for *_, plan in running.points]
        return EpisodeTrace(
            env, episode, running.features, running.names, running.scene, running.ended, steps,
            state=np.stack([state for _, state, _, _ in running.points]), action=actions,
            planned=np.stack([nothing if one is None else one[0] for one in said]),
            age=np.array([np.nan if plan is None else step - plan.begun for step, _, _, plan in running.points]),
            disagreement=np.array([np.nan if one is None else one[1] for one in said]),
            uncertainty=np.array([np.nan if plan is None else plan.uncertainty for plan in plans]),
        )  # fmt: skip

    def _make_plan(self, before: _Plan | None, step: int, seat: Seat, batch: dict[str, Tensor], chunk: Tensor) -> _Plan:
        chunk_HA = chunk.detach().cpu().numpy().reshape(len(chunk), -1).astype(np.float32)
        disagreement_H = np.zeros(0, np.float32)
        if before is not None:
            left_HA = before.chunk_HA[step - before.begun :]
            shared = min(len(left_HA), len(chunk_HA))
            disagreement_H = self._rms(chunk_HA[:shared] - left_HA[:shared])
        uncertainty = self._draw(seat, batch) if self._samples else np.nan
        return _Plan(step, chunk_HA, disagreement_H, uncertainty)

    def _draw(self, seat: Seat, batch: dict[str, Tensor]) -> float:
        """Return the spread of plans for the same observation, over the steps that are executed."""
        assert self._executor is not None
        many = {name: value.expand(self._samples, *value.shape[1:]) for name, value in batch.items()}
        with generators_kept(fold(seat.key, _SAMPLE_STREAM)), torch.no_grad():
            chunks = self._policy.predict_action_chunk(many).float().cpu().numpy()
        chunks_KHA = chunks.reshape(*chunks.shape[:2], -1)[:, : self._executor.n_action_steps]
        return float(self._rms(chunks_KHA.std(0, ddof=1)).mean())

    def _rms(self, values_HA: Array) -> Array:
        scaled = values_HA if self._unit_A is None else values_HA / self._unit_A
        found: Array = np.sqrt(np.square(scaled).mean(-1))
        return found


def state_features(spec: DataSpec, observation: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the features that are numbers, and a name for each number of them together."""
    features = tuple(
        name for name, one in spec.features.items() if one.role in ("state", "environment") and name in observation
    )
    names: list[str] = []
    for name in features:
        count, given = np.size(observation[name]), spec[name].names
        short = name.rpartition(".")[2]
        names += given if given is not None and len(given) == count else [f"{short}[{i}]" for i in range(count)]
    return features, tuple(names)


def _state_of(observation: Mapping[str, Array], features: Sequence[str]) -> Array:
    parts = [np.reshape(observation[name], -1) for name in features]
    return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)


def _action_unit(spec: DataSpec | None) -> Array | None:
    """Return the deviation of the demonstrated actions; None if it is not known, infinite where they never differ."""
    action = spec.features.get(ACTION) if spec is not None else None
    if action is None or not action.stats or "std" not in action.stats or action.classes is not None:
        return None
    unit = np.asarray(action.stats["std"], np.float32).reshape(-1)
    return np.where(unit > 0, unit, np.inf)
