"""Which tokens of a text batch must be computed.

No padding, nothing after the last token that counts, and a prompt that several rows share only once.
Rows of one prompt are laid out behind it in one line, each seeing the prompt and itself: the numbers are those of the
rows computed one by one, for a fraction of the tokens (eight completions of 4 tokens to a prompt of 12: 44 tokens
instead of 128). Long completions are packed instead, see `packed`.

Shape letters: B rows of the batch, T tokens, R lines computed, W their width, N tokens that count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.errors import DataError
from etude.policies.language.packed import Packing

PACK_ABOVE = 256
"""Lines wider than this are packed: below, masked attention costs less than taking the tokens apart."""
PACK_ROWS = 3
"""Text is packed if its rows are together at most so many times what must be computed: attention takes a copy of the
prompt's keys and values for every row, which for long prompts with short completions would be most of the memory."""
MAX_SHARED_WIDTH = 768
"""Rows of one prompt share a line up to this width: attention grows with its square, the saving only linearly."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What to compute, and where each result belongs."""

    tokens_RW: Tensor
    positions_RW: Tensor
    mask_R1WW: Tensor | None
    """True where a token sees another; None for plain causal lines, whose padding comes last and is seen by none."""
    source_N: Tensor
    """Where in the flattened (R * W) hidden states each counted token is predicted from."""
    target_N: Tensor
    """The counted tokens."""
    place_N: Tensor
    """Where in the flattened (B * T) batch they stand."""
    shape: tuple[int, int]
    """(B, T)."""
    packing: Packing | None = None
    """How to attend where everything is packed into one line."""


@dataclass(frozen=True, slots=True)
class _PackedRow:
    tokens: list[int]
    """What must be computed: everything before the last counted token."""
    prompt: int
    """Tokens before the first counted one."""
    counted: np.ndarray
    """Which of the tokens count, by their number in the row."""
    targets: list[int]
    places: np.ndarray


def lay_out(batch: Any, *, share: bool, device: torch.device, pack: bool = False) -> Layout:
    """Plan the computation of a batch with `input_ids`, and if it has them `attention_mask` and `loss_mask`."""
    ids = batch["input_ids"]
    if ids.dim() != 2:
        raise DataError(f"input_ids must have the shape (rows, tokens), got {tuple(ids.shape)}")
    rows = list(_rows(*(_array(batch, name, ids) for name in ("input_ids", "attention_mask", "loss_mask"))))
    shape = ids.shape[0], ids.shape[1]
    groups = list(_groups(rows, share))
    if pack and _is_worth_packing(groups):
        return _packed(groups, shape, device)
    lines = [line for group in groups for line in _lines(group)]
    width = max(map(_width, lines), default=0)
    tokens = np.zeros((len(lines), width), dtype=np.int64)
    positions = np.zeros((len(lines), width), dtype=np.int64)
    segments = np.full((len(lines), width), -1, dtype=np.int64)
    sources = []
    for number, line in enumerate(lines):
        offset = prompt = line[0].prompt
        tokens[number, :prompt] = line[0].tokens[:prompt]
        positions[number, :prompt] = np.arange(prompt)
        segments[number, :prompt] = 0
        for segment, row in enumerate(line, start=1):
            end = offset + len(row.tokens) - prompt
            tokens[number, offset:end] = row.tokens[prompt:]
            positions[number, offset:end] = np.arange(prompt, len(row.tokens))
            segments[number, offset:end] = segment
            # A token is predicted from the one before it: the first of a row from the end of the prompt.
            before = row.counted - 1
            sources.append(number * width + np.where(before < prompt, before, before - prompt + offset))
            offset = end
    order = [row for line in lines for row in line]
    is_shared = len(order) > len(lines)
    return Layout(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(positions).to(device),
        _mask(torch.from_numpy(segments).to(device)) if is_shared else None,
        torch.from_numpy(_join(sources)).to(device),
        *_targets(order, device),
        shape,
    )


