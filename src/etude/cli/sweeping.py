"""`etude sweep` and `etude train --seeds`: many runs of one experiment, each a training of its own."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from etude.cli.output import say, show_log
from etude.config.build import name_after
from etude.config.load import Loaded, load
from etude.errors import ConfigError, EtudeError, Interrupted
from etude.loop.signals import StopSignals
from etude.runs.directory import Run
from etude.runs.groups import what_is_minimised
from etude.runs.lock import DirectoryLock
from etude.runs.progress import format_duration, format_figure
from etude.sweep.driver import SweepDriver, SweepPlan, show_values
from etude.sweep.objective import Objective, choose_objective
from etude.sweep.plan import SweepFolder, keep_plan, settings_of
from etude.sweep.processes import run_queue
from etude.sweep.seeds import LENGTH, SeedQueue, parse_seeds
from etude.sweep.space import SearchSpace, parse_space
from etude.sweep.study import TrialStudy
from etude.types.duration import Duration

if TYPE_CHECKING:
    from etude.runs.compare import RunComparison

PLAN, SEEDS_PLAN = "sweep.json", "seeds.json"
DEFAULT_TRIALS = 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def run_sweep(
    config: Path, texts: Sequence[str], *, trials: int | None, metric: str | None, mode: str | None, sampler: str,
    pruner: str, jobs: int | None, timeout: str | None, seed: int, name: str | None, on_ray: bool, open_page: bool,
) -> None:  # fmt: skip
    """Search, or go on searching, and leave a page."""
    _refuse_ranks("etude sweep")
    deadline_s = _deadline(timeout)
    space = parse_space(texts)
    loaded, place, minimised = _check(config, space, name)
    objective = choose_objective(loaded, metric, mode, minimised)
    folder = place.folder
    if sampler == "grid":
        space.grid()  # refused before anything is written
    _require_no_run(folder, PLAN, "--name")
    with DirectoryLock(folder, holder="sweep"):
        settings = settings_of(loaded, [one.key for one in space.parameters])
        keep_plan(
            folder / PLAN,
            {
                "config": str(config), "searched": list(space.written), "metric": objective.metric,
                "mode": objective.mode, "sampler": sampler, "pruner": pruner, "seed": seed, "settings": settings,
            },
            ("searched", "metric", "mode", "settings"),
            "finish it as it was, or give this one a --name of its own",
        )  # fmt: skip
        cadence = _cadence(loaded, objective)
        study = TrialStudy(
            folder, space, objective, sampler=sampler, pruner=pruner, seed=seed, jobs=jobs or (2 if on_ray else 1),
            cadence=cadence,
        )  # fmt: skip
        wanted = min(trials or study.grid_size or DEFAULT_TRIALS, study.grid_size or sys.maxsize)
        plan = SweepPlan(str(config), place, space, objective, wanted, jobs or 1, sampler, pruner, seed)
        driver = SweepDriver(plan, study, _say_at_once)
        _introduce(plan, driver)
        _drive(driver, jobs, deadline_s, on_ray)
        page = _conclude(driver)
    if open_page:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


def _drive(driver: SweepDriver, jobs: int | None, deadline_s: float | None, on_ray: bool) -> None:
    """Train what is left; say how to go on where that was not all of it."""
    show_log()
    with StopSignals() as signals:
        if on_ray:
            from etude.sweep.on_ray import run_on_ray

            ended = run_on_ray(driver, jobs, signals, deadline_s)
        else:
            ended = run_queue(driver, driver.plan.jobs, signals, deadline_s)
    if ended == "finished":
        return
    driver.write_page()
    done = sum(one.state != "running" for one in driver.study.records())
    told = f"{done} of {driver.plan.trials} trials are done; go on with: {_this_command()}"
    if ended == "timeout":
        say(f"the time is over: {told}")
    else:
        raise Interrupted(signals.received, f"interrupted: {told}")


def _introduce(plan: SweepPlan, driver: SweepDriver) -> None:
    records = driver.study.records()
    say(f"sweep {plan.place.folder}: {plan.objective}")
    if plan.objective.note:
        say(f"  {plan.objective.note}")
    for one in plan.space.parameters:
        say(f"  {one.key}: {one}")
    before = sum(record.state != "running" for record in records)
    going = len(records) - before
    if records:
        say(f"going on: {before} of {plan.trials} trials are done{f', {going} half done' if going else ''}")
    sys.stdout.flush()


def _conclude(driver: SweepDriver) -> Path:
    page = driver.write_page(is_last=True)
    driver.require_success()
    best, plan = driver.study.best(), driver.plan
    if best is not None and best.value is not None:
        found = f"{plan.objective.metric} {format_figure(best.value)}"
        say(f"best: trial {best.number}, {found}: {show_values(best, plan.space)}")
        shares = driver.study.importances()
        if shares:
            say("importance: " + ", ".join(f"{key} {share:.0%}" for key, share in shares.items()))
        say(f"again: {plan.command_again(dict(best.values))}")
    say(f"page: {page}")
    return page


def _check(config: Path, space: SearchSpace, name: str | None) -> tuple[Loaded, SweepFolder, list[dict[str, object]]]:
    """Load the file with every end and every choice of the space: what is wrong shows before the first trial.

    Returns:
        The first configuration, where its runs go, and what each one minimises.
    """
    keys = [text.partition("=")[0].strip() for text in (*space.written, *space.fixed)]
    if "run.name" in keys:
        raise ConfigError("run.name: every trial is a run of its own; name the sweep with --name")
    if any(one.key.split(".")[0] in ("run", "loggers") for one in space.parameters):
        raise ConfigError("run and loggers say where things are kept: there is nothing to search in them")
    first: tuple[Loaded, SweepFolder] | None = None
    minimised: list[dict[str, object]] = []
    for overrides in space.samples():
        loaded = load(config, overrides)
        minimised.append(what_is_minimised(settings_of(loaded)))
        if first is None:
            place = SweepFolder(Path(loaded.config.run.root), _folder_name(name, loaded, "sweep"))
            first = load(config, [*overrides, *place.overrides("trial-0000")]), place
            place.require(first[0], "trial-0000")
    assert first is not None
    if not space.parameters:
        raise ConfigError(
            "there is nothing to search; name a setting with what to try, such as 'training.lr=log(1e-5,1e-2)'. "
            "To repeat one experiment: etude train CONFIG --seeds 5"
        )
    return *first, minimised


def _folder_name(given: str | None, loaded: Loaded, ending: str) -> str:
    if given is not None:
        if not _NAME.fullmatch(given):
            raise ConfigError(f"{given!r} cannot name a folder of runs; take letters, digits, '.', '_' and '-'")
        return given
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', loaded.config.run.name or name_after(loaded.path))}-{ending}"


def _cadence(loaded: Loaded, objective: Objective) -> tuple[int, int | None]:
    """Return the step at which trials are first measured, and their last one, as far as the configuration tells."""
    training = loaded.config.training
    every = training.evaluate_every if objective.is_evaluated else training.log_every
    least = int(every.value) if every is not None and every.unit == "steps" else 1
    most = int(training.length.value) if training.length.unit == "steps" else None
    return (least, most) if most is None or least <= most else (1, most)


def _deadline(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        length = Duration.parse(text)
    except ValueError:
        length = None
    if length is None or length.unit != "seconds":
        raise ConfigError(f"--timeout is a time, such as 90s, 30min or 2h; got {text!r}")
    return time.monotonic() + length.value


def _refuse_ranks(what: str) -> None:
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"{what} starts trainings by itself; run it without torchrun (--jobs trains several at a time)"
        )


def _require_no_run(folder: Path, plan: str, option: str) -> None:
    if Run(folder).exists() and not (folder / plan).exists():
        raise ConfigError(f"{folder} is a run already, and cannot hold others; choose another name with {option}")


def _this_command() -> str:
    return shlex.join(["etude", *sys.argv[1:]])


def _say_at_once(text: str) -> None:
    say(text)
    sys.stdout.flush()


# ---- seeds -----------------------------------------------------------------------------------------------------------


def train_seeds(config: Path, overrides: list[str], seeds: str, jobs: int, mode: str | None) -> None:
    """Train an experiment once for each seed, or go on with that, and compare the runs."""
    _refuse_ranks("--seeds")
    wanted = parse_seeds(seeds)
    if any(text.partition("=")[0].strip() == "training.seed" for text in overrides):
        raise ConfigError("training.seed is what --seeds sets; leave one of them out")
    loaded = load(config, overrides, mode)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", loaded.config.run.name or name_after(loaded.path))
    place = SweepFolder(Path(loaded.config.run.root), f"{stem}-seeds")
    probe = f"{stem}-seed-{wanted[0]}"
    placed = load(config, [*overrides, f"training.seed={wanted[0]}", *place.overrides(probe)], mode)
    place.require(placed, probe)
    training = placed.stored()["training"]
    command = ["train", str(config), *overrides, *(["-m", mode] if mode else [])]
    _require_no_run(place.folder, SEEDS_PLAN, "-t")
    with DirectoryLock(place.folder, holder="command"):
        keep_plan(
            place.folder / SEEDS_PLAN,
            {"config": str(config), "settings": settings_of(placed, [f"training.{key}" for key in LENGTH])},
            ("settings",),
            "finish it as it was, or name this one with -t NAME",
        )
        length = {key: training.get(key) for key in LENGTH}
        queue = SeedQueue(place, stem, command, wanted, length, jobs, _say_at_once)
        queue.require_no_longer()
        _say_at_once(f"training {len(wanted)} {'seeds' if len(wanted) > 1 else 'seed'} into {place.folder}")
        show_log()
        with StopSignals() as signals:
            ended = run_queue(queue, jobs, signals)
        if ended == "interrupted":
            done = sum(map(queue.is_done, wanted))
            told = f"{done} of {len(wanted)} seeds are done; go on with: {_this_command()}"
            raise Interrupted(signals.received, f"interrupted: {told}")
        _compare(queue)
    if queue.failures:
        seed, complaint = next(iter(queue.failures.items()))
        raise EtudeError(f"{len(queue.failures)} of {len(wanted)} seeds failed; seed {seed}: {complaint}")


def _compare(queue: SeedQueue) -> None:
    from etude.cli.looking import print_comparison
    from etude.runs.compare import compare_runs, write_comparison

    done = [queue.run_of(seed).dir for seed in queue.seeds if queue.is_done(seed)]
    if not done:
        return
    comparison = compare_runs(done)
    page = write_comparison(comparison, queue.place.folder / "compare.html")
    print_comparison(comparison)
    _print_means(comparison)
    say(f"page: {page}")


def _print_means(comparison: RunComparison) -> None:
    """Print the mean and its deviation beside the interquartile mean of the table."""
    from statistics import fmean, stdev

    stick = comparison.yardstick
    for standing in comparison.standings:
        scores = [fmean(row) for row in standing.scores_RT]
        if len(scores) > 1:
            each = ", ".join(stick.write(score) for score in scores)
            say(f"mean {stick.write(fmean(scores))}, standard deviation {stick.write(stdev(scores))}: {each}")
    seconds = [member.facts.status.get("duration_s", 0.0) for group in comparison.groups for member in group.members]
    say(f"trained for {format_duration(sum(seconds))} in all; the table has the interquartile mean")
