"""What generation needs of a model: the prompts once, then one token per row and call; and the way any model can.

Prompts stand right-aligned (padded on the left), so that every row's next token goes to the same column.

Shape letters: P prompts, B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Decoder(Protocol):
    """One batch of rows being completed."""

    can_join: bool
    """Whether rows of another decoder of the same model can be taken in."""

    def prefill(self, tokens_PT: Tensor, lengths: Sequence[int], room: int) -> Tensor:
        """Compute the prompts, leaving room for so many tokens, and return the logits of the next token (P, V)."""

    def expand(self, prompts: Tensor) -> None:
        """Give each row the prompt of its number; called once, after `prefill`."""

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row and return the logits of the next (B, V)."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""

    def another(self, rows: int) -> Decoder:
        """Return a decoder of the same weights, for so many rows with those it may join, that has read nothing."""

    def join(self, other: Any, room: int) -> None:
        """Take in the rows of another decoder after its own, with room for so many tokens more."""


class CachedDecoder:
    """Decodes with the model's own forward pass and cache: any causal model of transformers, at its own speed."""

    can_join = False  # a cache may be of any kind

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._mask: Tensor
        self._positions: Tensor

    def prefill(self, tokens_PT: Tensor, lengths: Sequence[int], room: int) -> Tensor:
        """Compute the prompts and return the logits of the next token."""
        width = tokens_PT.shape[1]
        ends = torch.tensor(lengths, device=tokens_PT.device)
        columns = torch.arange(width, device=tokens_PT.device)
        self._mask = (columns[None, :] >= width - ends[:, None]).long()
        positions = (self._mask.cumsum(1) - 1).clamp_(min=0)
        self._positions = ends
        return self._run(tokens_PT, positions)

    def expand(self, prompts: Tensor) -> None:
        """Give each row the prompt of its number."""
        self.keep(prompts)

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row and return the logits of the next."""
        self._mask = torch.cat((self._mask, self._mask.new_ones(len(self._mask), 1)), 1)
        logits = self._run(tokens_B[:, None], self._positions[:, None])
        self._positions = self._positions + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self._mask, self._positions = self._mask[rows], self._positions[rows]
        self._cache.reorder_cache(rows)

    def another(self, rows: int) -> CachedDecoder:
        """Return a decoder of the same model that has read nothing."""
        return CachedDecoder(self._model)

    def join(self, other: Any, room: int) -> None:
        """Refuse: caches of other kinds than Llama's are not known here."""
        raise NotImplementedError

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        out = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = out.past_key_values
        logits: Tensor = out.logits[:, -1]
        return logits
