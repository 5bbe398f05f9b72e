"""What a custom trainer returns, looked at before anything is updated: one sentence with file, class and field."""

from __future__ import annotations

import inspect
import logging
import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from etude import errors
from etude.errors import DataError, EtudeError, NonFiniteError, one_line
from etude.types import is_number
from etude.types.batch import Batch
from etude.types.fields import REQUIRED_FIELDS, TOKEN_FIELDS
from etude.types.trajectory import Trajectory

log = logging.getLogger("etude")


def place_of(kind: type) -> str:
    """Return where a class is and what it is called: `recipe/my_task/my_trainer.py: MyTrainer`."""
    file = _file_of(kind)
    if file is None:
        return f"{kind.__module__}.{kind.__qualname__}"
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}: {kind.__qualname__}"


def _file_of(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return None


def ask(inner: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a custom trainer; whatever it raises becomes one sentence that names file, class and line."""
    try:
        return getattr(inner, method)(*arguments)
    except EtudeError as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        raise kind(f"{_where(inner, method, error)}: {error}") from error
    except Exception as error:
        raise DataError(f"{_where(inner, method, error)}: {type(error).__name__}: {one_line(error)}") from error


def _where(inner: Any, method: str, error: Exception) -> str:
    file = _file_of(type(inner))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{place_of(type(inner))}.{method}" + (f", line {lines[-1]}" if lines else "")


def check_prepared(inner: Any, found: Any, given: Batch, *, needs_advantages: bool) -> tuple[Batch, Mapping[str, Any]]:
    """Return (batch, metrics) of `_prepare_batch`, or say what is wrong with them."""
    where = f"{place_of(type(inner))}._prepare_batch"
    if not isinstance(found, tuple) or len(found) != 2:
        got = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
        raise DataError(f"{where} must return (batch, metrics), got {got}")
    batch, metrics = found
    if not isinstance(batch, Batch):
        raise DataError(f"{where} must return a Batch and metrics, got {type(batch).__name__} as the batch")
    if not isinstance(metrics, Mapping):
        raise DataError(f"{where} must return metrics as a dictionary, got {type(metrics).__name__}")
    kept = [name for name in REQUIRED_FIELDS if name in given.values]
    for name in kept:
        if name not in batch.values:
            raise DataError(f"{where} removed {name!r}, which the loss needs; the batch still has {_names(batch)}")
    if not len(batch):
        raise DataError(f"{where} returned a batch without rows; leave at least one")
    if needs_advantages and "advantages" not in batch:
        raise DataError(
            f"{where} set no 'advantages', which the loss needs; set batch.metadata['advantages'] (one number a row), "
            f"or batch.values['advantages'] (one a token); the batch has {_names(batch)}"
        )
    return _aligned(batch, where), metrics


def _names(batch: Batch) -> str:
    return ", ".join(batch.keys())


def _aligned(batch: Batch, where: str) -> Batch:
    """Return the batch with every field by token as wide as the tokens; a column short, the first token has nothing."""
    mask = batch.values.get("loss_mask")
    if mask is None:
        return batch
    batch = batch.copy()
    for name in TOKEN_FIELDS:
        value = batch.to_dict().get(name) if name == "advantages" else None
        value = batch.values.get(name) if value is None else value
        if name == "log_probs" or not isinstance(value, Tensor):
            continue
        if value.dim() == 2 and value.shape[1] == mask.shape[1] - 1:
            value = batch.values[name] = torch.cat((value.new_zeros(len(value), 1), value), 1)
        if value.shape[0] != len(mask) or (value.dim() > 1 and value.shape[:2] != mask.shape):
            raise DataError(
                f"{where} returned {name!r} of shape {tuple(value.shape)}, and the loss mask has {tuple(mask.shape)}"
            )
    for name in ("advantages", "returns", "token_level_scores"):
        if name in batch.values:
            _require_finite(batch, name, mask, where)
    return batch


def _require_finite(batch: Batch, name: str, mask: Tensor, where: str) -> None:
    value = batch.values[name]
    bad = ~value.isfinite() & (mask != 0 if value.dim() == 2 else mask.any(1))
    if not bool(bad.any()):
        return
    row = int(bad.flatten(1).any(1).nonzero()[0]) if bad.dim() > 1 else int(bad.nonzero()[0])
    group = f" (group {batch['group_id'][row]})" if "group_id" in batch else ""
    raise NonFiniteError(f"{where} returned {name!r} that are not finite, first in row {row}{group}")


def check_trajectories(inner: Any, found: Any, loss: str, *, by_advantage: bool) -> list[Trajectory]:
    """Return what `_prepare_trajectories` gave, or say what is wrong with it."""
    where = f"{place_of(type(inner))}._prepare_trajectories"
    if not isinstance(found, Sequence) or not all(isinstance(one, Trajectory) for one in found):
        got = type(found).__name__
        if isinstance(found, Sequence) and not isinstance(found, str):
            got += f" with a {next(type(one).__name__ for one in found if not isinstance(one, Trajectory))}"
        raise DataError(f"{where} must return the trajectories as a list, got {got}")
    if not found:
        raise DataError(f"{where} returned no trajectories; leave at least one")
    for index, one in enumerate(found):
        if one.tokens is None or one.loss_mask is None or len(one.tokens) != len(one.loss_mask):
            raise DataError(f"{where}: trajectory {index} needs 'tokens' and a 'loss_mask' of the same length")
        if by_advantage:
            _check_advantages(one, index, where, loss)
    return list(found)


def _check_advantages(one: Trajectory, index: int, where: str, loss: str) -> None:
    by_token, by_row = one.get("token_advantages"), one.get("advantage")
    name = "token_advantages" if by_token is not None else "advantage"
    numbers = by_token if by_token is not None else by_row
    if numbers is None:
        raise DataError(
            f"{where} set neither 'advantage' nor 'token_advantages' on trajectory {index}; {loss} needs one of them"
        )
    try:
        values = torch.as_tensor(numbers, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{where}: {name!r} of trajectory {index} must be numbers, got {numbers!r}") from None
    counted = sum(1 for mark in one.loss_mask if mark)
    if name == "advantage" and values.numel() != 1:
        raise DataError(f"{where}: 'advantage' of trajectory {index} must be one number, got {values.numel()}")
    if name == "token_advantages" and values.numel() not in (counted, len(one.tokens)):
        raise DataError(
            f"{where}: 'token_advantages' of trajectory {index} has {values.numel()} numbers for {len(one.tokens)} "
            f"tokens, of which {counted} count"
        )
    if not bool(values.isfinite().all()):
        raise NonFiniteError(f"{where}: {name!r} of trajectory {index} is not finite")


class Floats:
    """Turns metrics into floats; says once which of them came as tensors."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, inner: Any, metrics: Mapping[str, Any], method: str) -> dict[str, float]:
        """Return the metrics as floats; what is no number is refused by name."""
        found, converted = {}, []
        for name, value in metrics.items():
            number = value.item() if hasattr(value, "item") and getattr(value, "size", None) == 1 else value
            if not is_number(number):
                raise DataError(
                    f"{place_of(type(inner))}.{method} returned the metric {name!r} as {_described(value)}; metrics "
                    "are numbers"
                )
            if isinstance(value, Tensor):
                converted.append(str(name))
            found[str(name)] = float(number)
        if converted and not self._said:
            self._said = True
            log.warning(
                "%s.%s returned metrics as tensors, which were turned into floats: %s; float(...) keeps no graph",
                place_of(type(inner)), method, ", ".join(converted[:5]),
            )  # fmt: skip
        return found


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
