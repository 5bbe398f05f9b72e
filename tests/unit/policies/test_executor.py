"""The action executor: queues, ensembling, latency, history, slots."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.errors import ConfigError
from etude.policies.executor import ActionExecutor


class Planner:
    """Predicts chunks that say when they were made and for when: 100 * (time of the observation) + step."""

    def __init__(self, horizon: int) -> None:
        self.horizon, self.calls = horizon, 0

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return 100.0 * batch["time"].reshape(-1, 1, 1) + torch.arange(float(self.horizon))[:, None]


def run(executor: ActionExecutor, steps: int, predict: Callable[..., Tensor] | None = None) -> list[float]:
    predict = predict or Planner(executor.horizon)
    return [float(executor.select({"time": torch.tensor([float(t)])}, predict)) for t in range(steps)]


def test_the_first_actions_of_each_chunk_are_executed() -> None:
    planner = Planner(10)
    executor = ActionExecutor(10, n_action_steps=3)
    assert run(executor, 7, planner) == [0, 1, 2, 300, 301, 302, 600]
    assert planner.calls == 3


def test_without_a_number_the_whole_chunk_is_executed() -> None:
    assert run(ActionExecutor(4), 6) == [0, 1, 2, 3, 400, 401]


# ---- temporal ensembling ---------------------------------------------------------------------------------------------


def ensemble_by_hand(chunks: dict[int, Tensor], step: int, m: float) -> Tensor:
    """Algorithm 2 of the ACT paper: all predictions for a step, oldest first, weighted by exp(-m * i)."""
    said = [chunk[step - made] for made, chunk in sorted(chunks.items()) if 0 <= step - made < len(chunk)]
    weights = [math.exp(-m * i) for i in range(len(said))]
    return sum((w * a for w, a in zip(weights, said)), torch.zeros_like(said[0])) / sum(weights)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("m", [0.0, 0.01, 1.0, -0.5])
def test_ensembling_follows_the_formula_of_the_paper(m: float, every: int) -> None:
    chunks = {t: torch.randn(7, 2, dtype=torch.float64) for t in range(0, 30, every)}
    executor = ActionExecutor(7, n_action_steps=every, temporal_ensemble_coeff=m)
    for step in range(30):
        action = executor.select({"time": torch.tensor([step])}, lambda batch: chunks[int(batch["time"])][None])
        torch.testing.assert_close(action[0], ensemble_by_hand(chunks, step, m))


def test_ensembling_asks_for_a_chunk_at_every_step() -> None:
    planner = Planner(5)
    run(ActionExecutor(5, temporal_ensemble_coeff=0.01), 8, planner)
    assert planner.calls == 8


# ---- latency ---------------------------------------------------------------------------------------------------------


def test_a_late_chunk_takes_over_without_its_past_part() -> None:
    # Asked at 0, 3 and 6; what is asked at 3 is there at 5, when its first two actions are past.
    assert run(ActionExecutor(8, n_action_steps=3, latency_steps=2), 10) == [
        0, 1, 2, 3, 4, 302, 303, 304, 602, 603,
    ]  # fmt: skip


def test_latency_and_ensembling_together() -> None:
    m, horizon, latency = 0.3, 6, 2
    chunks = {t: torch.randn(horizon, 1, dtype=torch.float64) for t in range(20)}
    executor = ActionExecutor(horizon, temporal_ensemble_coeff=m, latency_steps=latency)
    for step in range(20):
        action = executor.select({"time": torch.tensor([step])}, lambda batch: chunks[int(batch["time"])][None])
        there = {made: chunk for made, chunk in chunks.items() if made == 0 or made + latency <= step}
        torch.testing.assert_close(action[0], ensemble_by_hand(there, step, m))


def test_a_chunk_computed_while_the_robot_moves_is_delivered_late() -> None:
    executor = ActionExecutor(6)
    executor.schedule(0, np.arange(6.0))
    first = [float(executor.next_action(0)) for _ in range(2)]
    executor.deliver(0, np.arange(6.0) + 100, elapsed_steps=2)
    assert first + [float(executor.next_action(0)) for _ in range(4)] == [0, 1, 102, 103, 104, 105]
    with pytest.raises(ValueError, match="slot 0 has no actions left"):
        executor.next_action(0)
    with pytest.raises(ValueError, match="nothing of it is left"):
        executor.deliver(0, np.arange(6.0), elapsed_steps=6)


def test_after_a_late_chunk_the_next_is_wanted_as_if_it_had_been_in_time() -> None:
    executor = ActionExecutor(6, n_action_steps=3)
    executor.schedule(0, np.arange(6.0))
    assert (executor.planned(0), executor.until_due(0)) == (6, 3)
    for _ in range(3):
        executor.next_action(0)
    assert (executor.planned(0), executor.until_due(0), executor.is_due(0)) == (3, 0, True)
    executor.next_action(0)
    executor.deliver(0, np.arange(6.0), elapsed_steps=1)
    assert (executor.planned(0), executor.until_due(0)) == (5, 2)
    executor.deliver(0, np.arange(6.0), elapsed_steps=5)
    assert (executor.planned(0), executor.until_due(0)) == (1, 0)


# ---- slots -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 6),
    m=st.sampled_from([None, 0.0, 0.5]),
    latency=st.integers(0, 2),
    ends=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_slots_are_independent_of_each_other(n: int, m: float | None, latency: int, ends: list[int]) -> None:
    def make() -> ActionExecutor:
        return ActionExecutor(8, n_action_steps=n, temporal_ensemble_coeff=m, latency_steps=latency)

    together, planner, steps = make(), Planner(8), 20
    clocks = [0] * len(ends)
    for _ in range(steps):
        actions = together.select({"time": torch.tensor(clocks, dtype=torch.float32)}, planner)
        for slot, length in enumerate(ends):
            expected = run(make(), clocks[slot] + 1)[-1]
            assert float(actions[slot]) == pytest.approx(expected)
            clocks[slot] += 1
            if clocks[slot] == length:  # the episode in this slot ends, the others go on
                together.reset([slot])
                clocks[slot] = 0


def test_rows_may_be_any_slots() -> None:
    executor, planner = ActionExecutor(3), Planner(3)
    executor.select({"time": torch.tensor([0.0, 1.0, 2.0])}, planner)
    action = executor.select({"time": torch.tensor([9.0, 9.0])}, planner, slots=[2, 0])
    assert action.flatten().tolist() == [201, 1]
    assert executor.is_due(7) and not executor.is_due(1)
    with pytest.raises(ValueError, match="2 rows of observations came for 1 slots"):
        executor.select({"time": torch.tensor([9.0, 9.0])}, planner, slots=[0])


def test_only_slots_that_want_a_chunk_are_predicted() -> None:
    sizes: list[int] = []

    def predict(batch: dict[str, Tensor]) -> Tensor:
        sizes.append(len(batch["time"]))
        return torch.zeros(len(batch["time"]), 4, 1)

    executor = ActionExecutor(4)
    for step in range(4):
        if step == 2:
            executor.reset([1])
        executor.select({"time": torch.zeros(3)}, predict)
    assert sizes == [3, 1]


def test_actions_may_have_any_shape() -> None:
    executor = ActionExecutor(2)
    assert executor.select({"x": torch.zeros(3, 1)}, lambda _: torch.zeros(3, 2, dtype=torch.long)).shape == (3,)
    executor.reset()
    assert executor.select({"x": torch.zeros(3, 1)}, lambda _: torch.zeros(3, 2, 4, 5)).shape == (3, 4, 5)


# ---- history ---------------------------------------------------------------------------------------------------------


def test_history_reaches_back_in_time_and_starts_with_the_first_observation() -> None:
    seen: list[list[float]] = []

    def predict(batch: dict[str, Tensor]) -> Tensor:
        seen.extend(batch["time"].tolist())
        return torch.zeros(len(batch["time"]), 1, 1)

    executor = ActionExecutor(1, observation_steps=[-3, -1, 0])
    for step in range(5):
        executor.select({"time": torch.tensor([float(step)])}, predict)
    assert seen == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [0, 2, 3], [1, 3, 4]]
    executor.reset([0])
    executor.select({"time": torch.tensor([50.0])}, predict)
    assert seen[-1] == [50, 50, 50]


def test_history_is_kept_while_a_chunk_is_executed() -> None:
    seen: list[list[float]] = []

    def predict(batch: dict[str, Tensor]) -> Tensor:
        seen.extend(batch["time"].tolist())
        return torch.zeros(len(batch["time"]), 3, 1)

    executor = ActionExecutor(3, observation_steps=[-1, 0])
    for step in range(7):
        executor.select({"time": torch.tensor([float(step)])}, predict)
    assert seen == [[0, 0], [2, 3], [5, 6]]


def test_without_history_there_is_no_window() -> None:
    executor = ActionExecutor(1)
    executor.observe(0, {"time": torch.zeros(1)})
    with pytest.raises(ValueError, match="no history"):
        executor.window(0)


@pytest.mark.parametrize(
    "options",
    [{"n_action_steps": 0}, {"n_action_steps": 6}, {"n_action_steps": 4, "latency_steps": 2}, {"latency_steps": 5}],
)
def test_more_than_a_chunk_holds_cannot_be_executed(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="between 1 and the 5 actions of a chunk"):
        ActionExecutor(5, **options)  # type: ignore[arg-type]


def test_other_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="latency_steps must not be negative"):
        ActionExecutor(5, latency_steps=-1)
    for steps in ([], [0, 1]):
        with pytest.raises(ConfigError, match="into the past"):
            ActionExecutor(5, observation_steps=steps)
