"""Advantages against formulas written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms import advantages
from etude.algorithms.masked import masked_mean, masked_sum, masked_whiten
from tests.unit.algorithms.stand_in import assert_close

REWARDS = np.array([1.0, 2.0, 4.0, 0.5, 0.5, 3.0])
GROUPS = ["a", "b", "a", "b", "a", "c"]


def by_group(function: object) -> np.ndarray:
    """Apply a function (rewards of a group) -> advantages, group by group."""
    found = np.zeros_like(REWARDS)
    for group in set(GROUPS):
        rows = [i for i, name in enumerate(GROUPS) if name == group]
        found[rows] = function(REWARDS[rows]) if len(rows) > 1 else 0.0  # type: ignore[operator]
    return found


def tensor(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "found, expected",
    [
        (advantages.grpo(tensor(REWARDS), GROUPS), by_group(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6))),
        (
            advantages.grpo(tensor(REWARDS), GROUPS, std="population", eps=0.1),
            by_group(lambda r: (r - r.mean()) / (r.std() + 0.1)),
        ),
        (advantages.dr_grpo(tensor(REWARDS), GROUPS), by_group(lambda r: r - r.mean())),
        (
            advantages.rloo(tensor(REWARDS), GROUPS),
            by_group(lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])),
        ),
    ],
    ids=["grpo", "grpo-population", "dr_grpo", "rloo"],
)
def test_group_baselines(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


def test_opo_weighs_the_baseline_by_length() -> None:
    lengths = np.array([3, 1, 5, 2, 2, 7])
    expected = np.zeros(6)
    for group in "ab":
        rows = [i for i, name in enumerate(GROUPS) if name == group]
        expected[rows] = REWARDS[rows] - (lengths[rows] * REWARDS[rows]).sum() / lengths[rows].sum()
    found = advantages.opo(tensor(REWARDS), torch.as_tensor(lengths), GROUPS)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    none = advantages.opo(tensor([1.0, 2.0]), torch.zeros(2), [0, 0])  # nothing was written: nothing to weigh by
    assert none.isfinite().all()


def test_remax_compares_with_the_greedy_completion() -> None:
    assert advantages.remax(tensor([1.0, 3.0]), tensor([2.0, 1.0])).tolist() == [-1.0, 2.0]


@pytest.mark.parametrize(
    "rewards, std, expected",
    [
        ([1, 2], "unbiased", [-0.7071058, 0.7071058]),
        ([1, 2], "population", [-0.999998, 0.999998]),
        ([0, 0, 1, 1], "unbiased", [-0.8660239, -0.8660239, 0.8660239, 0.8660239]),
        ([0, 0, 1, 1], "population", [-0.999998, -0.999998, 0.999998, 0.999998]),
        ([1, 0, 0, 0], "unbiased", [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 0, 0, 0], "population", [1.732047, -0.577349, -0.577349, -0.577349]),
    ],
)
def test_grpo_on_known_groups(rewards: list[float], std: advantages.Std, expected: list[float]) -> None:
    found = advantages.grpo(torch.tensor(rewards, dtype=torch.float32), [0] * len(rewards), std=std)
    assert found.tolist() == pytest.approx(expected, abs=2e-6)


def test_a_group_of_one_gets_nothing_or_its_reward() -> None:
    alone = torch.tensor([0.7])
    for function in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        assert function(alone, ["a"]).tolist() == [0.0]
    assert advantages.grpo(alone, ["a"], single="raw").item() == pytest.approx(0.6999993, abs=1e-7)
    assert advantages.dr_grpo(alone, ["a"], single="raw").item() == pytest.approx(0.7)
    assert advantages.rloo(alone, ["a"], single="raw").item() == pytest.approx(0.7)


def test_an_empty_batch_gives_nothing() -> None:
    empty = torch.zeros(0)
    assert advantages.grpo(empty, []).shape == (0,)
    assert advantages.grpo(empty, [], run_ids=[]).shape == (0,)
    assert advantages.rloo(empty, []).shape == advantages.opo(empty, empty, []).shape == (0,)
    nothing = torch.zeros(0, 3)
    assert advantages.gae(nothing, nothing, nothing)[0].shape == (0, 3)
    assert advantages.token_rewards(torch.zeros(2), torch.zeros(2, 0)).shape == (2, 0)
    with pytest.raises(ValueError, match="2 group ids for 1 rewards"):
        advantages.grpo(torch.zeros(1), ["a", "b"])


@settings(max_examples=30, deadline=None)
@given(value=st.floats(-1e3, 1e3, width=32), count=st.integers(2, 9))
def test_equal_rewards_give_exactly_nothing(value: float, count: int) -> None:
    rewards = torch.full((count,), value)
    for function in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        assert function(rewards, [0] * count).tolist() == [0.0] * count
    assert advantages.opo(rewards, torch.arange(1, count + 1), [0] * count).abs().max() == 0
    assert advantages.grpo(rewards, [0] * count, run_ids=[i // 2 for i in range(count)]).abs().max() == 0


def test_runs_of_many_turns_weigh_no_more_than_others() -> None:
    rewards, runs = torch.tensor([1.0, 1.0, 1.0, 0.0]), [0, 0, 0, 1]
    found = advantages.grpo(rewards, ["p"] * 4, run_ids=runs)
    assert found.tolist() == pytest.approx([0.7071058] * 3 + [-0.7071058], abs=1e-6)
    # The same run ids under two prompts are different runs.
    both = advantages.grpo(torch.cat((rewards, rewards)), ["p"] * 4 + ["q"] * 4, run_ids=runs + runs)
    assert both.tolist() == pytest.approx(found.tolist() * 2)
    single_run = torch.tensor([1.0, 3.0])
    assert advantages.grpo(single_run, ["p", "p"], run_ids=[0, 0]).tolist() == [0.0, 0.0]
    raw = advantages.grpo(single_run, ["p", "p"], run_ids=[0, 0], single="raw")
    assert raw.tolist() == pytest.approx([-1.0, 1.0], abs=1e-5)


def test_tensors_may_name_the_groups() -> None:
    found = advantages.grpo(torch.tensor([1.0, 2.0, 1.5, 2.5]), torch.tensor([0, 0, 1, 1]))
    assert found.tolist() == pytest.approx([-0.7071058, 0.7071058] * 2, abs=1e-6)


_rewards = st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=2, max_size=8)


@settings(max_examples=20, deadline=None)
@given(rewards=_rewards, shift=st.integers(-8, 8), seed=st.integers(0, 99))
def test_shifts_and_permutations_change_nothing(rewards: list[float], shift: int, seed: int) -> None:
    values, groups = tensor(rewards), [i % 2 for i in range(len(rewards))]
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    lengths = torch.arange(1, len(rewards) + 1)
    turned, turned_groups = values[order], [groups[i] for i in order]
    for function in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        plain = function(values, groups)
        assert_close(function(values + shift, groups), plain, rtol=1e-9, atol=1e-9)
        assert_close(function(turned, turned_groups), plain[order], rtol=1e-9, atol=1e-9)
    plain = advantages.opo(values, lengths, groups)
    assert_close(advantages.opo(values + shift, lengths, groups), plain, rtol=1e-9, atol=1e-9)
    found = advantages.opo(turned, lengths[order], turned_groups)
    assert_close(found, plain[order], rtol=1e-9, atol=1e-9)


# ---- by token --------------------------------------------------------------------------------------------------------

MASK = np.array([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
STEPS = np.linspace(-1, 2, 18).reshape(3, 6)
VALUES = np.cos(np.arange(18.0)).reshape(3, 6)


def test_the_reward_stands_on_the_last_token_that_counts() -> None:
    found = advantages.token_rewards(torch.tensor([2.0, 3.0, 4.0]), torch.as_tensor(MASK))
    expected = np.zeros((3, 6))
    expected[0, 4], expected[1, 5] = 2, 3
    np.testing.assert_array_equal(found.numpy(), expected)
    spread = advantages.spread(torch.tensor([2.0, 3.0, 4.0]), torch.as_tensor(MASK))
    np.testing.assert_array_equal(spread.numpy(), MASK * np.array([[2.0], [3.0], [4.0]]))


@pytest.mark.parametrize("bootstrap", [None, [0.5, -1.0, 2.0]])
def test_gae_is_the_discounted_sum_of_errors_over_the_steps_that_count(bootstrap: list[float] | None) -> None:
    gamma, lam = 0.9, 0.8
    advantage, target = np.zeros((3, 6)), np.zeros((3, 6))
    for row in range(3):
        steps = np.flatnonzero(MASK[row])
        last = 0.0 if bootstrap is None else bootstrap[row]
        values = [*VALUES[row, steps], last]
        errors = [STEPS[row, t] + gamma * values[k + 1] - values[k] for k, t in enumerate(steps)]
        for k, t in enumerate(steps):
            advantage[row, t] = sum((gamma * lam) ** (j - k) * errors[j] for j in range(k, len(steps)))
            target[row, t] = advantage[row, t] + values[k]
    dirty = np.where(MASK == 1, 1.0, np.nan)
    found, returns = advantages.gae(
        tensor(STEPS * dirty), tensor(VALUES * dirty), torch.as_tensor(MASK), gamma=gamma, lam=lam,
        bootstrap_B=None if bootstrap is None else tensor(bootstrap),
    )  # fmt: skip
    np.testing.assert_allclose(found.numpy(), advantage, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), target, atol=1e-12)


def test_gae_ends_episodes_within_a_row() -> None:
    rewards, values = tensor([[1.0, 2.0, 3.0, 4.0]]), tensor([[0.1, 0.2, 0.3, 0.4]])
    done = torch.tensor([[0, 1, 0, 0]])
    found, _ = advantages.gae(rewards, values, torch.ones(1, 4), gamma=0.9, lam=0.8, done_BT=done)
    first, _ = advantages.gae(rewards[:, :2], values[:, :2], torch.ones(1, 2), gamma=0.9, lam=0.8)
    second, _ = advantages.gae(rewards[:, 2:], values[:, 2:], torch.ones(1, 2), gamma=0.9, lam=0.8)
    assert_close(found, torch.cat((first, second), 1))


def test_gae_at_its_ends_is_one_step_and_the_whole_return() -> None:
    mask, rewards, values = torch.ones(3, 6), tensor(STEPS), tensor(VALUES)
    whole, _ = advantages.gae(rewards, values, mask, gamma=0.9, lam=1.0)
    assert_close(whole, advantages.discounted_returns(rewards, mask, gamma=0.9) - values)
    step, _ = advantages.gae(rewards, values, mask, gamma=0.9, lam=0.0)
    following = torch.cat((values[:, 1:], torch.zeros(3, 1)), 1)
    assert_close(step, rewards + 0.9 * following - values)


def n_step_by_hand(rewards: list[float], n: int, gamma: float) -> list[float]:
    returns = []
    for i in range(len(rewards)):
        n_step_return = 0.0
        for j in range(min(n, len(rewards) - i)):
            n_step_return += (gamma**j) * rewards[i + j]
        returns.append(n_step_return)
    return returns


@pytest.mark.parametrize("n", [1, 2, 3, 6, 9])
def test_n_step_returns_look_n_steps_ahead(n: int) -> None:
    expected = np.zeros((3, 6))
    for row in range(3):
        steps = np.flatnonzero(MASK[row])
        expected[row, steps] = n_step_by_hand(list(STEPS[row, steps]), n, 0.9)
    dirty = tensor(np.where(MASK == 1, STEPS, np.nan))
    found = advantages.n_step_returns(dirty, torch.as_tensor(MASK), n=n, gamma=0.9)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    one_row = advantages.n_step_returns(tensor(STEPS[1]), n=n, gamma=0.9)
    np.testing.assert_allclose(one_row.numpy(), expected[1], atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_step_returns_end_in_a_value(n: int) -> None:
    expected = np.zeros((3, 6))
    last = [0.5, -1.0, 2.0]
    for row in range(3):
        steps = np.flatnonzero(MASK[row])
        values = [*VALUES[row, steps], last[row]]
        for k, t in enumerate(steps):
            end = min(k + n, len(steps))
            expected[row, t] = sum(0.9 ** (j - k) * STEPS[row, steps[j]] for j in range(k, end))
            expected[row, t] += 0.9 ** (end - k) * values[end]
    found = advantages.n_step_returns(
        tensor(STEPS), torch.as_tensor(MASK), n=n, gamma=0.9, values_BT=tensor(VALUES), bootstrap_B=tensor(last)
    )
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_discounted_returns() -> None:
    assert advantages.discounted_returns(torch.tensor([[1.0, 2.0, 3.0]]), gamma=0.5).tolist() == [[2.75, 3.5, 3.0]]
    assert advantages.discounted_returns(torch.tensor([1.0, 2.0, 3.0]), gamma=0.0).tolist() == [1.0, 2.0, 3.0]


def test_reinforce_plus_plus_normalises_over_all_tokens_at_once() -> None:
    counts = MASK == 1
    returns = np.zeros((3, 6))
    for row in range(3):
        steps = np.flatnonzero(counts[row])
        returns[row, steps] = n_step_by_hand(list(STEPS[row, steps]), 6, 0.9)
    flat = returns[counts]
    expected = np.where(counts, (returns - flat.mean()) / np.sqrt(flat.var() + 1e-8), 0.0)
    found, raw = advantages.reinforce_plus_plus(tensor(STEPS), torch.as_tensor(MASK), gamma=0.9)
    np.testing.assert_allclose(raw.numpy(), returns, atol=1e-12)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-10)


def test_masked_means_and_whitening() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, torch.nan], [5.0, 6.0, torch.inf, torch.nan]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    assert masked_mean(values, mask, 1).tolist() == [2.0, 5.5]
    assert masked_mean(values, mask).item() == pytest.approx(17 / 5)
    assert masked_sum(values, mask, 1).tolist() == [6.0, 11.0]
    assert masked_mean(values, torch.zeros(2, 4)).item() == 0.0
    white = masked_whiten(values, mask)
    assert abs(float(white[mask == 1].mean())) < 1e-6 and float(white[mask == 1].std(correction=0)) == pytest.approx(1)
    assert float(white[mask == 0].abs().max()) == 0.0
    assert masked_whiten(torch.full((7,), 0.1), torch.ones(7)).tolist() == [0.0] * 7
    assert masked_whiten(values, torch.zeros(2, 4)).tolist() == [[0.0] * 4] * 2
    scaled = masked_whiten(values, mask, shift_mean=False)
    assert_close(scaled[0, :3] / scaled[0, 0], values[0, :3])
