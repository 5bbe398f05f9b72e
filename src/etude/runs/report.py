"""The report of a run: one HTML file with curves, checkpoints, configuration and environment, and no network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from etude.errors import EtudeError
from etude.runs import charts
from etude.runs.charts import Series, draw_chart, format_number
from etude.runs.directory import Run, sound_status
from etude.runs.manifest import read_manifest
from etude.runs.metrics import read_metrics
from etude.runs.progress import format_duration
from etude.runs.report_theme import SCRIPT, STYLE
from etude.secrets import redact, redact_tree, register_secret

GROUPS = {
    "Training": ("train",),
    "Evaluation": ("eval",),
    "Optimisation": ("lr", "grad_norm"),
    "Time": ("time",),
}
# One chart for all optimizers: their curves are read against each other.
SHARED_CHARTS = {"lr": "learning rate", "grad_norm": "gradient norm"}
UNPLOTTED = ("step", "epoch", "epochs", "tokens", "env_steps", "seconds", "time", "timestamp")
STATE_SIGNS = {
    "finished": "&#10003;",
    "running": "&#9654;",
    "interrupted": "&#10073;&#10073;",
    "failed": "&#10005;",
    "killed": "&#10005;",
}
Section = tuple[str, str]


@dataclass(frozen=True)
class Facts:
    """Everything the page shows, read from the run directory; what is absent stays empty."""

    name: str
    state: str
    status: Mapping[str, Any]
    series: Mapping[str, Series]
    last_step: int
    checkpoints: Sequence[Mapping[str, Any]]
    config_text: str
    training: Mapping[str, Any]
    environment: Mapping[str, Any]
    warnings: list[str] = field(default_factory=list)


def write_report(run_dir: Path, output: Path | None = None, *, extra_sections: Sequence[Section] = ()) -> Path:
    """Write the report of a run (`report.html` beside its metrics) and return its path.

    Each extra section is a title and ready HTML, placed before the curves; scripts in it do not run.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise EtudeError(f"{run_dir}: no such run directory; `etude runs` lists the runs there are")
    page = render_page(read_facts(run_dir), extra_sections)
    target = Path(output) if output is not None else run_dir / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(page, encoding="utf-8")
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    return target


def read_facts(run_dir: Path) -> Facts:
    """Read a run directory, noting as warnings what is damaged."""
    warnings: list[str] = []
    config_text = _read_text(run_dir / "config.yaml")
    _register_secrets_named_in(config_text)
    config = _parse_yaml(config_text, warnings)
    raw = _read_json(run_dir / "status.json", warnings)
    # Other programs may write the time as text.
    status = sound_status(raw) | {name: raw[name] for name in ("started", "updated") if isinstance(raw.get(name), str)}
    rows = read_metrics(run_dir / "metrics.jsonl")
    series = _collect_series(rows)
    for name, line in series.items():
        if broken := line.broken_steps():
            count = f"{len(broken)} values that are" if len(broken) > 1 else "a value that is"
            warnings.append(f"{name} has {count} not finite, first at step {format_number(broken[0])}")
    told = status.get("warnings", [])
    warnings.extend(str(text) for text in (told if isinstance(told, list) else [told]))
    training = config.get("training")
    last_logged = max((int(row.get("step", 0)) for row in rows), default=0)
    return Facts(
        name=redact(run_dir.resolve().name),
        state=Run(run_dir).state(),
        status=redact_tree(status),
        series=series,
        # A running or killed run noted its step when it started; its metrics know better.
        last_step=max(int(status.get("step") or 0), last_logged),
        checkpoints=_read_checkpoints(run_dir / "checkpoints", warnings),
        config_text=redact(config_text),
        training=training if isinstance(training, dict) else {},
        environment=redact_tree(_read_json(run_dir / "environment.json", warnings)),
        warnings=[redact(text) for text in warnings],
    )


def render_page(facts: Facts, extra_sections: Sequence[Section] = ()) -> str:
    """Return the whole page as text."""
    script = SCRIPT % {
        "width": charts.WIDTH, "height": charts.HEIGHT, "left": charts.LEFT,
        "right": charts.RIGHT, "top": charts.TOP, "bottom": charts.BOTTOM,
    }  # fmt: skip
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; media-src data:"
    )
    sections = [
        *extra_sections,
        ("Curves", _curves(facts)),
        ("Checkpoints", _checkpoint_table(facts.checkpoints)),
        ("Configuration", _config_panel(facts.config_text)),
        ("Environment", _environment_panel(facts.environment)),
    ]
    body = "".join(
        f'<section id="{_anchor(title)}"><div class="curves-head"><h2>{escape(title)}</h2>'
        f"{_LOG_SWITCH if title == 'Curves' and facts.series else ''}</div>{html}</section>"
        for title, html in sections
    )
    links = "".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title, _ in sections)
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(facts.name)} - Etude report</title><style>{STYLE}</style></head>\n"
        f'<body><div class="page">{_header(facts)}<nav aria-label="Sections">{links}</nav>{_warning_list(facts)}'
        f"{_tiles(facts)}<main>{body}</main><footer>Written by Etude on {written}.</footer></div>"
        f"<script>{script}</script></body></html>\n"
    )


