"""A pool: ready by size or by finished batch, one by one or in groups, the same on any number of ranks, and resumed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etude.errors import ConfigError, DataError, RolloutError
from etude.rollouts.pool import TrajectoryPool
from etude.rollouts.tasks import Task
from etude.rollouts.text import TextRollouts
from etude.types.protocols import Place
from etude.types.trajectory import Trajectory


def one(name: str, **fields: Any) -> Trajectory:
    return Trajectory([1, 2], [0, 1], 1.0, name=name, **fields)


def names(trajectories: list[Trajectory]) -> str:
    return "".join(trajectory.name for trajectory in trajectories)


def fill(pool: TrajectoryPool, text: str) -> TrajectoryPool:
    """Put a trajectory for each letter; capitals are of the group of their small letter."""
    for letter in text:
        assert pool.put_trajectory(one(letter, group_id=letter.lower(), task_id=letter.lower() in "ab")) == "success"
    return pool


def test_by_size_exactly_a_batch_is_taken_and_the_rest_waits() -> None:
    pool = fill(TrajectoryPool(3), "ab")
    assert not pool.is_ready() and pool.get_trajectories() == []
    fill(pool, "cdefgh")
    assert [names(pool.get_trajectories()) for _ in range(3)] == ["abc", "def", ""]
    assert len(pool) == 2


def test_by_finished_batch_all_that_is_whole_is_taken() -> None:
    pool = fill(TrajectoryPool(3, ready="loaded_batch_finished"), "ab")
    assert pool.get_trajectories() == [] and not pool.is_ready()
    assert pool.is_ready(finished=True) and names(pool.get_trajectories(finished=True)) == "ab"
    assert not pool.is_ready(finished=True)
    both = fill(TrajectoryPool(3, ready="batch_size_reached_and_loaded_batch_finished"), "ab")
    assert not both.is_ready(finished=True)
    fill(both, "cd")
    assert not both.is_ready() and names(both.get_trajectories(finished=True)) == "abcd"


def test_groups_are_taken_whole_and_unfinished_ones_wait() -> None:
    pool = fill(TrajectoryPool(4, group_size=2, key_list=["group_id"]), "abcB")
    assert not pool.is_ready()
    fill(pool, "CdDA")
    assert names(pool.get_trajectories()) == "aAbB"
    assert not pool.is_ready() or names(pool.get_trajectories()) == "cCdD"
    fill(pool, "e")
    pool.close_groups([one("e", group_id="e")])
    fill(pool, "xyX")
    assert names(pool.get_trajectories()) == ""  # 3 of 4
    assert names(fill(pool, "zZ").get_trajectories()) == "exXzZ"


def test_groups_of_groups_come_side_by_side() -> None:
    pool = fill(TrajectoryPool(8, group_size=2, key_list=["task_id", "group_id"]), "aAcCbBdD")
    assert names(pool.get_trajectories()) == "aAbBcCdD"


@pytest.mark.parametrize("keys", [(), ("group_id",)])
def test_ranks_together_take_what_one_process_would(keys: tuple[str, ...]) -> None:
    def pool() -> TrajectoryPool:
        return TrajectoryPool(4, group_size=2 if keys else 1, key_list=keys)

    alone, shared = pool(), [pool(), pool()]
    for number, letter in enumerate("aAbBcCdD"):
        order = (number // 2, number)
        for own in (alone, shared[number // 2 % 2]):
            own.put_trajectory(one(letter, group_id=letter.lower()), order)
    sent: list[Any] = []
    for own in shared:
        own.gather = lambda value: sent.append(value) or []  # type: ignore[func-returns-value]
        assert own.get_trajectories() == []
    for own in shared:
        own.gather = lambda value: sent
    found = [names(own.get_trajectories()) for own in shared]
    assert names(alone.get_trajectories()) == "aAbB" and found == ["aA", "bB"]


def test_what_waits_survives_as_plain_values_for_any_number_of_ranks() -> None:
    task = Task("p", "a", "7", {"level": [1, 2]}, ({"role": "user", "content": "p"},))
    pool = TrajectoryPool(4, group_size=2, key_list=["group_id"])
    for number, group in enumerate("01120"):
        pool.put_trajectory(one(str(number), group_id=group, task=task, logprobs=[0.0, -0.1 - 1e-17]), (number,))
    pool.close_groups([one("x", group_id="2")])
    state = json.loads(json.dumps(pool.state_dict()))
    again = TrajectoryPool(4, group_size=2, key_list=["group_id"])
    again.load_state_dict(state)
    assert again.state_dict() == pool.state_dict()
    assert again.get_trajectories() == pool.get_trajectories() and len(pool) == 1
    halves = [TrajectoryPool(4, group_size=2, key_list=["group_id"]) for _ in range(2)]
    for rank, half in enumerate(halves):
        half.load_state_dict(state, is_own=lambda t, rank=rank: int(t.group_id) % 2 == rank)  # type: ignore[misc]
    assert [len(half) for half in halves] == [3, 2]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 4, "ready": "soon"}, "ready by one of batch_size_reached"),
        ({"batch_size": 4, "group_size": 2}, "needs a key_list"),
        ({"batch_size": 4, "key_list": "group_id"}, "a list of names"),
        ({"batch_size": 4, "size": 2}, "pool: .*'size'"),
        ({"batch_size": 8, "group_size": 5, "key_list": ["group_id"]}, "a prompt has only 4 rollouts"),
    ],
)
def test_a_pool_that_makes_no_sense_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextRollouts("digits", group_size=4, pool=options)


def test_a_pool_of_ranks_needs_groups_that_stay_on_one() -> None:
    data = TextRollouts("digits", pool={"batch_size": 8, "group_size": 2, "key_list": ["task_id"]})
    data.open(Place())
    with pytest.raises(ConfigError, match="needs group_id among its key_list"):
        data.open(Place(world=2))
    with pytest.raises(DataError, match="groups by 'group_id', which a trajectory lacks"):
        TrajectoryPool(2, key_list=["group_id"]).put_trajectory(one("a"))


def make_trainer(pool: Any, **options: Any) -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")
    from etude import Trainer, TrainingConfiguration
    from etude.algorithms.grpo import GRPO
    from etude.policies.language import LanguageModel

    data = TextRollouts("digits", prompts_per_step=2, group_size=2, max_new_tokens=3, pool=pool, **options)
    config = TrainingConfiguration(training_steps=3, batch_size=8, log_every=1)
    return Trainer(
        LanguageModel.tiny(seed=0), data, GRPO(), config=config, run=False, loggers=[], show_progress=False
    )  # fmt: skip


def test_groups_of_a_task_fill_over_several_draws_and_its_epochs() -> None:
    """Two prompts, two rollouts each draw, groups of four: every second draw makes both whole."""
    pool = {"batch_size": 4, "group_size": 4, "key_list": ["task_id"], "ready": "loaded_batch_finished"}
    trainer = make_trainer(pool)
    trainer.data.tasks = trainer.data.tasks[0], trainer.data.tasks[1]
    trainer.fit()
    assert trainer.data._drawn == 6 and len(trainer.data.pool) == 0
    assert len(trainer.data.rollouts) == 8


def test_a_pool_that_does_not_fill_ends_the_run_with_the_reason() -> None:
    with pytest.raises(RolloutError, match=r"no batch of 4 after 16 draws for step 0; 64 rollouts wait in groups"):
        make_trainer({"batch_size": 4, "group_size": 100, "key_list": ["task_id"]}).fit()
