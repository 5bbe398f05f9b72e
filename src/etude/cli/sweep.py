"""Signature and help of `etude sweep`; the work is in the module that it imports when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli import complete
from etude.cli.options import Config, OpenPage, count, option, optional_argument
from etude.cli.overrides import TakesOverrides
from etude.cli.panels import TRAIN

MODES, SAMPLERS, PRUNERS = ("min", "max"), ("tpe", "random", "grid", "gp"), ("median", "asha", "hyperband", "none")


def add_sweep(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=TakesOverrides, rich_help_panel=TRAIN)(sweep)


def sweep(
    config: Config,
    overrides: Annotated[
        list[str] | None,
        optional_argument(
            "KEY=WHAT", "4,8,16, log(LO,HI), uniform(LO,HI), int(LO,HI), range(LO,HI,STEP), or a value.",
            complete.overrides,
        ),
    ] = None,
    trials: Annotated[int | None, count("--trials", "Trials in all; 20, or all of a grid, unless given.")] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help="What to optimise; what matters most unless given.")
    ] = None,
    mode: Annotated[str | None, option("--mode", "min|max", "Whether less or more of it is better.")] = None,
    sampler: Annotated[str, option("--sampler", "|".join(SAMPLERS), "How values are chosen.")] = "tpe",
    pruner: Annotated[str, option("--pruner", "|".join(PRUNERS), "How hopeless trials are given up early.")] = "median",
    jobs: Annotated[int | None, count("--jobs", "Trials at a time; 1, or what a Ray cluster has room for.")] = None,
    timeout: Annotated[
        str | None, option("--timeout", "TIME", "End after this, such as 30min or 2h; the same command goes on.")
    ] = None,
    seed: Annotated[int, count("--seed", "Seed of the search, not of the trials.", least=0)] = 0,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Folder under runs/ [CONFIG-sweep].")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run the trials with Ray Tune.")] = False,
    open_page: OpenPage = False,
) -> None:  # fmt: skip
    """Search settings of CONFIG with Optuna; stopped and started again, it goes on.

    Such as: etude sweep digits 'training.lr=log(1e-4,1e-1)' training.batch_size=32,64 --trials 20
    """
    for given, known, what in (
        (mode, MODES, "--mode"),
        (sampler, SAMPLERS, "--sampler"),
        (pruner, PRUNERS, "--pruner"),
    ):
        if given is not None and given not in known:
            raise typer.BadParameter(f"{what} is one of {', '.join(known)}, got {given!r}")
    from etude.cli.sweeping import run_sweep

    run_sweep(
        Path(config), list(overrides or []), trials=trials, metric=metric, mode=mode, sampler=sampler, pruner=pruner,
        jobs=jobs, timeout=timeout, seed=seed, name=name, on_ray=ray, open_page=open_page,
    )  # fmt: skip
