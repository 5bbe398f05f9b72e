"""Text with labels and margins: rows for KTO and reward models."""

from __future__ import annotations

from typing import Any

import pytest

from etude.data.text import TextData
from etude.errors import DataError
from etude.types.protocols import Place


class Letters:
    """Reads text letter by letter."""

    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def served(rows: list[dict[str, Any]]) -> dict[str, Any]:
    data = TextData(rows)
    data.tokenise(Letters())
    data.open(Place(batch_size=len(rows), shuffle=False))
    data._ready().open(Place(batch_size=len(rows), shuffle=False))
    (batch,) = data.take(0)
    found: dict[str, Any] = batch
    return found


def read(batch: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return prompt and completion of each row as text."""
    found = []
    for ids, mask, real in zip(*(batch[f"{prefix}{n}"].tolist() for n in ("input_ids", "loss_mask", "attention_mask")),
                               strict=True):  # fmt: skip
        pieces = ["", ""]
        for token, counted, there in zip(ids, mask, real, strict=True):
            pieces[counted] += chr(token) if there and token > 1 else ""
        found.append((pieces[0], pieces[1]))
    return found


def test_labelled_rows_bring_the_completion_of_another_prompt() -> None:
    texts = [("a", "one", True), ("a", "two", False), ("b", "three", True), ("a", "four", False)]
    batch = served([{"prompt": p, "completion": c, "label": good} for p, c, good in texts])
    assert batch["label"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert read(batch) == [(p, c) for p, c, _ in texts]
    assert read(batch, "mismatched_") == [("a", "three"), ("a", "three"), ("b", "four"), ("a", "three")]


def test_one_prompt_alone_takes_the_next_completion() -> None:
    batch = served([{"prompt": "a", "completion": c, "label": True} for c in ("x", "y", "z")])
    assert [completion for _, completion in read(batch, "mismatched_")] == ["y", "z", "x"]


def test_pairs_may_bring_a_margin() -> None:
    rows = [{"prompt": "a", "chosen": "x", "rejected": "y", "margin": m} for m in (1, 0.5)]
    assert served(rows)["margin"].tolist() == [1.0, 0.5]
    assert "margin" not in served([{"prompt": "a", "chosen": "x", "rejected": "y"}])


def test_columns_that_are_no_labels_are_left_alone_and_gaps_are_named() -> None:
    assert set(served([{"prompt": "a", "completion": "x", "label": "news"}])) == {
        "input_ids", "attention_mask", "loss_mask",
    }  # fmt: skip
    with pytest.raises(DataError, match="'label' of row 1 of the text must be true or false, got None"):
        TextData([{"prompt": "a", "completion": "x", "label": True}, {"prompt": "a", "completion": "x"}])
