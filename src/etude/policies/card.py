"""Model cards: a README.md beside a saved or exported policy that says what it is, was trained on and can do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from etude.errors import ConfigError
from etude.policies.origin import PolicyOrigin, origin_of
from etude.reading.plain import show_value
from etude.runs.directory import Run
from etude.runs.durable import write_atomically
from etude.runs.evaluations import FOLDER, Evaluation, Measured, read_evaluations
from etude.runs.page import format_number
from etude.secrets import redact

CARD_FILE, FILM_FILE = "README.md", "film.mp4"
MADE_BY = "<!-- This card is made by Etude, and made anew with each save; remove this line to keep your own. -->"
LARGEST_FILM_BYTES = 5_000_000
_MARKUP = re.compile(r"([\\`*_{}\[\]()#+!|~$<>&@:-])")


def write_card(policy: nn.Module, directory: Path, usage: str | None = None) -> Path | None:
    """Write the card of a policy, and a film of it if its run has one; None where somebody has written their own.

    Args:
        policy: The policy; the run that it comes from tells about data and success, if it is known.
        directory: Where the policy was written.
        usage: Python that loads it, to be shown; `from_pretrained` of its class unless given.
    """
    target = directory / CARD_FILE
    if target.exists() and MADE_BY not in target.read_text(encoding="utf-8", errors="replace"):
        return None
    origin = origin_of(policy)
    run = None if origin is None or not origin.run.is_dir() else Run(origin.run)
    film = None if run is None else _copy_film(run.dir / FOLDER / "videos", directory / FILM_FILE)
    shown = ["## Use", "", "```python", usage or _from_pretrained(type(policy)), "```"]
    text = "\n".join([*_head(policy), *_body(policy, origin, run, film), "", *shown, ""])
    write_atomically(target, redact(text).encode())
    return target


def plain(text: str) -> str:
    """Return text that Markdown shows as it is: one line, with everything that could be markup escaped."""
    return (
        _MARKUP.sub(r"\\\1", " ".join(text.split()))
        .replace("\\<", "&lt;")
        .replace("\\>", "&gt;")
        .replace("\\&", "&amp;")
    )


def _from_pretrained(kind: type) -> str:
    home = kind.__module__.rpartition(".")[0] if kind.__module__.startswith("etude.") else kind.__module__
    return f'from {home} import {kind.__name__}\n\npolicy = {kind.__name__}.from_pretrained(".")'


def _head(policy: nn.Module) -> list[str]:
    is_text = hasattr(policy, "tokenizer")
    tags = ["etude", "reinforcement-learning" if is_text else "robotics"]
    kind = "text-generation" if is_text else "robotics"
    return ["---", "library_name: etude", f"pipeline_tag: {kind}", f"tags: {json.dumps(tags)}", "---", MADE_BY, ""]


def _body(policy: nn.Module, origin: PolicyOrigin | None, run: Run | None, film: str | None) -> list[str]:
    name = type(policy).__name__
    total = sum(weight.numel() for weight in policy.parameters())
    about = f"A policy of the class {plain(name)} with {format_number(total)} parameters, trained with Etude."
    lines = [f"# {plain(name if run is None else f'{name}, {run.name}')}", "", about]
    evaluations = [] if run is None else read_evaluations(run.dir)
    config = {} if run is None else _config(run)
    lines += _section("Task", _tasks(config, evaluations))
    lines += _section("Data", _data(config))
    lines += _section("Success", _success(evaluations, film))
    lines += _section("Inputs and outputs", _features(policy))
    if origin is not None:
        lines += _section("Training", _training(config, origin))
    return lines


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *(lines or ["Not recorded."])]


def _config(run: Run) -> dict[str, Any]:
    try:
        return run.read_config()
    except ConfigError:
        return {}


def _tasks(config: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> list[str]:
    found = dict.fromkeys(text for one in evaluations for text in one.task_texts)
    params = _params(config, "data")
    for key in ("tasks", "env", "task"):
        if value := params.get(key):
            found.setdefault(value["type"] if isinstance(value, Mapping) and "type" in value else show_value(value))
    return [f"- {plain(str(text))}" for text in found]


def _data(config: Mapping[str, Any]) -> list[str]:
    section = config.get("data")
    if not isinstance(section, Mapping):
        return []
    params = _params(config, "data")
    lines = [f"- type: {plain(str(section.get('type')))}"]
    lines += [f"- {plain(str(key))}: {plain(_shown(value))}" for key, value in params.items() if _is_short(value)]
    try:
        info = json.loads((Path(str(params["root"])) / "meta/info.json").read_text(encoding="utf-8"))
        counts = {key: info[f"total_{key}"] for key in ("episodes", "frames", "tasks") if f"total_{key}" in info}
        lines += [f"- {key}: {format_number(int(value))}" for key, value in counts.items()]
    except (KeyError, OSError, ValueError, TypeError):
        pass
    return lines


def _shown(value: Any) -> str:
    """Return a value as text; of a path on this machine, its name."""
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else show_value(value)


def _params(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    params = section.get("params") if isinstance(section, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def _is_short(value: Any) -> bool:
    return not isinstance(value, Mapping | list) or len(show_value(value)) <= 100


def _success(evaluations: Sequence[Evaluation], film: str | None) -> list[str]:
    lines: list[str] = []
    for one in evaluations:
        lines += ["| environment | episodes | measured | 95 % interval |", "|---|---|---|---|"]
        rows: list[Measured] = [*one.tasks, *([one.total] if len(one.tasks) > 1 else [])]
        lines += [
            f"| {plain(row.name)} | {row.episodes} | {row.title} {row.value_text()} | {row.interval_text() or '-'} |"
            for row in rows
        ]
        which = f"; evaluated: {plain(one.policy)}" if one.policy else ""
        lines += ["", f"Episodes of the {plain(one.split)} split, which was not trained on{which}.", ""]
    if film is not None:
        lines += [f'<video src="{FILM_FILE}" autoplay loop muted controls width="320"></video>', ""]
        lines.append(f"[A film of an episode]({FILM_FILE}): {plain(film)}.")
    return lines


def _copy_film(folder: Path, target: Path) -> str | None:
    """Copy one film, of a success if there is one; return what it shows."""
    films = sorted(folder.glob("*.mp4"), key=lambda path: (not path.stem.endswith("-success"), path.name))
    for path in films:
        if path.stat().st_size <= LARGEST_FILM_BYTES:
            write_atomically(target, path.read_bytes())
            return path.stem
    return None


def _features(policy: nn.Module) -> list[str]:
    spec = getattr(policy, "spec", None)
    features = getattr(spec, "features", None)
    if not isinstance(features, Mapping):
        return ["Text in, text out."] if hasattr(policy, "tokenizer") else []
    lines = ["| feature | role | shape | type |", "|---|---|---|---|"]
    for name, one in features.items():
        lines.append(
            f"| {plain(name)} | {plain(str(one.role))} | {plain(str(list(one.shape)))} | {plain(str(one.dtype))} |"
        )
    return lines


def _training(config: Mapping[str, Any], origin: PolicyOrigin) -> list[str]:
    lines = [f"- run: {plain(origin.run.resolve().name)}", f"- weights: {plain(str(origin))}"]
    for name in ("policy", "algorithm"):
        section = config.get(name)
        if isinstance(section, Mapping):
            lines.append(f"- {name}: {plain(str(section.get('type')))}")
    training = config.get("training")
    for key in ("training_steps", "batch_size", "lr", "schedule", "seed"):
        if isinstance(training, Mapping) and training.get(key) is not None:
            lines.append(f"- {plain(key)}: {plain(show_value(training[key]))}")
    return lines
