"""as_data: what people have at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, TensorDataset

from etude.data import LoaderData, MapData, StreamData, as_data
from etude.errors import DataError
from etude.types.protocols import Place
from tests.unit.data.sources import Augmented, flatten, taken


class Rows(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Module:
    """Looks like a LightningDataModule."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(4)), batch_size=2)

    def val_dataloader(self) -> Any:
        return [DataLoader(TensorDataset(torch.arange(10, 12)), batch_size=2)]


@pytest.mark.parametrize(
    "source,kind",
    [
        (Augmented(), MapData),
        (TensorDataset(torch.arange(3)), MapData),
        (ConcatDataset([TensorDataset(torch.arange(3))]), MapData),
        ([1, 2, 3], MapData),
        (torch.arange(3), MapData),
        (np.arange(3), MapData),
        ({"x": torch.arange(3), "y": np.arange(3)}, MapData),
        (range(3), MapData),
        (DataLoader(TensorDataset(torch.arange(3))), LoaderData),
        (DataLoader(Rows()), StreamData),
        (Rows(), StreamData),
        ((i for i in range(3)), StreamData),
        (lambda: iter([1, 2]), StreamData),
        ({1, 2}, StreamData),
        (Module(), LoaderData),
    ],
)
def test_sources_become_data_and_serve_a_batch(source: Any, kind: type) -> None:
    data = as_data(source)
    assert isinstance(data, kind)
    assert flatten(taken(data, [0], Place(batch_size=2)))


def test_data_stays_as_it_is() -> None:
    data = MapData([1, 2])
    assert as_data(data) is data


def test_a_dictionary_of_columns_gives_rows() -> None:
    data = as_data({"x": torch.arange(6), "y": np.arange(6) * 10})
    ((batch,),) = taken(data, [0], Place(batch_size=3))
    assert (batch["x"] * 10).tolist() == batch["y"].tolist()


def test_a_data_module_is_prepared_first() -> None:
    module = Module()
    assert flatten(taken(as_data(module), [0], Place()))[0].tolist() == [0, 1]
    assert module.calls == ["prepare_data", "setup fit"]
    assert flatten(taken(as_data(module, split="val"), [0], Place()))[0].tolist() == [10, 11]


def test_a_data_module_with_several_loaders_is_refused() -> None:
    class Two(Module):
        def train_dataloader(self) -> Any:
            return {"a": 1, "b": 2}

    with pytest.raises(DataError, match="must return one DataLoader, got dict"):
        as_data(Two())


@pytest.mark.parametrize("source", [3, None, "path/to/data", b"x", Augmented, 1.5])
def test_anything_else_is_refused_with_what_is_accepted(source: Any) -> None:
    with pytest.raises(DataError, match=r"cannot train on .*data may be a dataset with __len__"):
        as_data(source)
