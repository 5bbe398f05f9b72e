"""Made-up episodes: a hand that goes to a thing and carries it, in as many steps as are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from etude.simulation.demonstrations import Demonstrations, sample_states
from etude.simulation.diagnosis import diagnose
from etude.simulation.results import EpisodeRow, EvaluationResult
from etude.simulation.traces import EpisodeTrace

NAMES = ("hand_x", "hand_y", "object_x", "object_y", "previous_hand_x")
USUAL_STEPS = 40


def walk(start: float, steps: int) -> Any:
    """Return the states of an episode as it should go: the hand reaches the thing half way, and takes it along."""
    along = np.minimum(np.arange(steps) / (USUAL_STEPS / 2), 2.0)
    hand = np.stack([along, start + 0 * along], 1)
    thing = np.stack([np.maximum(along, 1.0), start + np.maximum(along - 1.0, 0.0)], 1)
    return np.concatenate([hand, thing, hand[:, :1]], 1).astype(np.float32)


def trace(episode: int, states: Any, *, ended: bool = False, env: str = "table", **arrays: Any) -> EpisodeTrace:
    """Return what would be kept of an episode."""
    count = len(states)
    nothing = np.full(count, np.nan, np.float32)
    given = {
        "steps": np.arange(count, dtype=np.float32), "action": np.zeros((count, 2), np.float32),
        "planned": np.zeros((count, 2), np.float32), "age": nothing, "disagreement": nothing, "uncertainty": nothing,
    }  # fmt: skip
    scene = dict(zip(NAMES, states[0].tolist(), strict=True))
    return EpisodeTrace(env, episode, ("observation.state",), NAMES, scene, ended, state=states, **{**given, **arrays})


def row(episode: int, success: bool | None, steps: int, env: str = "table") -> EpisodeRow:
    """Return how an episode went."""
    return EpisodeRow(env, "carry it", episode, episode, success, steps, 0.0)


def demonstrations(count: int = 8) -> Demonstrations:
    """Return demonstrations that begin at 0, 0.05, 0.1 ..."""
    states = [walk(0.05 * number, USUAL_STEPS) for number in range(count)]
    numbers = np.repeat(np.arange(count), USUAL_STEPS)
    return sample_states(("observation.state",), np.concatenate(states), numbers)


def made_up_result(env: str = "table") -> EvaluationResult:
    """Return an evaluation of ten episodes, two of which left the demonstrations."""
    states = {number: walk(0.05 * number, USUAL_STEPS if number > 1 else 100) for number in range(10)}
    for number in (0, 1):
        states[number][10:, 1] += 3
    rows = tuple(row(number, number > 1, len(one), env) for number, one in states.items())
    traces = {(env, number): trace(number, one, env=env) for number, one in states.items()}
    return EvaluationResult(rows, "test", 0, diagnosis=diagnose(rows, traces, {env: demonstrations()}))
