"""Padding of token ids: whole batches or bare tensors, to a common or a given length.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch import Tensor

from etude.types.batch import Batch
from etude.types.trajectory import compute_position_id_with_mask

__all__ = ["compute_position_id_with_mask", "padding_data"]

Truncation = Literal["left", "right", "error", "ignore"]
Tokens = TypeVar("Tokens", Batch, Tensor)


def padding_data(
    data: Tokens,
    max_length: int | None = None,
    pad_token_id: int = 0,
    left_pad: bool = False,
    truncation: Truncation = "error",
) -> Tokens:
    """Bring a batch, or token ids (B, T), to a length.

    Of a batch, every tensor as wide as `input_ids` is padded: the ids with the pad token, everything else with 0;
    without a `max_length` only the columns that are padding in every row go.

    Args:
        data: A batch or a tensor of ids.
        max_length: Length to reach; None keeps what is needed.
        pad_token_id: Id to fill with.
        left_pad: Pad on the left instead of on the right.
        truncation: What to do with more than `max_length`: cut on the left, cut on the right, raise an error, or
            leave it.
    """
    if isinstance(data, Tensor):
        if data.dim() != 2:
            raise ValueError(f"token ids have the shape (rows, tokens), got {tuple(data.shape)}")
        return data if max_length is None else _fit(data, max_length, pad_token_id, left_pad, truncation)
    data.require("input_ids")
    data = Batch.remove_redundant_left_padding(data, pad_token_id=pad_token_id)
    data = Batch.remove_redundant_right_padding(data, pad_token_id=pad_token_id)
    if max_length is None:
        return data
    width = data.values["input_ids"].shape[1]
    padded = data.copy()
    for name, value in data.values.items():
        if value.dim() > 1 and value.shape[1] == width:
            fill = pad_token_id if name == "input_ids" else 0
            padded.values[name] = _fit(value, max_length, fill, left_pad, truncation)
    advantages = data.to_dict().get("advantages")
    if advantages is not None and advantages.dim() == 1:  # by row: spread over the new mask
        padded.metadata["advantages"] = advantages
    return padded


def _fit(value_BT: Tensor, length: int, fill: int, left_pad: bool, truncation: Truncation) -> Tensor:
    width = value_BT.shape[1]
    if width < length:
        padding = value_BT.new_full((value_BT.shape[0], length - width, *value_BT.shape[2:]), fill)
        return torch.cat((padding, value_BT) if left_pad else (value_BT, padding), 1)
    if width == length or truncation == "ignore":
        return value_BT
    if truncation == "error":
        raise ValueError(f"{width} tokens do not fit into a length of {length}; choose truncation 'left' or 'right'")
    return value_BT[:, width - length :] if truncation == "left" else value_BT[:, :length]
