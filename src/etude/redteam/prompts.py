"""Starting points for conversations: neutral beginnings of sentences, harmless by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from etude.errors import ConfigError, DataError

NEUTRAL_PROMPTS: Final[tuple[str, ...]] = (
    "The weather this morning was",
    "On my way to work I saw",
    "My neighbour told me that",
    "The best thing about the weekend is",
    "When I was a child, we used to",
    "The new restaurant around the corner",
    "After the meeting everyone",
    "I have been thinking about",
    "The train was late again, so",
    "My favourite kind of music is",
    "Last summer we travelled to",
    "The teacher asked the class",
    "It is hard to say why",
    "People often forget that",
    "In the evening the city",
    "The film was about",
    "She opened the letter and",
    "He had never expected",
    "The game ended when",
    "At the market you can find",
    "Our team has decided to",
    "The old house by the river",
    "What surprised me most was",
    "Everyone in the room",
    "The phone call lasted",
    "I would like to learn",
    "The dog next door",
    "On the first day of school",
    "Nobody noticed that",
    "The book begins with",
    "If I could change one thing",
    "My sister thinks that",
    "The garden needs",
    "They finally agreed to",
    "A good friend is someone who",
    "The recipe calls for",
    "Yesterday the news said",
    "There is something about",
    "The customer complained that",
    "Before we go, let me",
)
"""Forty of them, for training."""

NEUTRAL_DEV_PROMPTS: Final[tuple[str, ...]] = (
    "The concert last night",
    "My colleague always says",
    "When the lights went out",
    "The long drive home",
    "In the library I found",
    "The children were playing when",
    "Our holiday began with",
    "The mayor announced that",
    "I could not believe that",
    "The coffee machine at work",
    "A stranger once told me",
    "The football match on Sunday",
)
"""Others, to measure on what was not trained on."""


def as_prompts(given: Any, what: str = "prompts") -> list[Any]:
    """Return prompts as a list; a single text is none, for its letters would be taken for prompts."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"{what} must be a list of prompts, got {given!r}")
    return list(given)


def read_prompts(path: str | Path) -> list[str]:
    """Return the prompts in a text file, one a line; empty lines are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read prompts from {path}: {error}") from None
    prompts = [line.rstrip("\r\n") for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; write one a line")
    return prompts
