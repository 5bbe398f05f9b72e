"""Prompts from files: JSON lines, CSV and parquet, by any column; every mistake in one sentence that names the row."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from etude.errors import ConfigError, DataError
from etude.rollouts.sources import make_tasks
from etude.rollouts.tasks import PromptFile, Task

ROWS = [
    {"question": "1+1=", "solution": "2", "uid": "a", "data_source": "sums"},
    {"question": "2+2=", "solution": "4", "uid": "b", "data_source": "sums"},
]
KEYS = {"prompt_key": "question", "answer_key": "solution", "id_key": "uid"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_each_kind_of_file_gives_the_same_tasks(tmp_path: Path, kind: str) -> None:
    tasks = PromptFile(write(tmp_path / f"rows.{kind}", ROWS), **KEYS)
    assert list(tasks) == [
        Task("1+1=", "2", "a", {"data_source": "sums"}),
        Task("2+2=", "4", "b", {"data_source": "sums"}),
    ]


def test_several_files_are_one_source_and_a_file_may_be_named_alone(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, [{"prompt": name}] * 2) for name in ("a.jsonl", "b.csv", "c.parquet")]
    tasks = make_tasks({"type": "file", "params": {"path": paths}})
    assert [(task.prompt, task.id) for task in tasks] == [
        (name, str(number)) for number, name in enumerate(["a.jsonl"] * 2 + ["b.csv"] * 2 + ["c.parquet"] * 2)
    ]
    assert [task.prompt for task in make_tasks(paths[1])] == ["b.csv"] * 2


def test_what_only_parquet_can_hold_is_kept_as_text(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "asked": datetime(2026, 1, 2), "parts": [Decimal("1.5"), None]}
    (task,) = PromptFile(write(tmp_path / "rows.parquet", [row]))
    assert task.metadata == {"asked": "2026-01-02 00:00:00", "parts": ["1.5", None]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_prompt_may_be_chat_messages(tmp_path: Path, kind: str) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    (task,) = PromptFile(write(tmp_path / f"rows.{kind}", [{"prompt": messages}]))
    assert task.prompt == "hello" and task.messages == tuple(messages)


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("absent.jsonl", None, {}, "absent.jsonl cannot be read: No such file"),
        ("absent.csv", None, {}, "absent.csv cannot be read: No such file"),
        ("absent.parquet", None, {}, "absent.parquet cannot be read: no such file"),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n', {}, "bad.jsonl, line 2: Expecting value"),
        ("bad.parquet", "PAR1 or not", {}, "bad.parquet: not a readable parquet file"),
        ("bad.csv", "prompt,answer\na,1\nb\n", {}, "bad.csv, row 2: it has not one value for each of prompt, answer"),
        ("empty.jsonl", "\n", {}, "empty.jsonl has no prompts"),
        ("empty.csv", "prompt,answer\n", {}, "empty.csv has no prompts"),
        ("rows.csv", "text,answer\na,1\n", {}, "rows.csv, row 1 must be a text or a mapping with the key 'prompt'"),
        ("rows.csv", "prompt,answer\na,1\n", {"answer_key": "gold"}, "rows.csv, row 1 has no 'gold'; it has 'prompt'"),
        (
            "rows.jsonl",
            "1+1=\n",
            {"prompt_key": "question"},
            "rows.jsonl, line 1 has no 'question'; it is the text '1\\+1='",
        ),
        ("rows.jsonl", '{"prompt": 3}', {}, "rows.jsonl, line 1: 'prompt' must be a text"),
        ("rows.jsonl", '{"prompt": [{"role": "user"}]}', {}, "rows.jsonl, line 1: a chat message has the texts"),
        ("rows.jsonl", "[1, 2]\n\n{}", {}, "rows.jsonl, line 3 must be a text or a mapping"),
    ],
)
def test_a_mistake_is_one_sentence_with_file_and_row(
    tmp_path: Path, name: str, content: str | None, options: Any, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message.replace(".", r"\.")) as failed:
        PromptFile(tmp_path / name, **options)
    assert "\n" not in str(failed.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.jsonl").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(DataError, match="no text in UTF-8"):
        PromptFile(tmp_path / "image.jsonl")
    with pytest.raises(ConfigError, match="max_prompt_length must be at least 1"):
        PromptFile(tmp_path / "image.jsonl", max_prompt_length=0)
