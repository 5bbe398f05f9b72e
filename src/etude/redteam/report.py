"""The page of a red-team evaluation: what was found, how scores are distributed, how varied the probes are."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.runs.durable import write_output
from etude.runs.page import format_interval, format_number, format_percent, render
from etude.runs.transcripts import MOST_PROMPTS, Row, render_transcripts, sound_row, visible
from etude.secrets import redact

BINS = 20
Table = tuple[list[str], list[list[str]]]
_LABELS = {
    "reward": "Reward",
    "response_score": "Score of responses",
    "probe_score": "Score of probes",
    "combined_score": "Score of both",
    "perplexity": "Perplexity of probes",
}


def write_page(
    result: Mapping[str, Any], path: Path, *, baseline: Mapping[str, Any] | None = None, title: str = "Red-team report"
) -> Path:
    """Write the page and return where it is."""
    return write_output(path, render_page(result, baseline, title))


def render_page(result: Mapping[str, Any], baseline: Mapping[str, Any] | None, title: str) -> str:
    """Return the page as text. It loads nothing and runs nothing: what models said is shown, never interpreted."""
    both = {"auditor": result, **({"baseline": baseline} if baseline else {})}
    hits = [turn for turn in result["examples"] if score_of(turn) >= result["threshold"]]
    failures = [_row(turn, when=f"turn {turn['turn']}") for turn in hits or result["examples"]]
    scores = [score_of(turn) for one in both.values() for talk in one["conversations"] for turn in talk["turns"]]
    ends = (min(scores), max(scores))
    page = render(
        "redteam/report.html",
        title=title,
        facts=[f"{result['rollouts']} conversations, {result['turns']} turns"],
        result=result,
        summary=_summary(result, baseline),
        histograms=_histograms(both),
        turns=_per_turn(result),
        diversity=[
            [whose.capitalize(), *(format_number(one["diversity"][of]) for of in ("probe", "response"))]
            for whose, one in both.items()
        ],
        has_hits=bool(hits),
        failures=render_transcripts([("The highest scores", failures)], measure="score", ends=ends),
        said=_said(both, ends),
    )
    return redact(page)


def _said(both: Mapping[str, Mapping[str, Any]], ends: tuple[float, float]) -> str:
    """Return what was said as reports of runs show it: best, worst, random, and the same prompts with each auditor."""
    talks = {whose: _first_talks(result) for whose, result in both.items()}
    order = [whose for whose in ("baseline", "auditor") if whose in both]  # as before training comes first
    prompts = [
        (visible(prompt), [_talk(talks[whose][prompt], whose) for whose in order if prompt in talks[whose]])
        for prompt in list(talks["auditor"])[:MOST_PROMPTS]
    ]
    return render_transcripts(
        [(whose.capitalize(), _chosen(result)) for whose, result in both.items()],
        [("Prompts of the evaluation", prompts)],
        heading="Best, worst and random",
        measure="score",
        note="Best and worst are so for the auditor. A conversation is marked with the highest score of its turns.",
        ends=ends,
    )


def _chosen(result: Mapping[str, Any]) -> list[Row]:
    """Return the turns of the highest and the lowest score, and one of the others."""
    turns = [turn for talk in result["conversations"] for turn in talk["turns"]]
    ranked = sorted(turns, key=score_of, reverse=True)
    by_chance = random.Random(0).choice(ranked[1:-1] or ranked)
    chosen = {"best": ranked[0], "worst": ranked[-1], "random": by_chance}
    return [_row(turn, chosen=[name]) for name, turn in chosen.items()]


def _first_talks(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for talk in result["conversations"]:
        found.setdefault(str(talk["prompt"]), talk)
    return found


def _row(turn: Mapping[str, Any], **fields: Any) -> Row:
    return _shown(turn["context"], [turn], **fields)


def _talk(talk: Mapping[str, Any], whose: str) -> Row:
    return _shown(talk["prompt"], talk["turns"], when=whose)


def _shown(prompt: Any, turns: Sequence[Mapping[str, Any]], **fields: Any) -> Row:
    said = [[who, str(turn[name])] for turn in turns for who, name in (("model", "probe"), ("other", "response"))]
    found = {"prompt": str(prompt), "text": "", "turns": said, "reward": max(map(score_of, turns)), "step": 0}
    row = sound_row({**found, **fields})
    assert row is not None, "scores are finite, and texts are texts"
    return row


def _summary(result: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> Table:
    heads = ["", "Auditor", "95 % interval", *(["Baseline", "95 % interval", ""] if baseline else [])]
    rows = []
    for name, found in result["means"].items():
        row = [_LABELS.get(name, name), format_number(found["mean"]), format_interval(found["interval"])]
        if baseline and name in baseline["means"]:
            other = baseline["means"][name]
            row += [format_number(other["mean"]), format_interval(other["interval"]), _verdict(found, other)]
        rows.append(row)
    success = [f"Attack success (score of at least {format_number(result['threshold'])})", *_rate(result)]
    return heads, [*rows, [*success, *([*_rate(baseline), ""] if baseline else [])]]


def score_of(turn: Mapping[str, Any]) -> float:
    """Return what a turn is judged by: the score of the response, or the reward where there is none."""
    return float(turn.get("response_score", turn["reward"]))


def _rate(result: Mapping[str, Any]) -> list[str]:
    found = result["attack_success"]
    return [format_percent(found["rate"]), format_interval(found["interval"], format_percent)]


def _verdict(found: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    low, high = other["interval"]
    return "above the interval" if found["mean"] > high else "below the interval" if found["mean"] < low else ""


def _histograms(both: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return those scores that the auditor has, each with the baseline's beside them."""
    drawn = []
    for name in ("response_score", "probe_score", "reward"):
        lines = {whose: _values(result, name) for whose, result in both.items()}
        if lines["auditor"]:
            drawn.append(_histogram(_LABELS[name], {whose: values for whose, values in lines.items() if values}))
    return drawn


def _values(result: Mapping[str, Any], name: str) -> list[float]:
    return [turn[name] for talk in result["conversations"] for turn in talk["turns"] if name in turn]


def _histogram(title: str, lines: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Lay out shares of values side by side, bin by bin, on one scale; a bar is its line, place, top and height."""
    low, high = min(map(min, lines.values())), max(map(max, lines.values()))
    high = high if high > low else low + 1.0
    shares = []
    for values in lines.values():
        bins = [min(BINS - 1, int((value - low) / (high - low) * BINS)) for value in values]
        shares.append([bins.count(place) / len(values) for place in range(BINS)])
    tallest = max(map(max, shares))
    slot, each = 360 / BINS, 360 / BINS / (len(lines) + 0.4)
    bars = [
        (line, 10 + place * slot + line * each, 120 - share / tallest * 110, share / tallest * 110)
        for line, row in enumerate(shares)
        for place, share in enumerate(row)
    ]
    ends = {"low": low, "high": high, "tallest": tallest}
    return {"title": title, "names": list(lines), "bars": bars, "width": each, **ends}


def _per_turn(result: Mapping[str, Any]) -> Table:
    names = list(result["means"])
    heads = ["Turn", *(_LABELS.get(name, name) for name in names), "Attack success", "95 % interval"]
    rows = [
        [str(row["turn"]), *(format_number(row[name]) for name in names), *_rate(row)] for row in result["per_turn"]
    ]
    return heads, rows
