"""Where prompts come from: lists, files, and tasks that can be checked.

A source has `__len__` and `__getitem__`, which returns a `Task`; one that can tell right from wrong has `score` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.data.lines import read_json_lines
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


class Prompts(Sequence[Task]):
    """Tasks from a list of texts, or of mappings with `prompt` and perhaps `answer`."""

    def __init__(self, prompts: Sequence[str | Mapping[str, Any] | Task]) -> None:
        self._tasks = [_as_task(prompt, index) for index, prompt in enumerate(prompts)]
        if not self._tasks:
            raise DataError("there are no prompts; give at least one")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._tasks[index]


def _as_task(given: Any, index: int) -> Task:
    if isinstance(given, Task):
        return given
    if isinstance(given, str):
        return Task(given, id=str(index))
    if isinstance(given, Mapping) and isinstance(given.get("prompt"), str):
        rest = {key: value for key, value in given.items() if key not in ("prompt", "answer", "id")}
        return Task(given["prompt"], str(given.get("answer", "")), str(given.get("id", index)), rest)
    raise DataError(f"prompt {index} must be a text or a mapping with the key 'prompt', got {given!r}")


class PromptFile(Prompts):
    """Tasks from a file with one JSON object (or text) in each line."""

    def __init__(self, path: str | Path) -> None:
        super().__init__([row for _, row in read_json_lines(path, "prompts", plain=True)])


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
