"""The replay buffer: bounded, whole episodes, windows and transitions as plain slices would cut them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude.data import ReplayBuffer, Windows
from etude.errors import DataError
from etude.runs.tree import join_tensors, split_tensors

STATE, ACTION, PICTURE = "observation.state", "action", "observation.images.top"


def episode(number: int, frames: int, *, terminated: bool = True, pictures: bool = False) -> dict[str, Any]:
    """Return an episode whose numbers say where they come from: 100 * episode + frame."""
    at = 100.0 * number + np.arange(frames + 1, dtype=np.float32)
    found: dict[str, Any] = {
        STATE: np.stack([at[:-1], -at[:-1]], 1), ACTION: at[:-1, None].copy(), "reward": at[:-1] * 0 + 1.0,
        "terminated": terminated, "success": terminated, "last": {STATE: np.array([at[-1], -at[-1]])},
    }  # fmt: skip
    if pictures:
        found[PICTURE] = np.full((frames, 3, 4, 4), number, dtype=np.uint8)
        found["last"][PICTURE] = np.full((3, 4, 4), number, dtype=np.uint8)
    return found


def filled(*lengths: int, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(**options)
    for number, frames in enumerate(lengths):
        assert buffer.add(episode(number, frames, terminated=number % 2 == 0)) == number
    return buffer


def test_windows_are_cut_as_a_dataset_cuts_them() -> None:
    lengths = (7, 3, 12, 1)
    buffer, deltas = filled(*lengths), {STATE: [-2, 0], ACTION: [0, 1, 2, 3]}
    columns = {n: np.concatenate([episode(i, frames)[n] for i, frames in enumerate(lengths)]) for n in (STATE, ACTION)}
    dataset = Windows(columns, np.cumsum(lengths), deltas)
    rows = {float(value): row for row, value in enumerate(columns[ACTION][:, 0])}
    batch = buffer.sample(200, key=3, windows=deltas)
    chosen = np.array([rows[float(value)] for value in batch[ACTION][:, 0, 0]])
    assert set(chosen) == set(range(sum(lengths)))  # every frame is drawn sooner or later
    wanted = dataset.gather(chosen, chosen.astype(np.uint64))
    assert wanted.keys() == batch.keys() - {"reward"}
    for name, values in wanted.items():
        np.testing.assert_array_equal(batch[name], values.numpy())


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"windows": {STATE: [-2, 0], ACTION: [0, 1, 2, 3]}},
        {"transitions": True, "n_step": 3, "gamma": 0.9},
        {"transitions": True, "windows": {STATE: [-1, 0]}},
    ],
)
def test_many_batches_at_once_are_those_of_one_after_the_other(how: dict[str, Any]) -> None:
    buffer, room = filled(7, 3, 12, 5, 9, 8, max_frames=22), dict[str, Any]()
    for keys in (range(5), range(5, 10), range(90, 93)):  # the last episode lies across the end of the columns
        each = [buffer.sample(4000, key=key, **how) for key in keys]
        found = buffer.sample_many(keys, 4000, room=room, **how)
        assert found.keys() == each[0].keys()
        for name, values in found.items():
            np.testing.assert_array_equal(values, np.concatenate([batch[name] for batch in each]))
            assert values is room[name] and values.dtype == each[0][name].dtype


def test_a_draw_is_a_function_of_the_key_and_may_be_shared() -> None:
    buffer = filled(5, 9)
    whole = buffer.sample(12, key=7)[ACTION]
    parts = [buffer.sample(4, key=7, first=first)[ACTION] for first in (0, 4, 8)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert (buffer.sample(12, key=8)[ACTION] != whole).any()
    assert (buffer.sample(12)[ACTION] != buffer.sample(12)[ACTION]).any()  # without one, from call to call


def test_uniform_draws_every_frame_alike_and_prioritised_by_episode() -> None:
    counts = np.bincount(filled(10, 30).sample(40_000, key=0)[ACTION][:, 0].astype(int), minlength=200)
    assert counts[counts > 0].min() > 800 and counts[counts > 0].max() < 1200 and (counts > 0).sum() == 40
    buffer = ReplayBuffer(sampling="prioritised")
    buffer.add(episode(0, 10), priority=3.0)
    buffer.add(episode(1, 30), priority=1.0)
    counts = np.bincount(buffer.sample(60_000, key=0)[ACTION][:, 0].astype(int), minlength=200)
    assert counts[:10].min() > 2700 and counts[:10].max() < 3300
    assert counts[100:130].min() > 850 and counts[100:130].max() < 1150


@pytest.mark.parametrize("n_step", [1, 3])
def test_transitions_lead_to_what_was_seen_later_and_know_where_an_episode_was_over(n_step: int) -> None:
    lengths, gamma = (4, 6), 0.5
    buffer = filled(*lengths)  # the first is over, the second was cut off
    batch = buffer.sample(300, key=1, transitions=True, n_step=n_step, gamma=gamma)
    assert batch.keys() == {STATE, ACTION, f"next.{STATE}", "reward", "discount"}
    for row in range(300):
        number, frame = divmod(round(float(batch[STATE][row, 0])), 100)
        steps = min(n_step, lengths[number] - frame)
        assert batch[f"next.{STATE}"][row, 0] == 100 * number + frame + steps
        assert batch["reward"][row] == pytest.approx(sum(gamma**k for k in range(steps)))
        is_over = number == 0 and frame + steps == lengths[0]
        assert batch["discount"][row] == pytest.approx(0.0 if is_over else gamma**steps)
    assert (batch["discount"] == 0).any()


def test_the_oldest_leave_first_by_frames_and_by_bytes() -> None:
    buffer = filled(5, 5, 5, 5, max_frames=12)
    assert (buffer.size(), buffer.episodes, buffer.added) == (10, 2, 20)
    assert set(buffer.sample(200, key=0)[ACTION][:, 0] // 100) == {2.0, 3.0}
    row = 4 * (2 + 1 + 1)
    buffer = filled(5, 5, 5, 5, max_bytes=13 * row)  # each takes a row more than it has frames
    assert buffer.episodes == 2 and buffer.nbytes == 12 * row <= buffer.max_bytes


def test_rows_stay_right_when_the_memory_is_gone_through_many_times() -> None:
    generator = np.random.default_rng(0)
    buffer, kept = ReplayBuffer(max_frames=23), []
    for number in range(60):
        frames = int(generator.integers(1, 9))
        buffer.add(episode(number, frames))
        kept = [*kept, (number, frames)]
        while sum(length for _, length in kept) > 23:
            kept.pop(0)
        assert (buffer.size(), buffer.episodes) == (sum(length for _, length in kept), len(kept))
        batch = buffer.sample(60, key=number, windows={STATE: [-1, 0, 1]})
        known = {100.0 * n + f for n, length in kept for f in range(length)}
        assert set(batch[ACTION][:, 0].tolist()) <= known
        assert set(batch[STATE][..., 0].ravel().tolist()) <= known
        np.testing.assert_array_equal(batch[STATE][:, 1, 0], batch[ACTION][:, 0])


def test_pictures_stay_bytes_and_a_saved_buffer_draws_the_same() -> None:
    buffer = ReplayBuffer(max_frames=20, sampling="prioritised")
    for number in range(5):
        buffer.add(episode(number, 6, pictures=True), priority=1.0 + number)
    buffer.sample(3)
    skeleton, tensors = split_tensors(buffer.state_dict())
    assert {name: tensor.dtype for name, tensor in tensors.items()}[f"columns.{PICTURE}"] == torch.uint8
    back = ReplayBuffer(max_frames=20, sampling="prioritised")
    back.load_state_dict(join_tensors(skeleton, tensors))
    assert (back.size(), back.added, back.episodes, back.nbytes) == (18, 30, 3, buffer.nbytes)
    for how in ({"key": 4}, {}, {"transitions": True, "key": 9, "n_step": 2}):
        one, other = buffer.sample(50, **how), back.sample(50, **how)  # type: ignore[arg-type]
        assert one.keys() == other.keys() and one[PICTURE].dtype == np.uint8
        assert all((one[name] == other[name]).all() for name in one)
    assert buffer.add(episode(7, 2, pictures=True)) == back.add(episode(7, 2, pictures=True)) == 5
    smaller = ReplayBuffer(max_frames=7)
    smaller.load_state_dict(join_tensors(skeleton, tensors))
    assert smaller.episodes == 1


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: ReplayBuffer(max_frames=4).add(episode(0, 5)), "an episode of 5 frames .* is larger than the replay"),
        (lambda: ReplayBuffer(max_bytes=30).add(episode(0, 5)), "is larger than the replay buffer"),
        (lambda: ReplayBuffer().sample(1), "the replay buffer is empty"),
        (lambda: ReplayBuffer(max_frames=0), "needs room for frames"),
        (lambda: ReplayBuffer(sampling="fair"), "uniform or prioritised"),  # type: ignore[arg-type]
        (lambda: ReplayBuffer().add(episode(0, 5), priority=0.0), "a positive number"),
        (lambda: ReplayBuffer().add({STATE: np.zeros((3, 2)), ACTION: np.zeros((2, 1))}), "rows of one length"),
        (lambda: ReplayBuffer().add({STATE: np.zeros((0, 2))}), "rows of one length, at least one"),
        (lambda: ReplayBuffer().add({STATE: np.array(["a"])}), "only numbers"),
        (lambda: filled(3).add({STATE: np.zeros((3, 2), np.float32)}), "this has"),
        (lambda: filled(3).add({**episode(0, 2), ACTION: np.zeros((2, 3), np.float32)}), r"action of an episode is"),
    ],
)
def test_what_cannot_be_kept_or_drawn_is_refused(act: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        act()
