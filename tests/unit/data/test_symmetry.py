"""Turned and mirrored samples: all of one sample alike, lengths kept, drawn from the sample's own key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.data import Augment
from etude.data.order import Keys
from etude.data.symmetry import RandomMirror, RandomTurn
from etude.errors import ConfigError, DataError
from etude.rng import fold, fold_array
from etude.types import DataSpec, Feature

PAIRS = [["hand_x", "hand_y"], ["goal_x", "goal_y"], ["dx", "dy"]]
NAMES = ("hand_x", "hand_y", "hand_z", "goal_x", "goal_y")


def make_spec(**more: Feature) -> DataSpec:
    state = Feature((5,), "float32", "state", names=NAMES)
    return DataSpec({"state": state, "action": Feature((3,), "float32", "action", names=("dx", "dy", "dz")), **more})


def keys_of(count: int, first: int = 0) -> Keys:
    return fold_array(fold(1), np.arange(first, first + count))


def sample(count: int = 6) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"state": torch.randn(count, 5, generator=draw), "action": torch.randn(count, 4, 3, generator=draw)}


def test_all_pairs_of_a_sample_turn_by_one_angle() -> None:
    before, after = sample(), sample()
    RandomTurn(PAIRS, make_spec())(after, keys_of(6))
    hand, goal = (torch.view_as_complex(x["state"][:, :2].contiguous()) for x in (before, after))
    angle = goal / hand
    torch.testing.assert_close(angle.abs(), torch.ones(6))
    assert len(set(angle.angle().round(decimals=3).tolist())) == 6
    for name, first, turn in (("state", 3, angle), ("action", 0, angle[:, None])):
        was, is_now = (torch.view_as_complex(x[name][..., first : first + 2].contiguous()) for x in (before, after))
        torch.testing.assert_close(is_now, was * turn)
    assert torch.equal(after["state"][:, 2], before["state"][:, 2])
    assert torch.equal(after["action"][..., 2], before["action"][..., 2])


def test_a_turn_depends_on_the_key_alone_and_leaves_the_data_as_it_was() -> None:
    turn, whole = RandomTurn(PAIRS, make_spec()), sample()
    kept = whole["state"]
    turn(whole, keys_of(6))
    assert torch.equal(kept, sample()["state"])
    part = {name: value[4:] for name, value in sample().items()}
    turn(part, keys_of(2, 4))
    assert torch.equal(part["action"], whole["action"][4:])


@pytest.mark.parametrize(
    "pairs, message",
    [
        ([["hand_x", "hand_w"]], "names 'hand_w', which is no number of the data"),
        ([["hand_x", "dx"]], "pairs of numbers of one feature"),
        ([["hand_x", "hand_y"], ["hand_y", "goal_y"]], "names a number twice"),
    ],
)
def test_pairs_that_mean_nothing_are_refused(pairs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RandomTurn(pairs, make_spec())


def test_what_is_no_pair_and_pictures_are_refused() -> None:
    for wrong in ("hand_x", [["hand_x"]], ["hand_x", "hand_y"]):
        with pytest.raises(DataError, match="turn takes pairs of names"):
            Augment(turn=wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="changes numbers and not pictures, and the data has top"):
        RandomTurn(PAIRS, make_spec(top=Feature((8, 8, 3), "uint8", "image")))


LINE = [[4.0, 0.0], [0.0, 4.0]]
POINTS = [["hand_x", "hand_y", "goal_x", "goal_y"], ["dx", "dy"]]


def test_about_half_of_the_samples_are_mirrored_and_points_trade_places() -> None:
    before, after = sample(64), sample(64)
    RandomMirror(LINE, POINTS, make_spec())(after, keys_of(64))
    is_mirrored = (after["state"] != before["state"]).any(1)
    assert 20 < is_mirrored.sum() < 44
    was, is_now = before["state"][is_mirrored], after["state"][is_mirrored]
    # In the mirror x + y = 4 the point (x, y) is at (4 - y, 4 - x).
    torch.testing.assert_close(is_now[:, :2], 4 - was[:, [4, 3]])
    torch.testing.assert_close(is_now[:, 3:], 4 - was[:, [1, 0]])
    assert torch.equal(is_now[:, 2], was[:, 2])
    torch.testing.assert_close(after["action"][is_mirrored][..., :2], 4 - before["action"][is_mirrored][..., [1, 0]])
    assert torch.equal(after["action"][~is_mirrored], before["action"][~is_mirrored])
    assert torch.equal(after["action"][..., 2], before["action"][..., 2])


def test_a_mirror_depends_on_the_key_alone_and_leaves_the_data_as_it_was() -> None:
    mirror, whole = RandomMirror(LINE, POINTS, make_spec()), sample(16)
    kept = whole["state"]
    mirror(whole, keys_of(16))
    assert torch.equal(kept, sample(16)["state"])
    part = {name: value[4:] for name, value in sample(16).items()}
    mirror(part, keys_of(12, 4))
    assert torch.equal(part["state"], whole["state"][4:])


def test_mirrors_that_mean_nothing_are_refused() -> None:
    for points, message in (
        ([["hand_x", "dx"]], "points of one feature"),
        ([["hand_x", "hand_y"], ["hand_x", "hand_y", "goal_x", "goal_y"]], "names a number twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            RandomMirror(LINE, points, make_spec())
    for wrong, message in (
        ([["hand_x", "hand_y"]], "takes a line and points"),
        ({"line": [[0, 0], [0, "a"]], "points": []}, "a line through two points"),
        ({"line": [[1, 2], [1, 2]], "points": []}, "is one point"),
        ({"line": LINE, "points": [["hand_x"]]}, "two names each, or of four"),
    ):
        with pytest.raises(DataError, match=message):
            Augment(mirror=wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="changes numbers and not pictures, and the data has top"):
        RandomMirror(LINE, POINTS, make_spec(top=Feature((8, 8, 3), "uint8", "image")))
