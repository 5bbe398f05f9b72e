"""Statistics of a whole batch are the same on any number of ranks: means, deviations, lengths and controllers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms import DPO, GRPO, PPO, RLOO, Distillation, DrGRPO, PolicyGradient, ReinforcePlusPlus
from etude.algorithms.advantages import reinforce_plus_plus
from etude.algorithms.kl import AdaptiveKLController
from etude.algorithms.masked import masked_whiten
from etude.algorithms.moments import Gather, Moments
from etude.rollouts.updates import as_updates, weightless
from etude.types.batch import Batch
from etude.types.protocols import Place
from tests.unit.algorithms.stand_in import Bigram, gradients, moved, rollouts


def on_ranks(work: Callable[[int, Gather], Any], world: int) -> list[Any]:
    """Run one thread a rank, which exchange values as ranks do: all together, in the order of ranks."""
    met = threading.Barrier(world, timeout=20)
    slots: list[Any] = [None] * world
    found: list[Any] = [None] * world

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            slots[rank] = value
            met.wait()
            everyone = copy.deepcopy(slots)
            met.wait()
            return everyone

        try:
            found[rank] = work(rank, gather)
        except BaseException:
            met.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not met.broken
    return found


def shares(batch: Batch, world: int) -> list[Batch]:
    """Deal whole groups to ranks in turn."""
    groups = batch["group_id"]
    order = list(dict.fromkeys(groups))
    return [batch.select([i for i, g in enumerate(groups) if order.index(g) % world == rank]) for rank in range(world)]


NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(values=NUMBERS, cuts=st.lists(st.integers(0, 12), max_size=2))
def test_moments_of_parts_merge_into_those_of_the_whole(values: list[float], cuts: list[int]) -> None:
    parts = np.split(np.array(values), sorted(cuts))
    found = Moments.merged(Moments.of(torch.tensor(part)) for part in parts)
    assert found.count == len(values)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-12, abs=1e-12)
    assert found.variance == pytest.approx(np.var(values), rel=1e-9, abs=1e-9)


def test_equal_numbers_have_no_variance_wherever_they_are_and_nothing_has_no_moments() -> None:
    third = torch.full((3,), 1 / 3)
    assert Moments.merged([Moments.of(third), Moments(), Moments.of(third[:1])]).squares == 0.0
    assert Moments.merged([]) == Moments.of(third, torch.zeros(3)) == Moments()
    assert Moments().variance == 0.0


@pytest.mark.parametrize("world", [2, 3])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), double=st.booleans())
def test_whitening_a_share_is_whitening_the_whole(world: int, seed: int, double: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind, close = (torch.float64, 1e-12) if double else (torch.float32, 1e-6)
    values = torch.randn(6, 5, generator=generator, dtype=kind) * 10
    mask = (torch.rand(6, 5, generator=generator) < 0.7).long()
    mask[: 6 // world] *= seed % 3 > 0  # now and then a rank has nothing that counts
    parts, masks = values.chunk(world), mask.chunk(world)
    found = on_ranks(lambda rank, gather: masked_whiten(parts[rank], masks[rank], gather=gather), world)
    np.testing.assert_allclose(torch.cat(found).numpy(), masked_whiten(values, mask).numpy(), atol=close, rtol=close)
    found = on_ranks(
        lambda rank, gather: reinforce_plus_plus(parts[rank], masks[rank], gamma=0.9, gather=gather)[0], world
    )
    whole, _ = reinforce_plus_plus(values, mask, gamma=0.9)
    np.testing.assert_allclose(torch.cat(found).numpy(), whole.numpy(), atol=close, rtol=close)
    lonely = torch.cat([masked_whiten(part, own) for part, own in zip(parts, masks, strict=True)])
    if seed % 3:
        assert (lonely - masked_whiten(values, mask)).abs().max() > 1e-3  # or there would be nothing to exchange


MAKERS: list[Callable[[], PolicyGradient]] = [
    ReinforcePlusPlus, lambda: ReinforcePlusPlus(gamma=0.9, group_baseline=True), PPO, lambda: PPO(whiten=False),
    GRPO, RLOO, DrGRPO, lambda: RLOO(kl_coef=0.1, kl_in="reward", kl_kind="k1", kl_target=0.01, kl_horizon=50.0),
    lambda: Distillation(teacher=Bigram(5), discount=0.5),
]  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: type(make()).__name__)
def test_an_experience_shared_by_ranks_gives_the_update_of_the_whole(
    make: Callable[[], PolicyGradient], world: int
) -> None:
    policy, batch = moved(Bigram()), rollouts(rows=12)
    alone = make()
    expected = gradients(alone, policy, alone.experience(policy, batch))
    parts = shares(batch, world)
    assert all(len(part) >= 3 for part in parts)
    algorithms = [make() for _ in range(world)]

    def work(rank: int, gather: Gather) -> Batch:
        algorithms[rank].gather = gather
        return algorithms[rank].experience(policy, parts[rank])

    prepared = on_ranks(work, world)
    found = [gradients(algorithm, policy, part) for algorithm, part in zip(algorithms, prepared, strict=True)]
    assert sum(one[1] for one in found) == expected[1]
    assert sum(one[0] for one in found) == pytest.approx(expected[0], abs=1e-12)
    for parameter, whole in enumerate(expected[2]):
        summed = sum(one[2][parameter] for one in found)
        np.testing.assert_allclose(summed.numpy(), whole.numpy(), atol=1e-12)
    for algorithm in algorithms:
        assert algorithm.controller.value == pytest.approx(alone.controller.value, rel=1e-12)
    if alone.kl_target is not None:
        assert isinstance(alone.controller, AdaptiveKLController) and alone.controller.value != 0.1


def test_a_rank_that_has_nothing_takes_part_and_weighs_nothing() -> None:
    policy, batch = moved(Bigram()), rollouts()
    for make in (ReinforcePlusPlus, PPO, GRPO):
        alone, algorithms = make(), [make(), make()]
        expected = gradients(alone, policy, alone.experience(policy, batch))

        def work(rank: int, gather: Gather, algorithms: Sequence[Any] = algorithms) -> Batch:
            algorithms[rank].gather = gather
            part = batch if rank == 0 else weightless(batch.select([0]))
            return algorithms[rank].experience(policy, part)

        found = [gradients(one, policy, part) for one, part in zip(algorithms, on_ranks(work, 2), strict=True)]
        assert found[1][:2] == (0.0, 0.0)
        np.testing.assert_allclose(found[0][2][0].numpy(), expected[2][0].numpy(), atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_an_update_holds_the_same_rows_on_any_number_of_ranks(world: int) -> None:
    batch = rollouts(rows=18)
    algorithm = GRPO(epochs=2, minibatches=4)

    def rows(share: Batch, gather: Gather) -> list[list[tuple[int, int]]]:
        updates = as_updates(share, algorithm, Place(batch_size=2), 7, gather)
        real = [[micro.select(~micro.is_padding) for micro in group] for group in updates]
        return [[name for m in group for name in zip(m["group_id"], m["run_id"], strict=True)] for group in real]

    (whole,) = on_ranks(lambda rank, gather: rows(batch, gather), 1)
    parts = shares(batch, world)
    found = on_ranks(lambda rank, gather: rows(parts[rank], gather), world)
    together = [sorted(name for rank in found for name in rank[number]) for number in range(8)]
    assert together == [sorted(names) for names in whole]
    assert {len(names) for names in together} == {4, 5}
    every = sorted(zip(batch["group_id"], batch["run_id"], strict=True))
    assert sorted(name for names in together[:4] for name in names) == every
    assert together[:4] != together[4:]


def test_evaluation_exchanges_nothing_and_moves_no_controller() -> None:
    def refuse(value: Any) -> list[Any]:
        raise AssertionError("ranks do not keep step in evaluation")

    algorithm = ReinforcePlusPlus(kl_coef=0.1, kl_in="reward", kl_target=0.01, kl_horizon=50.0)
    algorithm.gather = refuse
    policy = moved(Bigram())
    algorithm.prepare(policy.eval(), rollouts())
    assert algorithm.controller.value == 0.1
    with pytest.raises(AssertionError, match="keep step"):
        algorithm.prepare(policy.train(), rollouts())
    assert algorithm.gather is refuse


def test_a_rank_whose_rollouts_make_no_pair_goes_through_an_empty_update() -> None:
    policy, batch = moved(Bigram()), rollouts()
    batch.metadata["rewards"] = torch.ones(6)
    pairs = DPO().experience(policy, batch)
    ((micro,),) = as_updates(pairs, DPO(), Place(), 0, lambda value: [value])
    loss = DPO().loss(policy, micro)
    loss.total.backward()
    assert len(micro) == 0 and float(loss.weight) == float(loss.total.detach()) == 0.0
