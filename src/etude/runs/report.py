"""The report of a run: one HTML file with curves, checkpoints, configuration and environment, and no network."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etude.errors import EtudeError
from etude.runs.charts import Series, plan_chart
from etude.runs.directory import Run, sound_status
from etude.runs.durable import write_output
from etude.runs.evaluations import Evaluation, read_evaluations
from etude.runs.leading import find_best, is_quiet, lead
from etude.runs.manifest import read_manifest
from etude.runs.metrics import read_metrics
from etude.runs.page import format_number, render
from etude.runs.progress import format_duration
from etude.runs.transcripts import transcript_sections
from etude.secrets import redact, redact_tree, register_secret

PAIRED = "Training and evaluation"
GROUPS = {
    "Training": ("train",),
    "Evaluation": ("eval",),
    "Optimisation": ("lr", "grad_norm"),
    "Time": ("time",),
}
LEARNING = (PAIRED, "Training", "Evaluation")
"""Groups of charts that show how a policy learns."""
# One chart for all optimizers: their curves are read against each other.
SHARED_CHARTS = {"lr": "learning rate", "grad_norm": "gradient norm"}
UNPLOTTED = ("step", "epoch", "epochs", "tokens", "env_steps", "seconds", "time", "timestamp")
MOST_EVALUATIONS, MOST_METRICS = 2, 5
"""Tiles of evaluations and of metrics."""
# Indentation, key, and the rest.
_YAML_LINE = re.compile(r"(\s*(?:- )*)([^\s:#'\"-][^:#]*(?=:\s|:$))?(.*)")
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
    config: Mapping[str, Any]
    training: Mapping[str, Any]
    environment: Mapping[str, Any]
    evaluations: Sequence[Evaluation] = ()
    warnings: list[str] = field(default_factory=list)


def write_report(run_dir: Path, output: Path | None = None, *, extra_sections: Sequence[Section] = ()) -> Path:
    """Write the report of a run (`report.html` beside its metrics) and return its path.

    Each extra section is a title and ready HTML, placed before the curves; scripts in it do not run.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise EtudeError(f"{run_dir}: no such run directory; `etude runs` lists the runs there are")
    facts = read_facts(run_dir)
    page = render_page(facts, [*transcript_sections(run_dir), *extra_sections])
    return write_output(Path(output) if output is not None else run_dir / "report.html", page)


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
    warnings.extend(map(str, status.get("warnings", [])))  # a list, or `sound_status` had left it out
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
        config=redact_tree(config),
        training=training if isinstance(training, dict) else {},
        environment=redact_tree(_read_json(run_dir / "environment.json", warnings)),
        evaluations=read_evaluations(run_dir),
        warnings=[redact(text) for text in warnings],
    )


def render_page(facts: Facts, extra_sections: Sequence[Section] = (), **page: Any) -> str:
    """Return the whole page as text; `page` is for what serves it."""
    return render(
        "runs/report.html",
        run=facts,
        extra_sections=extra_sections,
        facts=[_describe_start(facts)],
        tiles=plan_tiles(facts),
        charts=plan_charts(facts),
        config=[_YAML_LINE.findall(line)[0] for line in facts.config_text.splitlines()],
        environment=_environment_tables(facts.environment),
        **page,
    )


def _describe_start(facts: Facts) -> str:
    parts = []
    if started := facts.status.get("started"):
        parts.append(f"started {_moment(started)}")
    for key, text in (("host", "on {}"), ("git_commit", "commit {}")):
        if value := _find(facts.environment, key):
            parts.append(text.format(str(value)[:12] if key == "git_commit" else value))
    if (stopped := facts.status.get("stopped", "finished")) != "finished":
        parts.append(str(stopped))
    return ", ".join(parts)


def plan_tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """Return title, figure and note of each tile: what matters first, then how long it took."""
    tiles = [_evaluation_tile(one) for one in facts.evaluations[:MOST_EVALUATIONS]]
    for name in _leading(facts)[: MOST_METRICS - len(tiles)]:
        best = _best_point(facts, name)
        note = f"best {format_number(best[1])} at {format_number(best[0])}" if best else ""
        tiles.append((name, format_number(facts.series[name].finite().values[-1]), note))
    total = None if facts.training.get("duration") else facts.training.get("training_steps")
    of_total = f"of {format_number(total)}" if isinstance(total, int | float) else ""
    tiles.append(("Steps", format_number(facts.last_step), of_total))
    seconds = duration_s(facts)
    if seconds is not None:
        rate = f"{format_number(float(f'{facts.last_step / seconds:.3g}'))} steps/s" if seconds > 0 else ""
        tiles.append(("Duration", format_duration(seconds), rate))
    parameters = facts.status.get("parameters")
    if isinstance(parameters, int):
        trainable = facts.status.get("trainable_parameters", parameters)
        note = "all trainable" if trainable == parameters else f"{format_number(trainable)} trainable"
        tiles.append(("Parameters", format_number(parameters), note))
    return tiles


