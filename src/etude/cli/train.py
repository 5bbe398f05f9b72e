"""`etude train` and `etude resume`: from a config to a finished run."""

from __future__ import annotations

import gc
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.output import is_main_rank, say, show_log
from etude.cli.ranks import start_ranks
from etude.cli.runs import find_run
from etude.errors import ConfigError, Interrupted, exits_refused

if TYPE_CHECKING:
    from etude.config.schema import RunConfig
    from etude.runs.directory import Run
    from etude.types import Result


def train_config(config: Path, overrides: list[str], resume: str, mode: str | None = None) -> None:
    """Build what the config describes, train it, and say where the result is; "auto" leaves it to `run.resume`."""
    from etude.config.load import load

    loaded = load(config, overrides, mode)
    if start_ranks(
        loaded.config, ["train", str(config), *overrides, "--resume", resume, *(["-m", mode] if mode else [])]
    ):
        return
    from etude.config.build import build  # only a valid config is worth the import of torch

    with exits_refused(lambda: "step 0, before it began"):
        trainer = build(loaded)
    _fit(trainer, _begin_with(loaded.config.run) if resume == "auto" else resume)


def _begin_with(run: RunConfig) -> str:
    """Return what to go on from; a run that was stopped on its way from a checkpoint goes on with its own."""
    if run.resume in ("auto", "never") or run.name is None:
        return run.resume
    own = Path(run.root) / run.name / "checkpoints"
    return "auto" if any(own.glob("step-*")) else run.resume


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
    if start_ranks(loaded.config, ["resume", run, *overrides]):
        return
    from etude.config.build import build

    with exits_refused(lambda: "the step it had reached, before it went on"):
        trainer = build(loaded, run=directory)
    _fit(trainer, "auto")


def _fit(trainer: Any, resume: str) -> None:
    gc.enable()  # switched off for the start by `main`
    show_log()
    started = time.monotonic()
    with how_to_go_on(trainer):
        result = trainer.fit(resume=resume)
    _require_training(result)
    if is_main_rank():
        _print_result(result, time.monotonic() - started)


@contextmanager
def how_to_go_on(trainer: Any, command: str = "") -> Iterator[None]:
    """Say, where a signal ends training, how far it came and which command goes on with it."""
    try:
        yield
    except Interrupted as interruption:
        run: Run | None = getattr(trainer, "run", None)
        if run is not None and (step := run.status().get("step")) is not None:
            command = command or f"etude resume {shlex.quote(_name_of(run.dir))}"
            interruption.message += f"; saved at step {step}, go on with: {command}"
        raise


def _name_of(directory: Path) -> str:
    return directory.name if directory.parent == Path("runs") else str(directory)


# What may differ without a finished run becoming another one: how long, how often, how fast, and where to.
_NEUTRAL = (
    "run.", "loggers", "engine", "name", "description", *(
        f"training.{key}:" for key in (
            "training_steps", "duration", "log_every", "save_every", "evaluate_every", "keep_last", "keep_best",
            "num_workers", "num_threads", "device", "hang_timeout_s",
        )
    ),
)  # fmt: skip


def _require_training(result: Result) -> None:
    """Refuse to end well where other settings were asked for than those that a finished run was trained with."""
    other = [change for change in result.changes if not change.startswith(_NEUTRAL)]
    if result.steps == result.first_step and other:
        raise ConfigError(
            f"{result.run_dir} had finished before and was not trained, but now differs: {'; '.join(other)}; "
            "give it another run.name, use --resume never, or ask for more steps"
        )


def _print_result(result: Result, seconds: float) -> None:
    from etude.runs.progress import format_duration

    if result.steps == result.first_step:
        say(f"run: {result.run_dir}")
        return
    reason = "" if result.stopped == "finished" else f" ({result.stopped})"
    say(f"reached step {result.steps} in {format_duration(seconds)}{reason}")
    if figures := _figures(result):
        say("  ".join(figures))
    if result.run_dir is not None:
        say(f"run: {result.run_dir}")
        say(f"report: etude report {shlex.quote(str(result.run_dir))}")


def _figures(result: Result) -> list[str]:
    """Return what matters of a result, in the order of everything that shows a run; the first with its best."""
    from etude.runs.directory import Run
    from etude.runs.leading import find_best
    from etude.runs.metrics import read_metrics
    from etude.runs.progress import format_figure, shown_metrics

    run = None if result.run_dir is None else Run(result.run_dir)
    training = {} if run is None else run.read_config().get("training") or {}
    shown = shown_metrics(result.metrics, training)
    figures = [f"{name} {format_figure(value)}" for name, value in list(shown.items())[:3]]
    rows = [] if run is None or not shown else read_metrics(run.metrics_path)
    lead = next(iter(shown), "")
    curve = [(row["step"], row[lead]) for row in rows if isinstance(row.get(lead), int | float)]
    best = find_best(lead, [step for step, _ in curve], [value for _, value in curve], training)
    if best is not None and best[1] != curve[-1][1]:
        figures[0] += f" (best {format_figure(best[1])} at step {best[0]:.0f})"
    return figures
