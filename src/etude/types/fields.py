"""The fields of a batch: which there are, how they are read and written, and how they are cut by column and by row.

Shape letters: B rows, T tokens (or steps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import numpy as np
from torch import Tensor

from etude.types.trajectory import PER_TOKEN, Trajectory

REQUIRED_FIELDS: Final = ("input_ids", "attention_mask", "position_ids", "loss_mask")
"""What every text batch carries in `values`."""
TOKEN_FIELDS: Final = (
    *REQUIRED_FIELDS, "old_log_probs", "log_probs", "ref_log_probs", "teacher_log_probs", "rollout_log_probs",
    "advantages", "returns", "values", "token_level_scores", "weights",
)  # fmt: skip
"""Fields aligned to the tokens, shape (B, T): they are cut and padded together."""
ALIASES: Final = {"reward": "rewards", "old_log_prob": "old_log_probs", "ref_log_prob": "ref_log_probs"}
NOTHING_IN_PADDING: Final = ("advantages", "returns", "token_level_scores", "weights")


class View(MutableMapping[str, Any]):
    """One of the two faces of a batch; it reads and writes the batch itself, so that they cannot disagree."""

    def __init__(
        self,
        store: dict[str, Any],
        read: Callable[[str], Any],
        write: Callable[[str, Any], None],
        delete: Callable[[str], None],
    ) -> None:
        self._store, self._read, self._write, self._delete = store, read, write, delete

    def __getitem__(self, name: str) -> Any:
        return self._read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._write(name, value)

    def __delitem__(self, name: str) -> None:
        self._read(name)
        self._delete(name)

    def __contains__(self, name: object) -> bool:
        try:
            self._read(str(name))
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)

    def __repr__(self) -> str:
        return repr(self._store)


def stripped(
    values: dict[str, Tensor],
    pad_token_id: int | None,
    fields: Sequence[str] | None,
    anchor_field: str,
    limit: int,
    *,
    left: bool,
) -> dict[str, Tensor]:
    """Return tensors without the columns on one side that are padding in every row; with none, the same dictionary."""
    anchor = values.get(ALIASES.get(anchor_field, anchor_field))
    if anchor is None or anchor.dim() != 2 or not anchor.shape[0] or not anchor.shape[1]:
        return values
    mask = values.get("attention_mask")
    if mask is not None and mask.shape == anchor.shape:
        real_BT = mask != 0
    elif pad_token_id is not None:
        real_BT = anchor != pad_token_id
    else:
        raise ValueError(f"without a mask as wide as {anchor_field!r}, padding is found by id: give pad_token_id")
    width = anchor.shape[1]
    columns = real_BT.any(0).nonzero().flatten()
    count = width - 1  # where nothing is real, one column is kept
    if len(columns):
        count = int(columns[0]) if left else width - 1 - int(columns[-1])
    count = count if limit < 0 else min(count, limit)
    if not count:
        return values
    named = None if fields is None else {anchor_field, *TOKEN_FIELDS, *(ALIASES.get(name, name) for name in fields)}
    kept = slice(count, None) if left else slice(0, width - count)
    return {
        name: value[:, kept]
        if value.dim() > 1 and value.shape[1] == width and (named is None or name in named)
        else value
        for name, value in values.items()
    }


def row_of(values: Mapping[str, Tensor], metadata: Mapping[str, Any], size: int, i: int) -> Trajectory:
    """Return row i of `size` as a trajectory."""
    trajectory = Trajectory()
    real = values["attention_mask"][i] != 0 if "attention_mask" in values else slice(None)
    per_row = metadata.get("advantages")
    for name, value in values.items():
        if name == "input_ids":
            trajectory.tokens = value[i][real].tolist()
        elif name == "loss_mask":
            trajectory.loss_mask = value[i][real].long().tolist()
        elif name in ("attention_mask", "position_ids", "is_padding") or (name == "advantages" and per_row is not None):
            continue
        elif name in PER_TOKEN.values():
            short = next(short for short, long in PER_TOKEN.items() if long == name)
            trajectory[short] = value[i][real].tolist()
        else:
            trajectory[name] = value[i]
    for name, value in metadata.items():
        if isinstance(value, Tensor) and value.dim() == 1 and len(value) == size:
            trajectory[{"rewards": "reward", "advantages": "advantage"}.get(name, name)] = value[i].item()
        elif isinstance(value, list | np.ndarray) and len(value) == size:
            trajectory[name] = value[i]
    return trajectory
