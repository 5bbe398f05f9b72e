"""Rollouts together: a Batch is many trajectories as tensors.

Shape letters: B rows, T tokens (or steps). A text batch is right padded and every tensor is aligned to the tokens:
what belongs to token t, its log-probability included, stands in column t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.errors import DataError
from etude.types.fields import ALIASES, NOTHING_IN_PADDING, REQUIRED_FIELDS, TOKEN_FIELDS, View, row_of, stripped
from etude.types.trajectory import PER_TOKEN, Trajectory, token_columns, token_numbers


class Batch:
    """Stacked trajectories: `values` hold tensors of shape (B, ...), `metadata` everything else.

    Lists and tensors of length B in `metadata` belong to the rows and follow them; anything else belongs to the batch.
    The two faces are kept in step:

    - `metadata["rewards"]` is a 1-D tensor; `reward` and `rewards` name it on either side;
    - `metadata["advantages"]` is a 1-D tensor, `values["advantages"]` the same spread over the tokens of the loss mask
      (B, T). Setting one sets the other; advantages set token by token read per row as their mean over the mask;
    - `old_log_prob` and `ref_log_prob` are `old_log_probs` and `ref_log_probs`; `log_probs` reads the old ones until it
      is set itself;
    - `metadata["batch_size"]` is the number of rows.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Tensor] = {}
        self._metadata: dict[str, Any] = {}
        for name, value in (values or {}).items():
            self._set_value(name, value)
        for name, value in (metadata or {}).items():
            self._set_metadata(name, value)

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """Return a batch as it is, or make one of a dictionary: tensors become values, the rest metadata."""
        if isinstance(batch, Batch):
            return batch
        if not isinstance(batch, Mapping):
            raise DataError(f"a Batch or a dictionary is needed, got {type(batch).__name__}")
        values = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        return cls(values, {name: value for name, value in batch.items() if name not in values})

    @property
    def values(self) -> MutableMapping[str, Any]:
        """The tensors, shape (B, ...)."""
        return View(self._values, self._get_value, self._set_value, self._delete)

    @property
    def metadata(self) -> MutableMapping[str, Any]:
        """Everything else: rewards, identities of rows, and facts about the batch."""
        return View(self._metadata, self._get_metadata, self._set_metadata, self._delete)

    def __len__(self) -> int:
        for value in self._values.values():
            return value.shape[0]
        rewards = self._metadata.get("rewards")
        return 0 if rewards is None else rewards.shape[0]

    def __getitem__(self, name: str) -> Any:
        return self._get_value(name) if name in self.values else self._get_metadata(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._set_value(name, value) if isinstance(value, Tensor) else self._set_metadata(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self.values or name in self.metadata

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self._values.items())
        return f"Batch({len(self)} rows; {shapes}; metadata {', '.join(self._metadata)})"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a tensor or a piece of metadata, or the default."""
        try:
            return self[name]
        except KeyError:
            return default

    def keys(self) -> list[str]:
        """Return the names in `values` and `metadata`."""
        return list(dict.fromkeys((*self._values, *self._metadata)))

    # ---- two faces of one thing ----------------------------------------------------------------------------------

    def _get_value(self, name: str) -> Any:
        name = ALIASES.get(name, name)
        if name == "rewards":
            return self._metadata[name]
        if name == "log_probs" and name not in self._values:
            name = "old_log_probs"
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(f"the batch has no values[{name!r}]; it has {', '.join(self._values) or 'none'}") from None

    def _set_value(self, name: str, value: Any) -> None:
        name = ALIASES.get(name, name)
        if name == "rewards" or (name == "advantages" and _dim(value) == 1):
            self._set_metadata(name, value)
            return
        value = _tensor(name, value)
        lengths = {key: tensor.shape[0] for key, tensor in self._values.items() if key != name}
        lengths[name] = value.shape[0]
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the tensors of a batch must have one length, got {lengths}")
        self._values[name] = value
        if name == "advantages":
            self._metadata.pop("advantages", None)
        elif name == "loss_mask" and "advantages" in self._metadata:
            self._spread_advantages()

    def _get_metadata(self, name: str) -> Any:
        name = ALIASES.get(name, name)
        if name == "batch_size":
            return len(self)
        if name == "advantages" and name not in self._metadata and name in self._values:
            return self._advantages_of_rows()
        try:
            return self._metadata[name]
        except KeyError:
            raise KeyError(
                f"the batch has no metadata[{name!r}]; it has {', '.join(self._metadata) or 'none'}"
            ) from None

    def _set_metadata(self, name: str, value: Any) -> None:
        name = ALIASES.get(name, name)
        if name == "batch_size":
            if value != len(self):
                raise ValueError(f"the batch has {len(self)} rows, so its batch_size cannot be {value}")
            return
        if name in ("rewards", "advantages"):
            value = _row_numbers(name, value)
            if value.shape[0] != len(self) and (self._values or name == "advantages"):
                raise ValueError(f"{name} has {value.shape[0]} numbers for a batch of {len(self)} rows")
            for tensor in self._values.values():
                value = value.to(tensor.device)
                break
        self._metadata[name] = value
        if name == "advantages":
            self._spread_advantages()

    def _delete(self, name: str) -> None:
        name = ALIASES.get(name, name)
        self._values.pop(name, None)
        self._metadata.pop(name, None)

    def _spread_advantages(self) -> None:
        advantages_B = self._metadata["advantages"]
        mask_BT = self._mask()
        if mask_BT is None:
            self._values["advantages"] = advantages_B
        else:
            self._values["advantages"] = torch.where(mask_BT, advantages_B[:, None], 0.0)

    def _advantages_of_rows(self) -> Tensor:
        advantages_BT, mask_BT = self._values["advantages"], self._mask()
        if mask_BT is None:
            return advantages_BT.flatten(1).mean(1)
        total_B = torch.where(mask_BT, advantages_BT, 0.0).sum(1)
        return total_B / mask_BT.sum(1).clamp(min=1)

    def _mask(self) -> Tensor | None:
        for name in ("loss_mask", "attention_mask"):
            if name in self._values:
                return self._values[name] != 0
        return None

    @property
    def is_padding(self) -> Tensor:
        """Which rows are only there to fill the batch, shape (B,)."""
        found = self._values.get("is_padding")
        if found is not None:
            return found.bool()
        device = next((value.device for value in self._values.values()), None)
        return torch.zeros(len(self), dtype=torch.bool, device=device)

    def require(self, *names: str) -> Batch:
        """Raise an error that names the first missing field (of `REQUIRED_FIELDS`, unless others are given)."""
        for name in names or REQUIRED_FIELDS:
            if name not in self:
                raise DataError(f"the batch lacks the required field {name!r}; it has {', '.join(self.keys())}")
        return self

    # ---- rows ----------------------------------------------------------------------------------------------------

    def copy(self) -> Batch:
        """Return a batch of its own with the same tensors."""
        return self._with(dict(self._values), dict(self._metadata))

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on another device."""

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return self._mapped(move, move)

    def to_dict(self) -> dict[str, Any]:
        """Return values and metadata in one dictionary; metadata wins where both have a name."""
        return {**self._values, **self._metadata}

    def select(self, indices: Sequence[int] | Tensor | slice) -> Batch:
        """Return the rows at `indices` (or where a boolean tensor is true), in that order."""
        rows = torch.arange(len(self))
        if isinstance(indices, slice):
            rows = rows[indices]
        else:
            index = torch.as_tensor(indices).cpu()
            rows = rows[index if index.numel() else index.long()]
        size, order = len(self), rows.tolist()

        def pick(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == size:
                return value[rows.to(value.device)]
            if isinstance(value, np.ndarray) and value.ndim and len(value) == size:
                return value[order]
            return [value[i] for i in order] if isinstance(value, list) and len(value) == size else value

        return self._mapped(pick, pick)

    def reorder(self, permutation: Sequence[int] | Tensor) -> Batch:
        """Return the rows in another order."""
        order = [int(i) for i in permutation]
        if sorted(order) != list(range(len(self))):
            raise ValueError(f"{len(order)} indices do not reorder {len(self)} rows: each row is needed once")
        return self.select(order)

    def split(self, rows: int) -> list[Batch]:
        """Return the batch in parts of at most `rows` rows."""
        return [self.select(slice(start, start + rows)) for start in range(0, len(self), rows)]

    def pad_to_world_size(self, world_size: int) -> Batch:
        """Return the batch with rows added until `world_size` divides their number.

        Added rows repeat real ones, so that any policy can compute them, but carry no weight: their loss mask and
        rewards are 0, `is_padding` marks them, and each is a group of its own.
        """
        size = len(self)
        added = -size % world_size if size else 0
        if not added:
            return self
        padded = self.select([*range(size), *(i % size for i in range(added))])
        is_padding = torch.cat((self.is_padding, torch.ones(added, dtype=torch.bool, device=self.is_padding.device)))
        for name, value in padded._values.items():
            if name.endswith("loss_mask") or name in NOTHING_IN_PADDING:
                value[size:] = 0
        for name in ("rewards", "advantages"):
            if name in padded._metadata:
                padded._metadata[name][size:] = 0
        if isinstance(groups := padded._metadata.get("group_id"), list):
            groups[size:] = [f"padding-{i}" for i in range(size, size + added)]
        padded._values["is_padding"] = is_padding
        return padded

    @staticmethod
    def concatenate(batches: Sequence[Batch]) -> Batch:
        """Return the rows of several batches as one, widened on the right to the longest."""
        if not batches:
            raise ValueError("there are no batches to concatenate")
        width = max((_width(batch) for batch in batches), default=0)
        wide = [_widened(batch, width) for batch in batches]
        for batch in wide:
            _same_names((set(wide[0].keys()), set(batch.keys())), "batches")
        values = {name: torch.cat([batch._values[name] for batch in wide]) for name in wide[0]._values}
        metadata: dict[str, Any] = {}
        for name, first in wide[0]._metadata.items():
            found = [batch._metadata[name] for batch in wide]
            if isinstance(first, Tensor) and first.dim():
                metadata[name] = torch.cat(found)
            elif all(isinstance(item, list) and len(item) == len(b) for item, b in zip(found, wide, strict=True)):
                metadata[name] = [item for items in found for item in items]
            else:
                metadata[name] = first
        return wide[0]._with(values, metadata)

    def _mapped(self, values: Callable[[Tensor], Tensor], metadata: Callable[[Any], Any]) -> Batch:
        return self._with(
            {name: values(value) for name, value in self._values.items()},
            {name: metadata(value) for name, value in self._metadata.items()},
        )

    @classmethod
    def _with(cls, values: dict[str, Tensor], metadata: dict[str, Any]) -> Batch:
        made = cls()
        made._values, made._metadata = values, metadata
        return made

    # ---- columns -------------------------------------------------------------------------------------------------

    @staticmethod
    def remove_redundant_left_padding(
        data: Batch, pad_token_id: int | None = None, fields: Sequence[str] | None = None,
        anchor_field: str = "input_ids", max_strip_threshold: int = -1,
    ) -> Batch:  # fmt: skip
        """Return the batch without the columns on the left that are padding in every row.

        Padding is where the attention mask is 0; only a batch without a mask of the anchor's shape goes by the id, so
        that an end-of-sequence token that doubles as the pad token is never lost. The same columns are cut from
        `fields` (None: every tensor as wide as the anchor) and always from the fields aligned to the tokens.
        `max_strip_threshold` is the greatest number of columns to cut, -1 for any. The last column is never cut.
        """
        return data._stripped(pad_token_id, fields, anchor_field, max_strip_threshold, left=True)

    @staticmethod
    def remove_redundant_right_padding(
        data: Batch, pad_token_id: int | None = None, fields: Sequence[str] | None = None,
        anchor_field: str = "input_ids", max_strip_threshold: int = -1,
    ) -> Batch:  # fmt: skip
        """Return the batch without the columns on the right that are padding in every row (see the left variant)."""
        return data._stripped(pad_token_id, fields, anchor_field, max_strip_threshold, left=False)

    def _stripped(self, *how: Any, left: bool) -> Batch:
        found = stripped(self._values, *how, left=left)
        return self if found is self._values else self._with(found, dict(self._metadata))

    # ---- trajectories --------------------------------------------------------------------------------------------

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], model_tag: str | None = None, *, pad_token_id: int = 0
    ) -> Batch:
        """Stack trajectories, padded on the right.

        Numbers per token (logprobs, values, returns, token_level_scores, ...) become tensors aligned to the tokens,
        other tensors are stacked (and padded in their first dimension), anything else becomes a list in `metadata`.
        """
        if not trajectories:
            raise ValueError("a batch needs at least one trajectory")
        for trajectory in trajectories:
            _same_names((set(trajectories[0].keys()), set(trajectory.keys())), "trajectories")
        values = token_columns(trajectories, pad_token_id)
        width = values["loss_mask"].shape[1] if "loss_mask" in values else 0
        unpaid = next((i for i, trajectory in enumerate(trajectories) if trajectory.reward is None), None)
        if unpaid is not None:
            raise ValueError(f"trajectory {unpaid} has no reward: reward it, or leave it out of the batch")
        rewards = [float(trajectory.reward) for trajectory in trajectories]
        metadata: dict[str, Any] = {"rewards": rewards, "is_val": [bool(t.is_val) for t in trajectories]}
        for name in trajectories[0].extra_fields:
            column = [trajectory.extra_fields[name] for trajectory in trajectories]
            if any(value is None for value in column):
                metadata[name] = column
            elif name in PER_TOKEN and width:
                values[PER_TOKEN[name]] = token_numbers(name, column, trajectories, width)
            elif name == "advantage":
                metadata["advantages"] = column
            elif all(isinstance(value, Tensor) and value.dim() for value in column):
                values[name] = torch.nn.utils.rnn.pad_sequence(column, batch_first=True)
            else:
                metadata[name] = column
        if model_tag is not None:
            metadata["model_tag"] = model_tag
        return cls(values, metadata)

    def to_trajectories(self) -> list[Trajectory]:
        """Return the rows as trajectories: the inverse of `from_trajectories`, less rows that only pad."""
        rows = (~self.is_padding).nonzero().flatten().tolist()
        return [row_of(self._values, self._metadata, len(self), i) for i in rows]


