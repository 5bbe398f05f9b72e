"""The `etude` command: signatures and help here, work in the module each command imports when it runs."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.cli import complete
from etude.errors import EtudeError, Interrupted

# Rich costs 0.1 s to import: help and usage errors use it only where they are seen in a terminal.
app = typer.Typer(
    name="etude",
    help="Write a trainer once, run it on any engine, and get the same numbers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() and sys.stderr.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
new_app = typer.Typer(help="Write a working skeleton to start from.", no_args_is_help=True)
app.add_typer(new_app, name="new")

Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="Experiment file (YAML).", autocompletion=complete.configs)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides such as training.lr=1e-4.",
        show_default=False,
        autocompletion=complete.overrides,
    ),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Run directory, or its name under runs/.", autocompletion=complete.runs)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from etude import __version__

        typer.echo(f"etude {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Write a trainer once, run it on any engine, and get the same numbers."""


@app.command()
def train(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG", help="Experiment file (YAML).", show_default=False, autocompletion=complete.configs
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str, typer.Option(metavar="auto|never|PATH", help="Continue from the last checkpoint, none, or this one.")
    ] = "auto",
    train_config: Annotated[
        Path | None,
        typer.Option("--train_config", "--train-config", metavar="CONFIG", help="Another way to give CONFIG."),
    ] = None,
) -> None:
    """Train what CONFIG describes.

    Several processes: torchrun --nproc_per_node 2 -m etude train CONFIG
    """
    settings = list(overrides or [])
    if train_config is not None and config is not None:
        settings.insert(0, config)  # the file came by option, so the first plain argument is an override
    path = train_config or (Path(config) if config is not None else None)
    if path is None:
        raise typer.BadParameter("give the experiment file to train, as in: etude train configs/digits.yaml")

    from etude.cli.train import train_config as run_training

    run_training(path, settings, resume)


@app.command()
def resume(run: RunName, overrides: Overrides = None) -> None:
    """Go on with RUN in its own directory.

    Overrides may lengthen it (training.training_steps=2000) or change its cadence.
    """
    from etude.cli.train import resume_run

    resume_run(run, list(overrides or []))


@app.command()
def check(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Validate CONFIG and print every value with where it comes from."""
    from etude.cli.check import check_config

    check_config(config, list(overrides or []), as_json=as_json)


@app.command("runs")
def list_runs(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="Folder that holds the runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs under ROOT."""
    from etude.cli.runs import print_runs

    print_runs(root, as_json=as_json)


@app.command()
def report(
    run: RunName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it [RUN/report.html].")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write RUN as one HTML page: curves, config, environment."""
    from etude.cli.runs import make_report

    make_report(run, output, open_page=open_page)


@app.command("list")
def list_components(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND", help="policies, data, algorithms, engines, ...", show_default=False,
            autocompletion=complete.kinds,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="One of them, to see its parameters.", show_default=False,
            autocompletion=complete.keys,
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None, typer.Option("--plugin", metavar="MODULE", help="Load this module or .py file first.")
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """List what a config can name, and the parameters each takes."""
    from etude.cli.listing import print_components

    print_components(kind, key, plugins=list(plugin or []), as_json=as_json)


@app.command()
def verify(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps of each run.")] = 20,
) -> None:
    """Train twice and compare the parameters, bit for bit."""
    from etude.cli.verify import verify_config

    verify_config(config, list(overrides or []), steps=steps)


@new_app.callback()
def new() -> None:
    """Write a working skeleton to start from."""


@new_app.command("trainer")
def new_trainer(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the trainer, such as label_smoothing.")],
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder to write into.")] = Path("."),
) -> None:
    """Write NAME.py with a loss of your own, NAME.yaml that trains it, and a test that proves it."""
    from etude.cli.skeleton import write_trainer

    write_trainer(name, directory)


def main() -> None:
    """Run the command; a user's mistake ends in one sentence and its exit code, ours in a traceback."""
    # A command that lives for 0.3 s spends a tenth of it collecting imports that never die; training turns it on.
    gc.disable()
    try:
        app(prog_name="etude")
    except EtudeError as error:
        _complain(f"error: {error}")
        raise SystemExit(error.exit_code) from None
    except Interrupted as interruption:
        _complain(interruption.message)
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception:  # noqa: BLE001 - the last stop before the interpreter: secrets leave the traceback here
        import traceback

        from etude.secrets import redact

        sys.stderr.write(redact(traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        gc.freeze()  # nor is the interpreter to search them all for garbage on its way out


def _complain(message: str) -> None:
    from etude.secrets import redact

    rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ else ""
    sys.stderr.write(redact(f"etude: {rank}{message}\n"))
    sys.stderr.flush()