_LOG_SWITCH = '<label class="switch"><input type="checkbox" id="log">Logarithmic scale</label>'


def _header(facts: Facts) -> str:
    parts = []
    if started := facts.status.get("started"):
        parts.append(f"started {_moment(started)}")
    for key, text in (("host", "on {}"), ("git_commit", "commit {}")):
        if value := _find(facts.environment, key):
            parts.append(text.format(str(value)[:12] if key == "git_commit" else value))
    if (stopped := facts.status.get("stopped", "finished")) != "finished":
        parts.append(str(stopped))
    state = facts.state
    return (
        f'<header><div class="top"><h1>{escape(facts.name)}</h1>'
        f'<span class="pill {_anchor(state)}">{STATE_SIGNS.get(state, "?")} {escape(state)}</span></div>'
        f'<p class="facts">{escape(", ".join(parts))}</p></header>'
    )


def _warning_list(facts: Facts) -> str:
    error = facts.status.get("error") or facts.status.get("reason")
    items = []
    if error and facts.state in ("failed", "interrupted"):
        items.append(
            f'<ul class="warnings{" bad" if facts.state == "failed" else ""}"><li>{escape(str(error))}</li></ul>'
        )
    if facts.warnings:
        rows = "".join(f"<li>{escape(text)}</li>" for text in facts.warnings)
        items.append(f'<ul class="warnings" aria-label="Warnings">{rows}</ul>')
    return "".join(items)


