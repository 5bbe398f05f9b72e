"""Rollouts one by one: the Trajectory, and how several become the columns of a batch.

Shape letters: B rows, T tokens (or steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_CORE: Final = ("tokens", "loss_mask", "reward", "is_val")
_OPTIONAL: Final = frozenset({"advantage", "logprobs", "observations"})
PER_TOKEN: Final = {
    "logprobs": "old_log_probs", "ref_logprobs": "ref_log_probs", "teacher_logprobs": "teacher_log_probs",
    "values": "values", "returns": "returns", "token_level_scores": "token_level_scores",
    "token_advantages": "advantages", "weights": "weights",
}  # fmt: skip


class Trajectory:
    """One rollout: what was seen, done and earned, with free room for more.

    Everything beyond tokens, loss_mask, reward and is_val lives in `extra_fields`; `trajectory.run_id`,
    `trajectory["run_id"]` and `trajectory.extra_fields["run_id"]` are one value. `advantage`, `logprobs` and
    `observations` are None as attributes until they are set.
    """

    def __init__(
        self,
        tokens: Any = None,
        loss_mask: Any = None,
        reward: float | None = 0.0,
        is_val: bool = False,
        extra_fields: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Make a trajectory.

        Args:
            tokens: Prompt and completion, in order.
            loss_mask: 1 on tokens that were sampled and count, 0 on the others.
            reward: What the rollout earned; None while nobody has judged it, or because that failed.
            is_val: Whether it belongs to validation.
            extra_fields: group_id, run_id, logprobs (one per token, 0.0 on the prompt), advantage, ...
            **fields: Further extra fields by name.
        """
        extra = dict(extra_fields or {})
        doubled = sorted((extra.keys() & fields.keys()) | (extra.keys() & {*_CORE, "extra_fields"}))
        if doubled:
            raise ValueError(f"{doubled[0]!r} is given to a Trajectory twice: as an argument and in extra_fields")
        object.__setattr__(self, "extra_fields", {**extra, **fields})
        self.tokens, self.loss_mask, self.is_val = tokens, loss_mask, is_val
        self.reward: Any = reward

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "extra_fields":  # while it is being copied there is nothing to look in
            raise AttributeError(name)
        if name in self.extra_fields:
            return self.extra_fields[name]
        if name in _OPTIONAL:
            return None
        raise AttributeError(f"the trajectory has no field {name!r}; it has {', '.join(self.keys())}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CORE:
            object.__setattr__(self, name, value)
        elif name == "extra_fields":
            object.__setattr__(self, name, dict(value))
        else:
            self.extra_fields[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self.extra_fields:
            raise AttributeError(f"the trajectory has no field {name!r} to delete")
        del self.extra_fields[name]

    def __getitem__(self, name: str) -> Any:
        if name in _CORE:
            return getattr(self, name)
        try:
            return self.extra_fields[name]
        except KeyError:
            raise KeyError(f"the trajectory has no field {name!r}; it has {', '.join(self.keys())}") from None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        return name in _CORE or name in self.extra_fields

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        return set(self.keys()) == set(other.keys()) and all(_same(self[name], other[name]) for name in self.keys())

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Trajectory({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, like a dictionary."""
        return getattr(self, name) if name in _CORE else self.extra_fields.get(name, default)

    def keys(self) -> list[str]:
        """Return the names of all fields."""
        return [*_CORE, *self.extra_fields]

    def items(self) -> list[tuple[str, Any]]:
        """Return all fields by name."""
        return [(name, self[name]) for name in self.keys()]


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return the position of each token among the real ones of its row (B, T); padding on the left has position 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def token_columns(trajectories: Sequence[Trajectory], pad_token_id: int) -> dict[str, Tensor]:
    """Return the ids, masks and positions of trajectories, padded on the right (B, T); none without any length."""
    masks = [trajectory.loss_mask for trajectory in trajectories]
    tokens: list[Any] | None = [trajectory.tokens for trajectory in trajectories]
    if any(trajectory.tokens is None for trajectory in trajectories):
        if any(trajectory.tokens is not None for trajectory in trajectories):
            raise ValueError("some trajectories have tokens and some have none; a batch needs one kind")
        if any(mask is None for mask in masks):
            return {}
        tokens = None
    lengths = [len(row) for row in (masks if tokens is None else tokens)]
    width = max(lengths)
    masks = [[1] * n if mask is None else mask for mask, n in zip(masks, lengths, strict=True)]
    for i, (mask, n) in enumerate(zip(masks, lengths, strict=True)):
        if len(mask) != n:
            raise ValueError(f"trajectory {i} has {n} tokens but a loss_mask of {len(mask)}")
    attention_mask = _padded([[1] * n for n in lengths], width, 0, torch.long)
    columns = {"attention_mask": attention_mask, "position_ids": compute_position_id_with_mask(attention_mask)}
    columns["loss_mask"] = _padded(masks, width, 0, torch.float32)
    if tokens is not None:
        columns = {"input_ids": _padded(tokens, width, pad_token_id, torch.long), **columns}
    return columns


def token_numbers(name: str, column: Sequence[Any], trajectories: Sequence[Trajectory], width: int) -> Tensor:
    """Return numbers per token as one tensor (B, T); numbers of the sampled tokens alone are put on the mask."""
    rows = []
    for i, (numbers, trajectory) in enumerate(zip(column, trajectories, strict=True)):
        mask = [1] * len(trajectory.tokens) if trajectory.loss_mask is None else trajectory.loss_mask
        numbers = [float(number) for number in numbers]
        count = sum(1 for counted in mask if counted)
        if len(numbers) == len(mask):
            rows.append(numbers)
        elif len(numbers) == count:  # numbers of the sampled tokens alone
            given = iter(numbers)
            rows.append([next(given) if counted else 0.0 for counted in mask])
        else:
            raise ValueError(f"trajectory {i} has {len(mask)} tokens ({count} counted) but {len(numbers)} {name}")
    return _padded(rows, width, 0.0, torch.float32)


def _padded(rows: Iterable[Any], width: int, value: float, dtype: torch.dtype) -> Tensor:
    listed = [row.tolist() if isinstance(row, Tensor | np.ndarray) else list(row) for row in rows]
    return torch.tensor([row + [value] * (width - len(row)) for row in listed], dtype=dtype).reshape(len(listed), width)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
