"""Text to learn from: completions to imitate, or pairs of which one is preferred; tokenised by the policy itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from etude.data.lines import read_json_lines
from etude.data.map import MapData
from etude.errors import DataError
from etude.types import DataSpec
from etude.types.protocols import Place

if TYPE_CHECKING:
    from etude.trainer import Trainer

_SIDES = ("chosen", "rejected")


class TextData:
    """Rows with `prompt` and `completion`, or with `prompt`, `chosen` and `rejected`; the loss is on what follows.

    A `label` (true or false) beside each completion says whether it is desirable, for `kto`; a `margin` beside each
    pair by how much its chosen is to lead, for `reward_model`.

    Args:
        rows: The rows themselves, or the path of a file with one JSON object in each line.
        chat: Put each prompt into the model's chat template as the user's message.
        max_length: Tokens of a row at most; longer ones lose their end.
        end: Let what follows the prompt end with the model's end token.
    """

    spec: DataSpec | None = None

    def __init__(
        self,
        rows: str | list[dict[str, Any]],
        chat: bool = False,
        max_length: int = 1024,
        end: bool = True,
    ) -> None:
        self.rows = _read(rows) if isinstance(rows, str | Path) else list(rows)
        if not self.rows:
            raise DataError("there are no rows of text to train on")
        self.keys = _SIDES if "chosen" in self.rows[0] else ("completion",)
        for number, row in enumerate(self.rows):
            for key in ("prompt", *self.keys):
                if not isinstance(row.get(key), str):
                    raise DataError(f"row {number} of the text has no {key!r}; it has {', '.join(sorted(row))}")
        self.number = _number(self.rows, "margin" if self.keys == _SIDES else "label")
        self.chat, self.max_length, self.end = chat, max_length, end
        self._inner: MapData | None = None
        self._place: Place | None = None

    def open(self, place: Place) -> None:
        """Note the place; the rows are tokenised once the policy is there."""
        self._place = place
        if self._inner is not None:
            self._inner.open(place)

    def attach(self, trainer: Trainer) -> None:
        """Tokenise the rows as the policy reads them."""
        self.tokenise(trainer.policy)
        if self._place is not None:
            self._ready().open(self._place)

    def tokenise(self, policy: Any) -> None:
        """Tokenise the rows as a policy reads them."""
        if not callable(getattr(policy, "encode", None)):
            raise DataError(f"text needs a policy that reads it; {type(policy).__name__} has no encode()")
        samples: list[dict[str, Any]] = [self._encode(policy, row) for row in self.rows]
        if self.number is not None:
            for sample, row in zip(samples, self.rows, strict=True):
                sample[self.number] = float(row[self.number])
        if self.number == "label":
            for sample, row, other in zip(samples, self.rows, _of_other_prompts(self.rows), strict=True):
                found = self._encode(policy, {"prompt": row["prompt"], "completion": other["completion"]})
                sample |= {f"mismatched_{name}": value for name, value in found.items()}
        self._inner = MapData(samples, Padding(policy.pad_token_id))

    def _encode(self, policy: Any, row: Mapping[str, str]) -> dict[str, list[int]]:
        prompt = row["prompt"]
        head = policy.encode_chat([{"role": "user", "content": prompt}]) if self.chat else policy.encode(prompt)
        encoded: dict[str, list[int]] = {}
        for key in self.keys:
            tail = encode_continuation(policy, row[key]) + ([policy.eos_token_id] if self.end else [])
            prefix = "" if key == "completion" else f"{key}_"
            encoded[f"{prefix}input_ids"] = (head + tail)[: self.max_length]
            # Nothing predicts the first token of a row: it is context, whosever it is.
            context = max(1, len(head))
            encoded[f"{prefix}loss_mask"] = ([0] * context + [1] * (len(head) + len(tail) - context))[: self.max_length]
        return encoded

    def _ready(self) -> MapData:
        if self._inner is None:
            raise DataError("the text has not been tokenised; call tokenise(policy) first")
        return self._inner

    def take(self, step: int) -> Sequence[Any]:
        """Return this rank's micro-batches of one step."""
        return self._ready().take(step)

    def ids(self, step: int) -> Sequence[Any]:
        """Return the row numbers of each micro-batch."""
        return self._ready().ids(step)

    def epochs(self, step: int) -> float:
        """Return how often every row has been seen."""
        place = self._place or Place()
        return step * place.global_batch / len(self.rows)

    def close(self) -> None:
        """Release workers."""
        if self._inner is not None:
            self._inner.close()

    @property
    def evaluation_source(self) -> MapData:
        """What one ordered pass over the rows is read from."""
        return self._ready()


def encode_continuation(policy: Any, text: str) -> list[int]:
    """Return the tokens of what follows a prompt: without those that begin a text, if the policy tells them apart."""
    encode = getattr(policy, "encode_continuation", None) or policy.encode
    tokens: list[int] = encode(text)
    return tokens


class Padding:
    """Pads rows of tokens on the right, with masks beside them."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Make one batch."""
        batch: dict[str, Tensor] = {}
        for name, first in samples[0].items():
            if isinstance(first, float):
                batch[name] = torch.tensor([sample[name] for sample in samples])
                continue
            fill = self.pad_token_id if name.endswith("input_ids") else 0
            rows = [torch.tensor(sample[name]) for sample in samples]
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
            if name.endswith("input_ids"):
                kept = [torch.ones(len(row), dtype=torch.int64) for row in rows]
                mask = name.replace("input_ids", "attention_mask")
                batch[mask] = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True)
        return batch


def _number(rows: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """Return the name of a number that every row has, or None if none has it; other columns are left alone."""
    kinds, wanted = ((bool,), "true or false") if name == "label" else ((int, float), "a number")
    fits = [isinstance(row.get(name), kinds) for row in rows]
    if any(fits) and not all(fits):
        at = fits.index(False)
        raise DataError(f"{name!r} of row {at} of the text must be {wanted}, got {rows[at].get(name)!r}")
    return name if all(fits) else None


def _of_other_prompts(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return for each row the next one, round and round, with another prompt; with one prompt alone, the next."""
    count = len(rows)
    found = [(at + 1) % count for at in range(count)]
    for at in reversed(range(2 * count)):  # twice around: the last rows look past the end
        here, after = at % count, (at + 1) % count
        same = rows[here]["prompt"] == rows[after]["prompt"]
        found[here] = found[after] if same and rows[found[after]]["prompt"] != rows[here]["prompt"] else after
    return [rows[at] for at in found]


def _read(path: str | Path) -> list[dict[str, Any]]:
    rows = []
    for number, row in read_json_lines(path, "text"):
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} is no JSON object")
        rows.append(row)
    return rows
