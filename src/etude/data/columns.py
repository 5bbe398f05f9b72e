"""`Columns`: a dictionary of tensors or arrays as a dataset, one row a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from etude.data.order import Indices, Keys
from etude.errors import DataError


class Columns:
    """A dataset of equally long columns, indexed a batch at a time.

    Args:
        columns: Tensors or arrays by name, all with the same first dimension.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        if not columns:
            raise DataError("a dictionary of columns needs at least one column")
        self.columns = {name: as_column(name, value) for name, value in columns.items()}
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns must be equally long, got {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: torch.as_tensor(column[index]) for name, column in self.columns.items()}

    def gather(self, indices: Indices, keys: Keys) -> dict[str, Tensor]:
        """Return the rows at `indices` as one batch."""
        rows = torch.from_numpy(indices)
        return {name: pick_rows(column, rows) for name, column in self.columns.items()}


class Pairs(Columns):
    """Features and targets as a dataset, in batches `[x, y]` as a DataLoader makes them of a TensorDataset.

    Args:
        features: One row a sample.
        targets: As many rows.
    """

    def __init__(self, features: Any, targets: Any) -> None:
        super().__init__({"features": features, "targets": targets})

    def __getitem__(self, index: int) -> Any:
        return tuple(super().__getitem__(index).values())

    def gather(self, indices: Indices, keys: Keys) -> Any:
        """Return the rows at `indices` as one batch."""
        return list(super().gather(indices, keys).values())


class Rows(Protocol):
    """A column that makes its rows when they are asked for, such as video decoded on the fly."""

    shape: tuple[int, ...]
    ndim: int
    dtype: np.dtype[Any]

    def __len__(self) -> int: ...
    def __getitem__(self, rows: Any) -> np.ndarray[Any, Any]: ...


Column = Tensor | np.ndarray[Any, Any] | Rows


def as_column(name: str, value: Any) -> Column:
    """Take a tensor or array as a column, without copying it."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise DataError(f"column {name!r} holds {value.dtype}, and only numbers and booleans can become tensors")
        # torch warns about memory it must not write to, so arrays opened read-only stay arrays.
        value = torch.from_numpy(value) if value.flags.writeable else value
    elif not isinstance(value, Tensor) and not all(hasattr(value, name) for name in ("shape", "ndim", "__getitem__")):
        raise DataError(f"column {name!r} must be a tensor or an array, got {type(value).__name__}")
    if not value.ndim:
        raise DataError(f"column {name!r} has no rows")
    column: Column = value
    return column


def pick_rows(column: Column, rows: Tensor) -> Tensor:
    """Copy rows out of a column; `rows` may have any shape, which then comes first."""
    if isinstance(column, Tensor):
        if rows.dim() == 1:
            return column.index_select(0, rows)
        return column.index_select(0, rows.reshape(-1)).view(*rows.shape, *column.shape[1:])
    return torch.from_numpy(column[rows.numpy()])