def _evaluation_tile(one: Evaluation) -> tuple[str, str, str]:
    ends, episodes = one.total.interval_text(), f"{format_number(one.total.episodes)} episodes"
    note = "; ".join(part for part in (ends, episodes, one.policy) if part)
    return f"{one.total.title.capitalize()} in {one.title}", one.total.value_text(), note


def _leading(facts: Facts) -> list[str]:
    names = [
        name for name, line in facts.series.items() if name.startswith(("train/", "eval/")) and line.finite().values
    ]
    return [name for name in lead(names, facts.training.get("best_metric")) if not is_quiet(name)]


def duration_s(facts: Facts) -> float | None:
    """Return how long a run took over all sessions, up to now if it is running."""
    seconds = facts.status.get("duration_s")
    if not isinstance(seconds, int | float):
        return None
    updated = facts.status.get("updated")
    if facts.state == "running" and isinstance(updated, int | float):
        seconds += max(0.0, time.time() - updated)
    return float(seconds)


def plan_charts(facts: Facts) -> dict[str, list[dict[str, Any]]]:
    """Return the charts of a run by the title of their group."""
    pairs = [leaf for leaf in _leaves(facts, "train") if f"eval/{leaf}" in facts.series]
    paired = {f"{part}/{leaf}" for leaf in pairs for part in ("train", "eval")}
    by_prefix: dict[str, list[str]] = {}
    for name in lead(sorted(facts.series), facts.training.get("best_metric")):
        if name not in paired:
            by_prefix.setdefault(name.split("/", 1)[0] if "/" in name else "other", []).append(name)
    known = {prefix for prefixes in GROUPS.values() for prefix in prefixes}
    groups = GROUPS | {prefix: (prefix,) for prefix in sorted(by_prefix) if prefix not in known}
    charts = {PAIRED: [_plan_pair(facts, leaf) for leaf in pairs]} | {
        title: [chart for prefix in prefixes for chart in _plan_prefix(facts, prefix, by_prefix.get(prefix, []))]
        for title, prefixes in groups.items()
    }
    return {title: drawn for title, drawn in charts.items() if drawn}


def _leaves(facts: Facts, group: str) -> list[str]:
    names = lead(sorted(name for name in facts.series if name.startswith(f"{group}/")))
    return [name.removeprefix(f"{group}/") for name in names]


def _plan_pair(facts: Facts, leaf: str) -> dict[str, Any]:
    """Draw what was measured in training and in evaluation against each other."""
    lines = [replace(facts.series[f"{part}/{leaf}"], name=part) for part in ("train", "eval")]
    return plan_chart(leaf, lines, _best_point(facts, f"eval/{leaf}"))


def _plan_prefix(facts: Facts, prefix: str, names: Sequence[str]) -> list[dict[str, Any]]:
    if prefix not in SHARED_CHARTS:
        return [plan_chart(name, [facts.series[name]], _best_point(facts, name)) for name in names]
    lines = [replace(facts.series[name], name=name.removeprefix(f"{prefix}/")) for name in names]
    return [plan_chart(SHARED_CHARTS[prefix], lines)] if lines else []


def _best_point(facts: Facts, name: str) -> tuple[float, float] | None:
    """Return the best point of an evaluation or of a reward; of what else is measured in training it is noise."""
    line = facts.series[name].finite()
    if len(line.values) < 2 or not (name.startswith("eval/") or name.endswith("/reward")):
        return None
    return find_best(name, line.steps, line.values, facts.training)


def _environment_tables(environment: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return titles and texts by the name of the table; that of the values outside any has none."""
    tables: dict[str, dict[str, str]] = {"": {}}
    for key, value in environment.items():
        if isinstance(value, dict):
            tables[_title(key)] = {_title(name): _plain(inner) for name, inner in value.items()}
        else:
            tables[""][_title(key)] = _plain(value)
    return tables if environment else {}


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
            "size": _size(sum(file.size_bytes for file in manifest.files.values())),
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
