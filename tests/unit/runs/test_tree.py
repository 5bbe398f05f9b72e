from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import CheckpointError
from etude.runs.tree import join_tensors, split_tensors

TENSORS = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = (
    SCALARS | st.tuples(st.integers(), st.text()) | st.sampled_from(["$tensor", "$tuple", "a.b", "a", "__metadata__"])
)
TREES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert len(left) == len(right)
        for (left_key, left_value), (right_key, right_value) in zip(left.items(), right.items(), strict=True):
            assert_same(left_key, right_key)
            assert_same(left_value, right_value)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float):
        assert repr(left) == repr(right)
    else:
        assert left == right


def round_trip(tree: Any) -> Any:
    skeleton, tensors = split_tensors(tree)
    return join_tensors(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


@given(TREES)
def test_every_tree_comes_back_exactly_through_strict_json(tree: Any) -> None:
    assert_same(round_trip(tree), tree)


@given(TREES)
def test_every_tensor_gets_a_name_of_its_own(tree: Any) -> None:
    def count(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return 1
        if isinstance(value, dict):
            return sum(map(count, value.values()))
        return sum(map(count, value)) if isinstance(value, list | tuple) else 0

    _, tensors = split_tensors(tree)
    assert len(tensors) == count(tree)
    assert "__metadata__" not in tensors


def test_tensors_are_named_by_their_path() -> None:
    tree = {"layers": [{"weight": torch.ones(1)}], 3: torch.ones(2), "a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    assert list(split_tensors(tree)[1]) == ["layers.0.weight", "3", "a.b", "a.b~2"]


def test_the_state_of_an_optimizer_and_a_schedule_comes_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.5, 0.9))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    schedule.step()
    again = round_trip({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert_same(again["optimizer"], optimizer.state_dict())
    model.load_state_dict(again["model"])
    assert round_trip(schedule.state_dict()) == schedule.state_dict()


def test_what_cannot_keep_its_class_comes_back_equal() -> None:
    class Color(enum.IntEnum):
        RED = 3

    pair = namedtuple("pair", "x y")(1, 2.0)
    tree = [OrderedDict(a=1), Counter("aab"), pair, Color.RED, np.float32(0.1), np.int64(7), np.bool_(True)]
    assert round_trip(tree) == tree


@pytest.mark.parametrize(
    "value",
    [b"bytes", {1, 2}, object(), 1j, np.zeros(2), len, np.datetime64("2020-01-01")],
    ids=lambda v: type(v).__name__,
)
def test_what_a_checkpoint_cannot_hold_is_refused_and_its_place_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'callbacks\.1\.x'"):
        split_tensors({"callbacks": [{}, {"x": value}]})


def test_a_tensor_as_a_key_is_refused() -> None:
    with pytest.raises(CheckpointError, match="tensor as a key"):
        split_tensors({torch.ones(1): 1})


def test_a_sharded_tensor_is_refused_with_the_remedy() -> None:
    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            return self

    with pytest.raises(CheckpointError, match=r"gather it with full_tensor\(\)"):
        split_tensors({"w": torch.ones(2).as_subclass(Sharded)})


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contain itself"):
        split_tensors(loop)


@pytest.mark.parametrize(
    "skeleton", [{"$tensor": "absent"}, {"$tuple": 3}, {"$dict": [[1]]}, {"$float": "x"}, {"$new": 1}]
)
def test_a_skeleton_that_makes_no_sense_is_refused(skeleton: Any) -> None:
    with pytest.raises(CheckpointError, match=r"\$"):
        join_tensors([skeleton], {})
