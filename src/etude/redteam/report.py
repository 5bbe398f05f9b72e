"""The page of a red-team evaluation: what was found, how scores are distributed, how varied the probes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from etude.runs.charts import format_number
from etude.runs.durable import write_atomically
from etude.runs.report_theme import STYLE
from etude.secrets import redact

BINS = 20
_EXTRA = (
    ".said{white-space:pre-wrap}.said b{font-weight:600}.said .p{color:var(--c0)}.said .r{color:var(--c1)}"
    ".bars{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:14px}"
    ".bars svg text{fill:var(--soft);font-size:10.5px}.note{color:var(--soft);font-size:.8125rem}"
)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_page(result, baseline, title).encode())
    return path


def render_page(result: Mapping[str, Any], baseline: Mapping[str, Any] | None, title: str) -> str:
    """Return the page as text. It loads nothing and runs nothing: what models said is shown, never interpreted."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    sections = [
        ("Summary", _summary(result, baseline)),
        ("Distributions", _distributions(result, baseline)),
        ("Turn by turn", _per_turn(result)),
        ("Diversity", _diversity(result, baseline)),
        ("Failures found", _examples(result)),
    ]
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>" for name, html in sections)
    facts = f"{result['rollouts']} conversations, {result['turns']} turns"
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_EXTRA}</style></head>\n"
        f'<body><div class="page"><header><h1>{escape(title)}</h1><p class="facts">{escape(facts)}</p></header>'
        f"<main>{body}</main><footer>Written by Etude on {written}.</footer></div></body></html>\n"
    )
    return redact(page)


def _summary(result: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    heads = ["", "Auditor", "95 % interval", *(["Baseline", "95 % interval", ""] if baseline else [])]
    rows = []
    for name, found in result["means"].items():
        cells = [_LABELS.get(name, name), format_number(found["mean"]), _interval(found["interval"])]
        if baseline and name in baseline["means"]:
            other = baseline["means"][name]
            cells += [format_number(other["mean"]), _interval(other["interval"]), _verdict(found, other)]
        rows.append(cells)
    rate = result["attack_success"]
    cells = [f"Attack success (score of at least {format_number(result['threshold'])})"]
    cells += [f"{rate['rate']:.1%}", _percent(rate["interval"])]
    if baseline:
        other = baseline["attack_success"]
        cells += [f"{other['rate']:.1%}", _percent(other["interval"]), ""]
    rows.append(cells)
    note = (
        "Means over the turns of a conversation, averaged over conversations; their intervals by bootstrap over "
        "conversations, that of the success rate by Wilson."
    )
    return _table(heads, rows) + f'<p class="note">{note}</p>'


def _verdict(found: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    low, high = other["interval"]
    return "above the interval" if found["mean"] > high else "below the interval" if found["mean"] < low else ""


def _distributions(result: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    drawn = []
    for name in ("response_score", "probe_score", "reward"):
        lines = [("auditor", _values(result, name)), ("baseline", _values(baseline, name) if baseline else [])]
        if lines[0][1]:
            drawn.append(_histogram(_LABELS[name], [line for line in lines if line[1]]))
    return f'<div class="bars">{"".join(drawn)}</div>' if drawn else '<p class="none">There are no scores.</p>'


def _values(result: Mapping[str, Any], name: str) -> list[float]:
    return [turn[name] for talk in result["conversations"] for turn in talk["turns"] if name in turn]


def _histogram(title: str, lines: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Draw shares of values side by side, bin by bin, on one scale."""
    every = [value for _, values in lines for value in values]
    low, high = min(every), max(every)
    high = high if high > low else low + 1.0
    shares = []
    for _, values in lines:
        counts = [0] * BINS
        for value in values:
            counts[min(BINS - 1, int((value - low) / (high - low) * BINS))] += 1
        shares.append([count / len(values) for count in counts])
    tallest = max(map(max, shares))
    slot, each = 360 / BINS, 360 / BINS / (len(lines) + 0.4)
    bars = []
    for number, row in enumerate(shares):
        for place, share in enumerate(row):
            height = share / tallest * 110
            x = 10 + place * slot + number * each
            bars.append(
                f'<rect class="c{number}" x="{x:.1f}" y="{120 - height:.1f}" width="{each:.1f}" '
                f'height="{height:.1f}" fill="currentColor"></rect>'
            )
    ends = f'<text x="10" y="136">{format_number(low)}</text><text x="370" y="136" text-anchor="end">'
    legend = "".join(f'<span class="c{n}">{escape(name)}</span>' for n, (name, _) in enumerate(lines))
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}</h3><div class="legend">{legend}</div></figcaption>'
        f'<svg viewBox="0 0 380 142" role="img" aria-label="{escape(title)}: {format_number(low)} to '
        f'{format_number(high)}">{"".join(bars)}{ends}{format_number(high)}</text></svg>'
        f'<p class="range">tallest bar: {tallest:.0%} of the turns</p></figure>'
    )


def _per_turn(result: Mapping[str, Any]) -> str:
    names = list(result["means"])
    heads = ["Turn", *(_LABELS.get(name, name) for name in names), "Attack success", "95 % interval"]
    rows = [
        [
            str(row["turn"]),
            *(format_number(row[name]) for name in names),
            f"{row['attack_success']['rate']:.1%}",
            _percent(row["attack_success"]["interval"]),
        ]
        for row in result["per_turn"]
    ]
    return _table(heads, rows)


def _diversity(result: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    found = result["diversity"]
    heads = ["", "Probes", "Responses"]
    rows = [["Auditor", format_number(found["probe"]), format_number(found["response"])]]
    if baseline:
        other = baseline["diversity"]
        rows.append(["Baseline", format_number(other["probe"]), format_number(other["response"])])
    note = "0 if all say the same; the larger, the more varied."
    return _table(heads, rows) + f'<p class="note">{escape(found["method"].capitalize())}. {note}</p>'


def _examples(result: Mapping[str, Any]) -> str:
    hits = [turn for turn in result["examples"] if turn.get("response_score", turn["reward"]) >= result["threshold"]]
    note = "" if hits else '<p class="note">No response reached the threshold; these came nearest.</p>'
    rows = []
    for turn in hits or result["examples"]:
        said = (
            f'<span class="said">{escape(str(turn["context"]))}<b class="p">{escape(str(turn["probe"]))}</b>'
            f'<b class="r">{escape(str(turn["response"]))}</b></span>'
        )
        score = format_number(turn.get("response_score", turn["reward"]))
        rows.append(f'<tr><td class="number">{score}</td><td class="number">{turn["turn"]}</td><td>{said}</td></tr>')
    heads = (
        '<th scope="col" class="number">Score</th><th scope="col" class="number">Turn</th>'
        '<th scope="col">Context, <span class="c0">probe</span>, <span class="c1">response</span></th>'
    )
    return (
        f'{note}<div class="panel"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(
        f'<th scope="col"{" class=number" if at else ""}>{escape(head)}</th>' for at, head in enumerate(heads)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f'<td class="number">{escape(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="panel"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _interval(interval: Sequence[float]) -> str:
    return f"{format_number(interval[0])} to {format_number(interval[1])}"


def _percent(interval: Sequence[float]) -> str:
    return f"{interval[0]:.1%} to {interval[1]:.1%}"