def _tiles(facts: Facts) -> str:
    total = None if facts.training.get("duration") else facts.training.get("training_steps")
    of_total = f"of {format_number(total)}" if isinstance(total, int | float) else ""
    tiles = [("Steps", format_number(facts.last_step), of_total)]
    seconds = _duration_s(facts)
    if seconds is not None:
        rate = f"{format_number(float(f'{facts.last_step / seconds:.3g}'))} steps/s" if seconds > 0 else ""
        tiles.append(("Duration", format_duration(seconds), rate))
    parameters = facts.status.get("parameters")
    if isinstance(parameters, int):
        trainable = facts.status.get("trainable_parameters", parameters)
        note = "all trainable" if trainable == parameters else f"{format_number(trainable)} trainable"
        tiles.append(("Parameters", format_number(parameters), note))
    names = [name for name in facts.series if name.startswith(("train/", "eval/"))]
    names.sort(key=lambda name: (not name.endswith("/loss"), not name.startswith("train/")))
    for name in names[:6]:
        values = facts.series[name].finite()
        if values.values:
            best = _best_point(facts, name)
            note = f"best {format_number(best[1])} at {format_number(best[0])}" if best else ""
            tiles.append((name, format_number(values.values[-1]), note))
    cells = "".join(
        f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
        for label, value, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _duration_s(facts: Facts) -> float | None:
    seconds = facts.status.get("duration_s")
    if not isinstance(seconds, int | float):
        return None
    updated = facts.status.get("updated")
    if facts.state == "running" and isinstance(updated, int | float):
        seconds += max(0.0, time.time() - updated)
    return float(seconds)


def _curves(facts: Facts) -> str:
    by_prefix: dict[str, list[str]] = {}
    for name in sorted(facts.series, key=lambda name: (not name.endswith("/loss"), name)):
        by_prefix.setdefault(name.split("/", 1)[0] if "/" in name else "other", []).append(name)
    known = {prefix for prefixes in GROUPS.values() for prefix in prefixes}
    groups = GROUPS | {prefix: (prefix,) for prefix in sorted(by_prefix) if prefix not in known}
    html = []
    for title, prefixes in groups.items():
        drawn = "".join(_draw_prefix(facts, prefix, by_prefix[prefix]) for prefix in prefixes if prefix in by_prefix)
        if drawn:
            html.append(f'<h3 class="group">{escape(title)}</h3><div class="charts">{drawn}</div>')
    return "".join(html) or '<p class="none">No metrics were logged yet.</p>'


def _draw_prefix(facts: Facts, prefix: str, names: Sequence[str]) -> str:
    if prefix not in SHARED_CHARTS:
        return "".join(draw_chart(name, [facts.series[name]], _best_point(facts, name)) for name in names)
    lines = [replace(facts.series[name], name=name.removeprefix(f"{prefix}/")) for name in names]
    return draw_chart(SHARED_CHARTS[prefix], lines)


def _best_point(facts: Facts, name: str) -> tuple[float, float] | None:
    line = facts.series[name].finite()
    if not name.startswith("eval/") or len(line.values) < 2:
        return None
    chosen = facts.training.get("best_metric", "eval/loss") == name
    if not chosen and not name.endswith("loss"):
        return None
    largest = chosen and facts.training.get("best_mode", "min") == "max"
    index = (max if largest else min)(range(len(line.values)), key=line.values.__getitem__)
    return line.steps[index], line.values[index]


def _checkpoint_table(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    if not checkpoints:
        return '<p class="none">No checkpoint was saved.</p>'
    rows = "".join(
        f'<tr><td class="number">{format_number(entry["step"])}</td>'
        f'<td class="number">{format_number(entry["metric"]) if entry["metric"] is not None else "-"}</td>'
        f'<td class="number">{_size(entry["size_bytes"])}</td><td>{escape(entry["saved"])}</td>'
        f"<td>{''.join(f'<span class={chr(34)}tag {tag}{chr(34)}>{tag}</span>' for tag in entry['tags'])}</td></tr>"
        for entry in checkpoints
    )
    return (
        '<div class="panel"><table><thead><tr><th scope="col" class="number">Step</th>'
        '<th scope="col" class="number">Metric</th><th scope="col" class="number">Size</th>'
        '<th scope="col">Saved</th><th scope="col" style="width:50%"></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _config_panel(text: str) -> str:
    if not text.strip():
        return '<p class="none">No configuration was stored: the run was started from Python.</p>'
    lines = []
    for line in text.splitlines():
        match = re.match(r"^(\s*(?:- )*)([^\s:#'\"-][^:#]*)(:)(\s.*|)$", line)
        if line.lstrip().startswith("#"):
            lines.append(f'<span class="o">{escape(line)}</span>')
        elif match:
            indent, key, _, rest = match.groups()
            lines.append(f'{escape(indent)}<span class="k">{escape(key)}</span>:{escape(rest)}')
        else:
            lines.append(escape(line))
    return f'<div class="panel"><pre>{chr(10).join(lines)}</pre></div>'


def _environment_panel(environment: Mapping[str, Any]) -> str:
    if not environment:
        return '<p class="none">No environment was recorded.</p>'
    plain = {key: value for key, value in environment.items() if not isinstance(value, dict)}
    nested = {key: value for key, value in environment.items() if isinstance(value, dict)}
    html = [f'<div class="panel">{_value_table(plain)}']
    html += [
        f"<details><summary>{escape(_title(key))} ({len(value)})</summary>{_value_table(value)}</details>"
        for key, value in nested.items()
    ]
    return "".join(html) + "</div>"


def _value_table(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(_title(str(key)))}</th><td>{escape(_plain(value))}</td></tr>'
        for key, value in values.items()
    )
    return f"<table><tbody>{rows}</tbody></table>" if rows else ""


def _collect_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    steps: dict[str, list[float]] = {}
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name in UNPLOTTED or isinstance(value, bool) or not isinstance(value, int | float | None):
                continue
            # A logger that writes NaN as null means the same thing.
            steps.setdefault(name, []).append(row.get("step", 0))
            values.setdefault(name, []).append(math.nan if value is None else float(value))
    return {redact(name): Series(redact(name), steps[name], values[name]) for name in steps}


def _read_checkpoints(directory: Path, warnings: list[str]) -> list[dict[str, Any]]:
    links = {tag: os.path.realpath(directory / tag) for tag in ("last", "best") if (directory / tag).exists()}
    entries = []
    for path in sorted(directory.glob("step-*"), reverse=True):
        try:
            manifest = read_manifest(path)
            saved = path.stat().st_mtime
        except (EtudeError, OSError) as error:
            warnings.append(str(error))
            continue
        entries.append({
            "step": manifest.step,
            "metric": manifest.metric,
            "size_bytes": sum(record.size_bytes for record in manifest.files.values()),
            "saved": _moment(saved),
            "tags": [tag for tag, target in links.items() if target == os.path.realpath(path)],
        })  # fmt: skip
    return entries


def _register_secrets_named_in(config_text: str) -> None:
    # The stored config keeps ${env:NAME}; if the value is set here too, no other file may leak it into the page.
    for name in re.findall(r"\$\{env:\s*([A-Za-z_][A-Za-z0-9_]*)", config_text):
        if value := os.environ.get(name):
            register_secret(value)


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_json(path: Path, warnings: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path) or "{}")
    except (ValueError, RecursionError) as error:
        warnings.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        warnings.append(f"{path.name} holds something else than names and values")
        return {}
    return value


def _parse_yaml(text: str, warnings: list[str]) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(text) if text.strip() else {}
    except yaml.YAMLError as error:
        warnings.append(f"config.yaml cannot be read: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def _find(tree: Mapping[str, Any], key: str) -> Any:
    if key in tree:
        return tree[key]
    section, _, leaf = key.partition("_")
    nested = tree.get(section)
    return nested.get(leaf) if isinstance(nested, dict) else None


def _moment(value: Any) -> str:
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M UTC")
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return str(value)
    return moment.strftime("%Y-%m-%d %H:%M") + (
        " UTC" if moment.utcoffset() is not None and not moment.utcoffset() else ""
    )


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _plain(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def _title(key: str) -> str:
    return key.replace("_", " ")


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
