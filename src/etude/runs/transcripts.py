"""What the model wrote, as a section of the report: by step, and the same prompt over training. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from etude.runs.directory import Run
from etude.runs.metrics import read_rows
from etude.runs.page import format_number, render, spread
from etude.secrets import redact_tree

TITLE = "What the model wrote"
MOST_STEPS, MOST_VISITS, MOST_PROMPTS = 8, 10, 3
"""Steps that are shown, answers to one prompt, and prompts that are not trained on."""
FOLDED_FROM = 280
"""Characters from which a text is folded."""
LEVELS = 5
"""Colours of rewards, from the lowest of the run to the highest."""
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}

Row = dict[str, Any]
Panel = tuple[str, list[Row]]
"""A title, or a prompt, and what was written under it."""


def transcript_sections(run_dir: Path) -> list[tuple[str, str]]:
    """Return title and HTML of what a language model wrote in a run; nothing if there is no text."""
    rows = [row for row in map(sound_row, read_rows(Run(run_dir).transcripts_path)) if row is not None]
    held_out = _held_out(run_dir / "evaluation")
    if not rows and not held_out:
        return []
    sampled = [row for row in rows if row["labels"]]
    steps = [(step, list(members)) for step, members in groupby(sampled, key=lambda row: row["step"])]
    counted = f" ({MOST_STEPS} of {len(steps)} steps in transcripts.jsonl)" if len(steps) > MOST_STEPS else ""
    page = render_transcripts(
        [(f"Step {format_number(step)}", members) for step, members in spread(steps, MOST_STEPS)],
        [
            ("Prompts of the training", by_prompt(row for row in rows if row["is_followed"])),
            ("Prompts that are not trained on", by_prompt(held_out)),
        ],
        heading=f"Best, worst and random{counted}",
        note="The advantage is what the completion was trained with.",
    )
    return [(TITLE, page)]


def render_transcripts(
    panels: Sequence[Panel],
    prompts: Sequence[tuple[str, Sequence[Panel]]] = (),
    *,
    heading: str = "",
    measure: str = "reward",
    note: str = "",
    ends: tuple[float, float] | None = None,
) -> str:
    """Return rows, as `sound_row` makes them, as HTML.

    Args:
        panels: What was chosen, each part under its title; a row is called by its labels.
        prompts: Titles, and under each the prompts with their answers; a row is called by when it was said.
        heading: Stands over the panels.
        measure: What the number of a row is.
        note: More to know about the rows.
        ends: The least and the most that colours tell apart; those of the rows unless given.
    """
    rows = [row for _, members in chain(panels, *(found for _, found in prompts)) for row in members]
    rewards = [row["reward"] for row in rows]
    low, high = ends or (min(rewards), max(rewards))
    for row in rows:
        row["level"] = round((row["reward"] - low) / (high - low) * (LEVELS - 1)) if high > low else LEVELS // 2
    return render(
        "runs/transcripts.html", panels=panels, prompts=prompts, heading=heading, measure=measure, note=note,
        low=low, high=high, folded_from=FOLDED_FROM,
    )  # fmt: skip


def by_prompt(rows: Iterable[Row]) -> list[Panel]:
    """Return each prompt with its answers in the order in which they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["prompt_id"], []).append(row)
    return [(members[0]["prompt"], spread(members, MOST_VISITS)) for members in found.values()]


def _held_out(folder: Path) -> list[Row]:
    """Return answers to the first prompts of the evaluations that `evaluate_rewards` wrote down."""
    rows: list[Row] = []
    for path in spread(sorted(folder.glob("step-*.jsonl")), MOST_VISITS):
        seen: set[str] = set()
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in islice(file, 64 * MOST_PROMPTS):
                row = sound_row(_parsed(line) | {"step": int(path.stem.partition("-")[2])})
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


def sound_row(given: Mapping[str, Any]) -> Row | None:
    """Return what the page shows of a row; None if it is no row of ours, for anybody may have written the file."""
    row = redact_tree(given)
    texts, reward, chosen = [row.get("prompt"), row.get("text")], row.get("reward"), row.get("chosen")
    if not all(isinstance(text, str) for text in texts) or not _is_number(reward):
        return None
    chosen, turns = chosen if isinstance(chosen, list) else [], row.get("turns")
    said = [pair for pair in turns if _is_turn(pair)] if isinstance(turns, list) else []
    return {
        "step": row["step"],
        "when": str(row.get("when") or f"step {format_number(row['step'])}"),
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
