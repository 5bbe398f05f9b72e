"""Where prompts come from: lists, files, and tasks that can be checked.

A source has `__len__` and `__getitem__`, which returns a `Task`; one that can tell right from wrong has `score` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.data.rows import read_rows
from etude.errors import ConfigError, DataError, MissingExtraError
from etude.rng import fold


@dataclass(frozen=True)
class Task:
    """One prompt, and what is known of a good answer to it."""

    prompt: str
    answer: str = ""
    id: str = ""
    """Names the task in logs; completions of one task form a group."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()
    """The prompt as chat messages, if it was given as such; `prompt` is then what the last of them says."""


class Prompts(Sequence[Task]):
    """Tasks from a list of texts, or of mappings with `prompt` (a text or chat messages) and perhaps `answer`."""

    def __init__(self, prompts: Sequence[str | Mapping[str, Any] | Task]) -> None:
        self._tasks = [_as_task(prompt, index, f"prompt {index}") for index, prompt in enumerate(prompts)]
        if not self._tasks:
            raise DataError("there are no prompts; give at least one")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._tasks[index]


_KEYS = ("prompt", "answer", "id")


def _as_task(given: Any, index: int, place: str, keys: Sequence[str] = _KEYS) -> Task:
    """Return a task from what was given at a place; `keys` name its prompt, its answer and its id."""
    if isinstance(given, Task):
        return given
    prompt_key, answer_key, id_key = keys
    if isinstance(given, str):
        if prompt_key != _KEYS[0]:  # somebody who names a column expects rows: half a row is no prompt
            raise DataError(f"{place} has no {prompt_key!r}; it is the text {given!r:.200}")
        return Task(given, id=str(index))
    if not isinstance(given, Mapping) or prompt_key not in given:
        raise DataError(f"{place} must be a text or a mapping with the key {prompt_key!r}, got {given!r:.200}")
    for key, known in ((answer_key, "answer"), (id_key, "id")):
        if key != known and key not in given:
            raise DataError(f"{place} has no {key!r}; it has {', '.join(map(repr, given))}")
    prompt, messages = given[prompt_key], ()
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt, messages = _as_messages(prompt, place)
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{place}: {prompt_key!r} must be a text or a list of chat messages, got {prompt!r:.200}")
    answer, name = given.get(answer_key), given.get(id_key)
    rest = {key: value for key, value in given.items() if key not in keys}
    return Task(prompt, "" if answer is None else str(answer), str(index if name is None else name), rest, messages)


def _as_messages(given: Sequence[Any], place: str) -> tuple[str, Any]:
    for message in given:
        texts = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not texts:
            raise DataError(f"{place}: a chat message has the texts 'role' and 'content', got {message!r:.200}")
    return (given[-1]["content"] if given else ""), tuple(dict(message) for message in given)


class PromptFile(Prompts):
    """Tasks from files: JSON lines (or plain lines), CSV or parquet, told apart by how their names end.

    Args:
        path: The file, or several.
        prompt_key: Where a row has its prompt: a text, or a list of chat messages. Lines of plain text have no such
            place, and are refused where another than `prompt` is named.
        answer_key: Where it has the answer; rows may go without, unless another name is given.
        id_key: Where it has the name of the task; rows are counted where there is none, unless another name is given.
        max_prompt_length: Leave out prompts of more tokens; None keeps all. How many is said when drawing starts.
    """

    def __init__(
        self,
        path: str | Path | list[str],
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        id_key: str = "id",
        max_prompt_length: int | None = None,
    ) -> None:
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ConfigError(f"max_prompt_length must be at least 1, or null for no limit; got {max_prompt_length}")
        self.max_prompt_length = max_prompt_length
        tasks: list[Task] = []
        for one in path if isinstance(path, Sequence) and not isinstance(path, str) else [path]:
            before = len(tasks)
            for place, row in read_rows(one, "prompts", plain=True):
                tasks.append(_as_task(row, len(tasks), place, (prompt_key, answer_key, id_key)))
            if len(tasks) == before:
                raise DataError(f"{one} has no prompts; give at least one")
        super().__init__(tasks)


class Addition(Sequence[Task]):
    """Sums of two numbers. Half of the reward is for answering with a number, half for the right one."""

    def __init__(self, low: int = 1, high: int = 9, size: int = 512, seed: int = 0) -> None:
        self.low, self.high, self.size, self.seed = low, high, size, seed
        if not 0 <= low <= high or size < 1:
            raise ConfigError("addition needs 0 <= low <= high and a size of at least 1")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        a, b = (self.low + fold(self.seed, index, side) % (self.high - self.low + 1) for side in (0, 1))
        return Task(f"Question: What is {a}+{b}?\nAnswer:", str(a + b), f"{a}+{b}")

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        """Return 0.5 for an answer that begins with a number, and 0.5 more for the right one."""
        found = re.match(r"\s*(\d+)", text)
        right = found is not None and int(found[1]) == int(task.answer)
        return {"reward": 0.5 * (found is not None) + 0.5 * right, "number": float(found is not None),
                "correct": float(right)}  # fmt: skip


class Digits(Sequence[Task]):
    """The easiest task of all, for models that know nothing: the share of digits in the answer."""

    def __init__(self, size: int = 16) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return Task(f"count {chr(97 + index % 26)}: ", id=str(index))

    def score(self, task: Task, text: str) -> float:
        """Return the share of characters that are digits."""
        return sum(character.isdigit() for character in text) / len(text) if text else 0.0


class ReasoningGym(Sequence[Task]):
    """Procedural tasks with verifiable answers, by their names in reasoning-gym."""

    def __init__(self, name: str, size: int = 512, seed: int = 0, suffix: str = "\nAnswer:", **options: Any) -> None:
        try:
            import reasoning_gym  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise MissingExtraError("tasks of reasoning-gym need: pip install 'etude[llm]'") from None
        try:
            self._dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym cannot make {name!r} with {options}: {error}") from None
        self.suffix = suffix

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        entry = self._dataset[index]
        return Task(f"{entry['question']}{self.suffix}", str(entry["answer"]), str(index), {"entry": entry})

    def score(self, task: Task, text: str) -> float:
        """Return what the verifier of the task says of the answer's first line."""
        lines = text.strip().splitlines()
        return float(self._dataset.score_answer(lines[0] if lines else "", task.metadata["entry"]))
