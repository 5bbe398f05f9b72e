"""Trajectory and Batch: one value under several names, rows that follow each other, padding that weighs nothing."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.device import to_device
from etude.data.padding import compute_position_id_with_mask, padding_data
from etude.errors import DataError
from etude.types import Batch, Trajectory, Updates, batch_length, create_dummy_batch


def rollout(tokens: list[int], sampled: int, reward: float = 0.0, **extra: object) -> Trajectory:
    return Trajectory(tokens, [0] * (len(tokens) - sampled) + [1] * sampled, reward, **extra)


# ---- trajectories ----------------------------------------------------------------------------------------------------


def test_attribute_item_and_extra_field_are_one_value() -> None:
    trajectory = Trajectory([1, 2], [0, 1], 0.5, extra_fields={"run_id": "a"}, group_id=7)
    assert (trajectory.run_id, trajectory["run_id"], trajectory.extra_fields["group_id"]) == ("a", "a", 7)
    trajectory.advantage = 2.0
    assert trajectory["advantage"] == trajectory.extra_fields["advantage"] == trajectory.get("advantage") == 2.0
    trajectory["advantage"] = 3.0
    assert trajectory.advantage == 3.0
    trajectory.extra_fields["advantage"] = 4.0
    assert trajectory.advantage == trajectory["advantage"] == 4.0
    del trajectory.advantage
    assert "advantage" not in trajectory and trajectory.advantage is None
    trajectory["reward"] = 1.5
    assert trajectory.reward == 1.5 and "reward" not in trajectory.extra_fields


def test_a_trajectory_reads_like_a_dictionary() -> None:
    trajectory = Trajectory([1], [1], 0.5, run_id="a")
    assert trajectory.keys() == ["tokens", "loss_mask", "reward", "is_val", "run_id"]
    assert dict(trajectory.items())["run_id"] == "a"
    assert "tokens" in trajectory and "group_id" not in trajectory
    assert trajectory.get("group_id", "default") == "default"
    with pytest.raises(KeyError, match="no field 'group_id'; it has tokens"):
        trajectory["group_id"]
    with pytest.raises(AttributeError, match="no field 'group_id'"):
        _ = trajectory.group_id
    with pytest.raises(ValueError, match="'reward' is given to a Trajectory twice"):
        Trajectory(extra_fields={"reward": 1.0})


def test_trajectories_copy_and_compare() -> None:
    trajectory = Trajectory([1], [1], 0.5, run_id=["a"], frame=torch.ones(2))
    other = copy.deepcopy(trajectory)
    assert other == trajectory
    other.run_id.append("b")
    assert other != trajectory and trajectory.run_id == ["a"]
    assert "reward=0.5" in repr(trajectory)


# ---- two faces of a batch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[1, 0.5], torch.tensor([1.0, 0.5]), (1, 0.5)])
@pytest.mark.parametrize("side, name", [("values", "reward"), ("metadata", "reward"), ("metadata", "rewards")])
def test_rewards_are_a_tensor_however_they_come(given: object, side: str, name: str) -> None:
    batch = Batch(
        **{"values": {"x": torch.zeros(2)}}
        | {side: {name: given} | ({"x": torch.zeros(2)} if side == "values" else {})}
    )
    rewards = batch.metadata["rewards"]
    assert rewards.tolist() == [1.0, 0.5] and rewards.dtype == torch.float32
    assert batch.values["reward"] is rewards and batch["rewards"] is rewards
    assert (float(torch.mean(rewards)), len(rewards), [float(r) for r in rewards]) == (0.75, 2, [1.0, 0.5])


def test_advantages_of_rows_and_of_tokens_stay_in_step() -> None:
    batch = create_dummy_batch(2, 4)
    mask = batch.values["loss_mask"]
    batch.metadata["advantages"] = [reward * 0.5 for reward in batch.metadata["rewards"]]
    expected = batch.metadata["rewards"][:, None] * 0.5 * mask
    assert torch.equal(batch.values["advantages"], expected)
    assert batch.metadata["advantages"].shape == (2,)
    batch.values["advantages"] = batch.values["advantages"] * 2
    assert torch.allclose(batch.metadata["advantages"], batch.metadata["rewards"])
    batch.values["advantages"] = torch.tensor([3.0, 4.0])  # by row, from this side
    assert torch.equal(batch.values["advantages"], torch.tensor([[3.0], [4.0]]) * mask)
    batch.values["loss_mask"] = torch.ones(2, 4)
    assert batch.values["advantages"].tolist() == [[3.0] * 4, [4.0] * 4]
    del batch.metadata["advantages"]
    assert "advantages" not in batch
    with pytest.raises(ValueError, match="3 numbers for a batch of 2 rows"):
        batch.metadata["advantages"] = [1.0, 2.0, 3.0]


def test_token_advantages_read_per_row_as_their_mean_over_the_mask() -> None:
    batch = Batch({"loss_mask": torch.tensor([[0, 1, 1], [0, 0, 0]])})
    batch.values["advantages"] = torch.tensor([[torch.nan, 1.0, 2.0], [5.0, 5.0, 5.0]])
    assert batch.metadata["advantages"].tolist() == [1.5, 0.0]


def test_log_probs_have_old_and_new_names() -> None:
    batch = Batch({"ref_log_prob": torch.ones(1, 2), "old_log_prob": torch.zeros(1, 2)})
    assert torch.equal(batch.values["ref_log_probs"], torch.ones(1, 2))
    assert torch.equal(batch.values["log_probs"], batch.values["old_log_probs"])
    batch.values["log_probs"] = torch.full((1, 2), -1.0)  # present ones never overwrite those of the sampler
    assert float(batch.values["old_log_probs"].sum()) == 0.0
    assert list(batch.values) == ["ref_log_probs", "old_log_probs", "log_probs"]


def test_custom_fields_live_and_bad_ones_are_refused() -> None:
    batch = create_dummy_batch()
    batch.values["my_custom_field"] = torch.zeros(len(batch))
    assert "my_custom_field" in batch.values and "my_custom_field" in batch
    with pytest.raises(ValueError, match="one length"):
        batch.values["wrong"] = torch.zeros(len(batch) + 1)
    with pytest.raises(ValueError, match=r"values\['text'\] must be a tensor"):
        batch.values["text"] = ["a"] * len(batch)
    with pytest.raises(ValueError, match="keep it in metadata"):
        batch.values["one"] = torch.tensor(1.0)
    with pytest.raises(KeyError, match=r"no values\['nothing'\]; it has input_ids"):
        batch.values["nothing"]
    assert batch.metadata["batch_size"] == 4
    with pytest.raises(ValueError, match="4 rows"):
        batch.metadata["batch_size"] = 3


def test_a_missing_required_field_is_named() -> None:
    batch = create_dummy_batch().require()
    del batch.values["position_ids"]
    with pytest.raises(DataError, match="lacks the required field 'position_ids'; it has input_ids"):
        batch.require()
    with pytest.raises(DataError, match="'advantages'"):
        batch.require("loss_mask", "advantages")


def test_a_batch_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        batch = create_dummy_batch()
        batch.values["x"], batch.metadata["y"] = torch.zeros(4), 1
        alive = weakref.ref(batch)
        del batch
        assert alive() is None
    finally:
        gc.enable()


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_follow_each_other() -> None:
    batch = Batch(
        {"x": torch.arange(3)}, {"rewards": [0.0, 1.0, 2.0], "group_id": ["a", "b", "c"], "constant": (1, 2, 3)}
    )
    turned = batch.reorder([2, 0, 1])
    assert turned["x"].tolist() == [2, 0, 1] and turned["rewards"].tolist() == [2.0, 0.0, 1.0]
    assert turned["group_id"] == ["c", "a", "b"] and turned["constant"] == (1, 2, 3)
    assert batch["x"].tolist() == [0, 1, 2]
    for wrong in ([0, 1], [0, 0, 1], [0, 1, 3]):
        with pytest.raises(ValueError, match="do not reorder 3 rows"):
            batch.reorder(wrong)
    assert batch.select(torch.tensor([False, True, True]))["group_id"] == ["b", "c"]
    assert batch.select(slice(1, 2))["group_id"] == ["b"] and len(batch.select([])) == 0
    assert [part["x"].tolist() for part in batch.split(2)] == [[0, 1], [2]]
    assert torch.equal(Batch.concatenate(batch.split(2))["rewards"], batch["rewards"])


def test_a_copy_is_isolated() -> None:
    batch = create_dummy_batch()
    other = batch.copy()
    other.metadata["group_id"], other.metadata["new"] = None, 1
    other.values["new"] = torch.zeros(4)
    assert "new" not in batch and batch.metadata["group_id"] == [0, 0, 1, 1]
    everything = batch.to_dict()
    assert {"input_ids", "rewards", "group_id"} <= set(everything)
    assert Batch.of(everything)["rewards"].tolist() == batch["rewards"].tolist()
    assert Batch.of(batch) is batch


def test_devices_and_lengths_know_batches() -> None:
    batch = create_dummy_batch(3)
    assert batch_length(batch) == 3
    moved = to_device(batch, "meta")
    assert moved["input_ids"].device.type == moved["rewards"].device.type == "meta"
    assert moved["group_id"] == batch["group_id"]


def test_padding_to_a_world_adds_rows_that_weigh_nothing() -> None:
    batch = create_dummy_batch(2)
    batch.metadata["advantages"] = [1.0, -1.0]
    padded = batch.pad_to_world_size(8)
    assert len(padded) == 8 and padded.is_padding.tolist() == [False] * 2 + [True] * 6
    assert float(padded["loss_mask"][2:].sum()) == float(padded["rewards"][2:].abs().sum()) == 0.0
    assert float(padded.values["advantages"][2:].abs().sum()) == 0.0
    assert len(set(padded["group_id"])) == 7 and padded["group_id"][:2] == [0, 0]
    assert padded["attention_mask"][2:].any(1).all()  # any policy can compute them
    assert torch.equal(padded.select([0, 1])["loss_mask"], batch["loss_mask"]) and batch["loss_mask"].any(1).all()
    assert padded.to_trajectories() == batch.to_trajectories()
    assert batch.pad_to_world_size(2) is batch and len(Batch().pad_to_world_size(4)) == 0


def test_updates_are_groups_of_micro_batches() -> None:
    updates = Updates([[1, 2], [3]])
    assert len(updates) == 2 and list(updates) == [[1, 2], [3]] and updates[0] == [1, 2]


# ---- columns ---------------------------------------------------------------------------------------------------------


def test_common_padding_is_cut_by_id() -> None:
    left = Batch({"input_ids": torch.tensor([[0, 0, 1, 2, 3], [0, 0, 4, 5, 6]]), "y": torch.zeros(2, 5, 3)})
    cut = Batch.remove_redundant_left_padding(left, pad_token_id=0)
    assert cut["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]] and cut["y"].shape == (2, 3, 3)
    right = Batch({"input_ids": torch.tensor([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]])})
    cut = Batch.remove_redundant_right_padding(right, pad_token_id=0)
    assert cut["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]


def test_a_real_end_token_that_doubles_as_padding_is_kept() -> None:
    ids = torch.tensor([[5, 6, 2, 2, 2], [7, 2, 2, 2, 2]])  # 2 ends a text and pads
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    cut = Batch.remove_redundant_right_padding(Batch({"input_ids": ids, "attention_mask": mask}), pad_token_id=2)
    assert cut["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    flipped = Batch({"input_ids": ids.flip(1), "attention_mask": mask.flip(1)})
    assert Batch.remove_redundant_left_padding(flipped)["input_ids"].tolist() == [[2, 6, 5], [2, 2, 7]]


@pytest.mark.parametrize("threshold, width", [(-1, 2), (0, 4), (1, 3), (9, 2)])
def test_the_threshold_is_the_most_that_is_cut(threshold: int, width: int) -> None:
    right = Batch({"input_ids": torch.tensor([[1, 2, 0, 0]])})
    left = Batch({"input_ids": torch.tensor([[0, 0, 1, 2]])})
    for cut in (
        Batch.remove_redundant_right_padding(right, 0, max_strip_threshold=threshold),
        Batch.remove_redundant_left_padding(left, 0, max_strip_threshold=threshold),
    ):
        assert cut["input_ids"].shape == (1, width)


def test_what_is_aligned_to_the_tokens_is_cut_with_them() -> None:
    ids, mask = torch.tensor([[0, 0, 7, 8]]), torch.tensor([[0, 0, 1, 1]])
    batch = Batch({"input_ids": ids, "attention_mask": mask, "loss_mask": mask, "old_log_probs": -mask.float()})
    batch.values["other"] = torch.zeros(1, 4)
    cut = Batch.remove_redundant_left_padding(
        batch, pad_token_id=0, anchor_field="input_ids", fields=["input_ids", "attention_mask", "missing"]
    )
    widths = {name: value.shape[1] for name, value in cut.values.items()}
    assert widths == {"input_ids": 2, "attention_mask": 2, "loss_mask": 2, "old_log_probs": 2, "other": 4}
    assert batch["input_ids"].shape == (1, 4)


def test_nothing_to_cut_gives_the_batch_itself() -> None:
    plain = Batch({"input_ids": torch.tensor([[1, 2]])})
    assert Batch.remove_redundant_left_padding(plain, 0) is plain
    assert Batch.remove_redundant_left_padding(plain, 0, anchor_field="missing") is plain
    empty = Batch({"input_ids": torch.zeros(0, 3)})
    assert Batch.remove_redundant_right_padding(empty, 0) is empty
    all_padding = Batch({"input_ids": torch.zeros(2, 3), "attention_mask": torch.zeros(2, 3)})
    assert Batch.remove_redundant_right_padding(all_padding)["input_ids"].shape == (2, 1)
    with pytest.raises(ValueError, match="give pad_token_id"):
        Batch.remove_redundant_left_padding(plain)


def test_batches_and_bare_ids_are_padded_to_a_length() -> None:
    ids = torch.tensor([[1, 2, 3]])
    assert padding_data(ids, 5, 9).tolist() == [[1, 2, 3, 9, 9]]
    assert padding_data(ids, 5, 9, left_pad=True).tolist() == [[9, 9, 1, 2, 3]]
    assert padding_data(ids, 2, truncation="left").tolist() == [[2, 3]]
    assert padding_data(ids, 2, truncation="right").tolist() == [[1, 2]]
    assert padding_data(ids, 2, truncation="ignore") is ids
    with pytest.raises(ValueError, match="3 tokens do not fit into a length of 2"):
        padding_data(ids, 2)
    with pytest.raises(ValueError, match="shape"):
        padding_data(ids[0], 2)
    batch = create_dummy_batch()
    batch.metadata["advantages"] = [1.0] * 4
    wide = padding_data(batch, 12, pad_token_id=9)
    assert wide["input_ids"][:, 8:].unique().tolist() == [9] and wide["loss_mask"].shape == (4, 12)
    assert (
        torch.equal(wide.values["advantages"], wide["loss_mask"]) and wide.metadata["advantages"].tolist() == [1.0] * 4
    )
    back = padding_data(wide, pad_token_id=9)
    assert torch.equal(back["input_ids"], batch["input_ids"]) and back["loss_mask"].shape == (4, 8)


def test_positions_count_real_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 1, 2, 2], [0, 0, 0, 1]]


# ---- trajectories <-> batch ------------------------------------------------------------------------------------------


def test_trajectories_are_stacked_in_the_canonical_layout() -> None:
    batch = Batch.from_trajectories(
        [
            rollout([1, 2, 3], 2, 1.0, group_id="a", logprobs=[0.0, -0.5, -1.0], frame=torch.ones(2)),
            rollout([4, 5], 1, 0.0, group_id="b", logprobs=[-0.25], frame=torch.zeros(2)),
        ],
        "actor",
        pad_token_id=9,
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 1]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]
    assert batch["old_log_probs"].tolist() == [[0.0, -0.5, -1.0], [0.0, -0.25, 0.0]]
    assert batch["rewards"].tolist() == [1.0, 0.0] and batch["group_id"] == ["a", "b"]
    assert batch["frame"].shape == (2, 2) and batch["model_tag"] == "actor" and batch["is_val"] == [False, False]


def test_what_cannot_be_stacked_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Batch.from_trajectories([])
    with pytest.raises(ValueError, match="same fields; 'group_id' is not in all"):
        Batch.from_trajectories([rollout([1], 1, group_id=1), rollout([1], 1)])
    with pytest.raises(ValueError, match="2 tokens but a loss_mask of 1"):
        Batch.from_trajectories([Trajectory([1, 2], [1])])
    with pytest.raises(ValueError, match=r"3 tokens \(1 counted\) but 2 logprobs"):
        Batch.from_trajectories([rollout([1, 2, 3], 1, logprobs=[0.0, 0.0])])
    with pytest.raises(ValueError, match="one kind"):
        Batch.from_trajectories([rollout([1], 1), Trajectory(None, [1])])


def test_rollouts_of_environments_have_observations_instead_of_tokens() -> None:
    steps = [
        Trajectory(None, [1] * n, n, observations=torch.full((n, 2), float(n)), actions=torch.ones(n, 1))
        for n in (2, 3)
    ]
    batch = Batch.from_trajectories(steps)
    assert batch["observations"].shape == (2, 3, 2) and float(batch["observations"][0, 2].sum()) == 0.0
    assert batch["loss_mask"].tolist() == [[1, 1, 0], [1, 1, 1]] and "input_ids" not in batch


_numbers = st.floats(-8, 8, width=32)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), _numbers, _numbers), min_size=1, max_size=4),
)
def test_stacking_can_be_undone(rows: list[tuple[int, int, float, float]]) -> None:
    trajectories = [
        rollout(
            list(range(prompt + sampled)), sampled, reward, group_id=i % 2, text=f"{i}", advantage=advantage,
            logprobs=[0.0] * prompt + [-0.5] * sampled, frame=torch.full((2,), reward),
        )
        for i, (prompt, sampled, reward, advantage) in enumerate(rows)
    ]  # fmt: skip
    batch = Batch.from_trajectories(trajectories)
    assert batch.to_trajectories() == trajectories
    again = Batch.from_trajectories(batch.to_trajectories())
    assert all(torch.equal(again.values[name], value) for name, value in batch.values.items())


def test_the_dummy_batch_is_complete_and_reproducible() -> None:
    one, other = create_dummy_batch(), create_dummy_batch()
    one.require(
        "input_ids", "attention_mask", "position_ids", "loss_mask", "old_log_probs", "rewards", "group_id", "run_id"
    )
    assert all(torch.equal(one.values[name], other.values[name]) for name in one.values)
    assert one["attention_mask"].min() == 0  # rows of different lengths


def test_a_custom_trainer_shapes_rewards_and_advantages() -> None:
    """Rewards by row and by token, a KL penalty and edge cases, as custom trainers write them."""
    batch = create_dummy_batch()
    scores = torch.zeros_like(batch.values["loss_mask"], dtype=torch.float32)
    for i, reward in enumerate(batch.metadata["rewards"]):
        valid = torch.where(batch.values["loss_mask"][i] == 1)[0]
        if len(valid) > 0:
            scores[i, valid[-1]] = reward
    batch.values["token_level_scores"] = scores
    batch.values["ref_log_probs"] = batch.values["log_probs"] - 0.1
    kl = batch.values["log_probs"] - batch.values["ref_log_probs"]
    batch.values["token_level_scores"] = batch.values["token_level_scores"] - 0.5 * kl
    rewards = batch.metadata["rewards"]
    batch.metadata["advantages"] = (rewards - torch.mean(rewards)) / (torch.std(rewards) + 1e-8)
    assert abs(float(torch.mean(batch.metadata["advantages"]))) < 1e-6
    assert float(torch.mean(batch.values["advantages"])) == pytest.approx(float(batch.values["advantages"].mean()))


def test_a_rollout_that_nobody_rewarded_is_not_trained_on() -> None:
    with pytest.raises(ValueError, match="trajectory 1 has no reward"):
        Batch.from_trajectories([Trajectory([1], [1], 0.5), Trajectory([1], [1], None)])
