"""`etude train` and `etude resume`: from a config to a finished run."""

from __future__ import annotations

import gc
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.output import is_main_rank, say, show_log
from etude.cli.runs import find_run
from etude.errors import ConfigError, exits_refused

if TYPE_CHECKING:
    from etude.types import Result


def train_config(config: Path, overrides: list[str], resume: str) -> None:
    """Build what the config describes, train it, and say where the result is."""
    from etude.config.load import load

    loaded = load(config, overrides)
    from etude.config.build import build  # only a valid config is worth the import of torch

    with exits_refused(lambda: "step 0, before it began"):
        trainer = build(loaded)
    _fit(trainer, resume)


def resume_run(run: str, overrides: list[str]) -> None:
    """Go on with a run from its stored config, in its own directory."""
    directory = find_run(run)
    config = directory / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            f"{directory}: the run has no config.yaml to go on from; resume it from the script that made it"
        )
    from etude.cli.auditing import is_auditing, resume_auditor

    if is_auditing(config):
        resume_auditor(directory, overrides)
        return
    from etude.config.load import load

    loaded = load(config, overrides)
    from etude.config.build import build

    with exits_refused(lambda: "the step it had reached, before it went on"):
        trainer = build(loaded, run=directory)
    _fit(trainer, "auto")


def _fit(trainer: Any, resume: str) -> None:
    gc.enable()  # switched off for the start by `main`
    show_log()
    started = time.monotonic()
    result = trainer.fit(resume=resume)
    if is_main_rank():
        _print_result(result, time.monotonic() - started)


def _print_result(result: Result, seconds: float) -> None:
    from etude.runs.progress import format_duration, format_figure

    reason = "" if result.stopped == "finished" else f" ({result.stopped})"
    say(f"reached step {result.steps} in {format_duration(seconds)}{reason}")
    shown = sorted(name for name in result.metrics if name.startswith("eval/")) or ["train/loss"]
    shown.sort(key=lambda name: not name.endswith("loss"))
    figures = [f"{name} {format_figure(result.metrics[name])}" for name in shown if name in result.metrics]
    if figures:
        say("  ".join(figures))
    if result.run_dir is not None:
        say(f"run: {result.run_dir}")
        say(f"report: etude report {shlex.quote(str(result.run_dir))}")