def create_dummy_batch(batch_size: int = 4, length: int = 8, *, vocabulary: int = 32, seed: int = 0) -> Batch:
    """Return a small text batch with every required field, two rows to a group, for tests and examples."""
    generator = torch.Generator().manual_seed(seed)
    trajectories = []
    for i in range(batch_size):
        count = length - i % 3 if length > 3 else length
        prompt = max(1, count // 3)
        tokens = torch.randint(3, vocabulary, (count,), generator=generator).tolist()
        logprobs = (-torch.rand(count - prompt, generator=generator)).tolist()
        mask = [0] * prompt + [1] * (count - prompt)
        reward = float(torch.rand((), generator=generator))
        extra = {"group_id": i // 2, "run_id": i % 2, "logprobs": [0.0] * prompt + logprobs}
        trajectories.append(Trajectory(tokens, mask, reward, extra_fields=extra))
    return Batch.from_trajectories(trajectories)


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else np.ndim(value)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"values[{name!r}] must be a tensor; keep other things in metadata") from None
    if not found.dim():
        raise ValueError(f"values[{name!r}] needs one entry per row, got a single number; keep it in metadata")
    return found


def _row_numbers(name: str, value: Any) -> Tensor:
    numbers = value if isinstance(value, Tensor) else torch.tensor([float(item) for item in value])
    if numbers.dim() != 1:
        raise ValueError(f"{name} needs one number per row, got shape {tuple(numbers.shape)}")
    return numbers if numbers.is_floating_point() else numbers.float()


def _same_names(names: tuple[set[str], set[str]], what: str) -> None:
    differ = sorted(names[0] ^ names[1])
    if differ:
        raise ValueError(f"{what} to be stacked must have the same fields; {differ[0]!r} is not in all of them")


def _width(batch: Batch) -> int:
    return next(
        (batch._values[n].shape[1] for n in TOKEN_FIELDS if n in batch._values and _dim(batch._values[n]) > 1), 0
    )


def _widened(batch: Batch, width: int) -> Batch:
    own = _width(batch)

    def widen(value: Tensor) -> Tensor:
        if value.dim() < 2 or value.shape[1] != own or own == width:
            return value
        return torch.cat((value, value.new_zeros(value.shape[0], width - own, *value.shape[2:])), 1)

    return batch._mapped(widen, lambda value: value)