def _targets(order: list[_PackedRow], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the counted tokens of rows in their order, and where in the batch they stand."""
    tokens = torch.tensor([token for row in order for token in row.targets], dtype=torch.int64, device=device)
    return tokens, torch.from_numpy(_join([row.places for row in order])).to(device)


def _is_worth_packing(groups: list[list[_PackedRow]]) -> bool:
    widths = [_width(group) for group in groups]
    goes_on = any(len(row.tokens) > row.prompt for group in groups for row in group)
    whole = sum(len(row.tokens) for group in groups for row in group)
    return goes_on and max(widths, default=0) > PACK_ABOVE and whole <= PACK_ROWS * sum(widths)


def _packed(groups: list[list[_PackedRow]], shape: tuple[int, int], device: torch.device) -> Layout:
    """Lay everything out in one line: each prompt, and behind it what its rows go on with."""
    tokens: list[int] = []
    positions, sources, prompts, owners, rests = [], [], [], [], []
    for number, group in enumerate(groups):
        prompt, start = group[0].prompt, len(tokens)
        tokens += group[0].tokens[:prompt]
        positions.append(np.arange(prompt))
        prompts.append(np.arange(start, start + prompt))
        for row in group:
            offset, before = len(tokens), row.counted - 1
            sources.append(np.where(before < prompt, start + before, before - prompt + offset))
            tokens += row.tokens[prompt:]
            positions.append(np.arange(prompt, len(row.tokens)))
            if len(tokens) > offset:
                owners.append(number)
                rests.append(np.arange(offset, len(tokens)))
    return Layout(
        torch.tensor([tokens], device=device),
        torch.from_numpy(_join(positions))[None].to(device),
        None,
        torch.from_numpy(_join(sources)).to(device),
        *_targets([row for group in groups for row in group], device),
        shape,
        Packing.of(prompts, owners, rests, device),
    )


def _array(batch: Any, name: str, ids: Tensor) -> np.ndarray | None:
    try:
        value = batch[name]
    except KeyError:
        return None
    if value is None:
        return None
    if value.shape != ids.shape:
        raise DataError(f"{name} has the shape {tuple(value.shape)}, but input_ids {tuple(ids.shape)}")
    value = value.detach().cpu()
    array: np.ndarray = (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # numpy knows no bfloat16
    return array


def _rows(ids: np.ndarray | None, attention: np.ndarray | None, loss: np.ndarray | None) -> Iterable[_PackedRow]:
    assert ids is not None
    for number, line in enumerate(ids):
        real = np.arange(line.size) if attention is None else np.flatnonzero(attention[number])
        counts = np.ones(real.size, dtype=bool) if loss is None else loss[number, real] != 0
        counts[:1] = False  # nothing predicts the first token
        counted = np.flatnonzero(counts)
        if counted.size:
            tokens = line[real[: counted[-1]]].tolist()
            yield _PackedRow(
                tokens, int(counted[0]), counted, line[real[counted]].tolist(), number * line.size + real[counted]
            )


def _groups(rows: list[_PackedRow], share: bool) -> Iterable[list[_PackedRow]]:
    """Return the rows of each prompt, which is all that precedes the first counted token."""
    groups: dict[Any, list[_PackedRow]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(tuple(row.tokens[: row.prompt]) if share else number, []).append(row)
    return groups.values()


def _lines(group: list[_PackedRow]) -> Iterable[list[_PackedRow]]:
    """Yield the rows of a prompt that share a line."""
    line, width = [group[0]], len(group[0].tokens)
    for row in group[1:]:
        own = len(row.tokens) - row.prompt
        if width + own > MAX_SHARED_WIDTH:
            yield line
            line, width, own = [], 0, len(row.tokens)
        line.append(row)
        width += own
    yield line


def _width(line: list[_PackedRow]) -> int:
    prompt = line[0].prompt
    return prompt + sum(len(row.tokens) - prompt for row in line)


def _mask(segments_RW: Tensor) -> Tensor:
    """Return who sees whom: what comes before, of the prompt (segment 0) and of one's own row."""
    mine, theirs = segments_RW[:, :, None], segments_RW[:, None, :]
    width = segments_RW.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=segments_RW.device).tril()
    # Padding (-1) sees padding, so that no line of the softmax is empty.
    return (((mine == theirs) | ((theirs == 0) & (mine >= 0))) & causal).unsqueeze(1)


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
