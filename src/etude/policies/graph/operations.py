"""The operations that nodes may call: `call: op:NAME`."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import getitem as _getitem
from typing import Any

import torch
from torch import Tensor


def add(first: Any, second: Any, *more: Any) -> Any:
    """Return the sum of two values or more."""
    return first + second if not more else reduce(lambda one, other: one + other, more, first + second)


def sub(first: Any, second: Any) -> Any:
    """Return first - second."""
    return first - second


def mul(first: Any, second: Any, *more: Any) -> Any:
    """Return the product, number by number, of two values or more."""
    return first * second if not more else reduce(lambda one, other: one * other, more, first * second)


def matmul(first: Tensor, second: Tensor) -> Tensor:
    """Return the matrix product."""
    return first @ second


def cat(tensors: Any, dim: int = 0) -> Tensor:
    """Join the tensors of a list along a dimension they have."""
    return torch.cat(tensors, dim)


def stack(tensors: Any, dim: int = 0) -> Tensor:
    """Join the tensors of a list along a new dimension."""
    return torch.stack(tensors, dim)


def chunk(tensor: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Cut a tensor into so many parts."""
    return tensor.chunk(chunks, dim)


def split(tensor: Tensor, size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Cut a tensor into parts of a size, or of the sizes listed."""
    return torch.split(tensor, size, dim)


def getitem(container: Any, key: Any) -> Any:
    """Return what a container holds under a key or an index; a list indexes several dimensions of a tensor."""
    return _getitem(container, tuple(key) if isinstance(key, list) and isinstance(container, Tensor) else key)


def reshape(tensor: Tensor, shape: Any, *more: int) -> Tensor:
    """Return the same numbers in another shape, given as a list or one by one; -1 is what is left."""
    return tensor.reshape(shape, *more)


def flatten(tensor: Tensor, start_dim: int = 1, end_dim: int = -1) -> Tensor:
    """Join dimensions; all but that of the batch unless told."""
    return tensor.flatten(start_dim, end_dim)


def transpose(tensor: Tensor, dim0: int, dim1: int) -> Tensor:
    """Exchange two dimensions."""
    return tensor.transpose(dim0, dim1)


def permute(tensor: Tensor, dims: Any, *more: int) -> Tensor:
    """Put the dimensions, given as a list or one by one, in another order."""
    return tensor.permute(dims, *more)


def unsqueeze(tensor: Tensor, dim: int) -> Tensor:
    """Add a dimension of size 1."""
    return tensor.unsqueeze(dim)


def squeeze(tensor: Tensor, dim: int) -> Tensor:
    """Remove a dimension of size 1."""
    return tensor.squeeze(dim)


def expand(tensor: Tensor, shape: Any, *more: int) -> Tensor:
    """Repeat dimensions of size 1 without copying; -1 leaves a dimension as it is."""
    return tensor.expand(shape, *more)


def mean(tensor: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Return the mean over dimensions, or over everything."""
    return tensor.mean() if dim is None and not keepdim else tensor.mean(dim, keepdim)


def sum(tensor: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Return the sum over dimensions, or over everything."""
    return tensor.sum() if dim is None and not keepdim else tensor.sum(dim, keepdim)


def softmax(tensor: Tensor, dim: int = -1) -> Tensor:
    """Return shares that add up to 1 along a dimension."""
    return tensor.softmax(dim)


def detach(tensor: Tensor) -> Tensor:
    """Return the tensor without its history: no gradient passes."""
    return tensor.detach()


def identity(value: Any) -> Any:
    """Return the value as it is."""
    return value


OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        add, sub, mul, matmul, cat, stack, chunk, split, getitem, reshape, flatten, transpose, permute, unsqueeze,
        squeeze, expand, mean, sum, softmax, detach, identity,
    )
}  # fmt: skip
