"""Signatures and help of the commands that look at runs; the work is in the module each imports when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli import complete
from etude.cli.options import AsJson, OpenPage, RunName, optional_argument, output_option
from etude.cli.panels import LOOK


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("runs", rich_help_panel=LOOK)(list_runs)
    app.command(rich_help_panel=LOOK)(report)
    app.command(rich_help_panel=LOOK)(compare)
    app.command(rich_help_panel=LOOK)(watch)


def list_runs(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="Folder that holds the runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs under ROOT."""
    from etude.cli.runs import print_runs

    print_runs(root, as_json=as_json)


def report(
    run: RunName,
    output: Annotated[Path | None, output_option("Where to write it [RUN/report.html].", "FILE")] = None,
    open_page: OpenPage = False,
) -> None:
    """Write RUN as one HTML page: curves, config, environment."""
    from etude.cli.runs import make_report

    make_report(run, output, open_page=open_page)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Runs, or a pattern such as 'digits-*'; the first is what others are compared with.",
            autocompletion=complete.runs,
        ),
    ],
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help="Compare by this; what matters most unless given.")
    ] = None,
    output: Annotated[Path | None, output_option("Where to write the page [runs/compare.html].", "FILE")] = None,
    open_page: OpenPage = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Compare runs: curves over each other, seeds as bands, what differs, success with intervals.

    Such as: etude compare 'digits-*'
    """
    from etude.cli.looking import compare as compare_runs

    compare_runs(runs, metric=metric, output=output, open_page=open_page, as_json=as_json)


def watch(
    runs: Annotated[
        list[str] | None,
        optional_argument("RUN", "Runs or patterns; without any, those that are running.", complete.runs),
    ] = None,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8700,
    open_page: OpenPage = False,
) -> None:
    """Serve the reports of runs on this machine while they train; the pages refresh themselves."""
    from etude.cli.looking import watch as watch_runs

    watch_runs(runs or [], port=port, open_page=open_page)
