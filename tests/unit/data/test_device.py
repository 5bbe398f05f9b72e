"""to_device: whole batches."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from etude.data import to_device
from etude.types import Batch


class Pair(NamedTuple):
    x: Tensor
    name: str


def test_nested_batches_move_and_keep_their_form() -> None:
    batch = {"a": torch.zeros(2), "b": [torch.ones(1), "text"], "c": Pair(torch.ones(3), "n"), "d": (1, None)}
    moved = to_device(batch, "meta")
    assert moved["a"].device.type == moved["b"][0].device.type == moved["c"].x.device.type == "meta"
    assert isinstance(moved["c"], Pair)
    assert moved["b"][1] == "text"
    assert moved["d"] is batch["d"]
    assert batch["a"].device.type == "cpu"


def test_what_is_there_already_is_returned_itself() -> None:
    batch = {"a": torch.zeros(2), "b": [torch.ones(1)], "c": Pair(torch.ones(3), "n")}
    assert to_device(batch, "cpu") is batch


def test_mappings_of_other_kinds_keep_theirs() -> None:
    kinds: list[Any] = [OrderedDict, UserDict]
    for kind in kinds:
        batch = kind({"a": torch.zeros(1)})
        moved = to_device(batch, "meta")
        assert type(moved) is kind
        assert moved["a"].device.type == "meta"
        assert batch["a"].device.type == "cpu"


def test_objects_that_can_move_move_themselves() -> None:
    moved = to_device([Batch({"a": torch.zeros(2)})], "meta")
    assert moved[0]["a"].device.type == "meta"
