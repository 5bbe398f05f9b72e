"""What the model wrote, as a section of the report: by step, and the same prompt over training. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

from etude.runs.directory import Run
from etude.runs.metrics import read_rows
from etude.runs.page import render
from etude.secrets import redact_tree

TITLE = "What the model wrote"
MOST_STEPS, MOST_VISITS, MOST_PROMPTS = 8, 10, 3
"""Steps that are shown, answers to one prompt, and prompts that are not trained on."""
FOLDED_FROM = 280
"""Characters from which a text is folded."""
LEVELS = 5
"""Colours of rewards, from the lowest of the run to the highest."""
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}

T = TypeVar("T")
Row = dict[str, Any]


def transcript_sections(run_dir: Path) -> list[tuple[str, str]]:
    """Return title and HTML of what a language model wrote in a run; nothing if there is no text."""
    rows = [row for row in map(_sound, read_rows(Run(run_dir).transcripts_path)) if row is not None]
    held_out = _held_out(run_dir / "evaluation")
    if not rows and not held_out:
        return []
    rewards = [row["reward"] for row in [*rows, *held_out]]
    low, high = min(rewards), max(rewards)
    for row in [*rows, *held_out]:
        row["level"] = round((row["reward"] - low) / (high - low) * (LEVELS - 1)) if high > low else LEVELS // 2
    sampled = [row for row in rows if row["labels"]]
    steps = [(step, list(members)) for step, members in groupby(sampled, key=lambda row: row["step"])]
    page = render(
        "runs/transcripts.html",
        steps=_spread(steps, MOST_STEPS),
        recorded=len(steps),
        prompts=[
            ("Prompts of the training", _by_prompt(row for row in rows if row["is_followed"])),
            ("Prompts that are not trained on", _by_prompt(held_out)),
        ],
        low=low,
        high=high,
        folded_from=FOLDED_FROM,
    )
    return [(TITLE, page)]


def _by_prompt(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Return each prompt with its answers in the order of the steps."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["prompt_id"], []).append(row)
    return [(members[0]["prompt"], _spread(members, MOST_VISITS)) for members in found.values()]


def _held_out(folder: Path) -> list[Row]:
    """Return answers to the first prompts of the evaluations that `evaluate_rewards` wrote down."""
    rows: list[Row] = []
    for path in _spread(sorted(folder.glob("step-*.jsonl")), MOST_VISITS):
        seen: set[str] = set()
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in islice(file, 64 * MOST_PROMPTS):
                row = _sound(_parsed(line) | {"step": int(path.stem.partition("-")[2])})
                if row is not None and row["prompt"] not in seen and len(seen) < MOST_PROMPTS:
                    seen.add(row["prompt"])
                    rows.append(row)
    return rows


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _sound(given: Mapping[str, Any]) -> Row | None:
    """Return what the page shows of a row; None if it is no row of ours, for anybody may have written the file."""
    row = redact_tree(given)
    texts, reward, chosen = [row.get("prompt"), row.get("text")], row.get("reward"), row.get("chosen")
    if not all(isinstance(text, str) for text in texts) or not _is_number(reward):
        return None
    chosen, turns = chosen if isinstance(chosen, list) else [], row.get("turns")
    said = [pair for pair in turns if _is_turn(pair)] if isinstance(turns, list) else []
    return {
        "step": row["step"],
        "labels": [name for name in ("best", "worst", "random") if name in chosen],
        "is_followed": "followed" in chosen,
        "prompt": visible(row["prompt"]),
        "prompt_id": str(row.get("prompt_id", row["prompt"])),
        "said": [("other" if who == "other" else "model", visible(text)) for who, text in said or [("", row["text"])]],
        "reward": reward,
        "advantage": row["advantage"] if _is_number(row.get("advantage")) else None,
        "group_reward": row["group_reward"] if _is_number(row.get("group_reward")) else None,
        "is_cut": row.get("finish_reason") == "length",
    }


def visible(text: str) -> str:
    """Return a text that any page can hold: control characters as their pictures, broken ones replaced."""
    return text.encode("utf-8", "replace").decode().translate(_PICTURES)


def _is_turn(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many items, the first and the last among them, evenly spread."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
