"""Options and arguments that several commands take, each with the same name, meaning and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from etude.cli import complete


def count(name: str, help: str, *, least: int = 1) -> Any:
    """Return an option that is a whole number."""
    return typer.Option(name, metavar="N", min=least, help=help)


def optional_argument(metavar: str, help: str, known: Any = None) -> Any:
    """Return an argument that may be left out; `known` completes it in a shell."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=known)


def output_option(help: str, metavar: str = "DIR") -> Any:
    """Return the option that says where a command writes; the help ends in where, unless told."""
    return typer.Option("--output", "-o", metavar=metavar, help=help)


def option(name: str, metavar: str, help: str) -> Any:
    """Return an option by what stands for its value, and its help."""
    return typer.Option(name, metavar=metavar, help=help)


Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="Experiment file (YAML) or preset.", autocompletion=complete.configs)
]
Overrides = Annotated[
    list[str] | None,
    optional_argument("KEY=VALUE", "Overrides such as training.lr=1e-4.", complete.overrides),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Run directory, or its name under runs/.", autocompletion=complete.runs)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Envs = Annotated[
    list[str], option("--env", "ENV", "metaworld/TASK, metaworld/*, pusht, aloha/TASK or gym:ID; may be repeated.")
]
EnvOptions = Annotated[
    list[str] | None, option("--option", "KEY=VALUE", "Further parameters; etude list environments KEY shows them.")
]
TrainedPolicy = Annotated[
    str,
    typer.Argument(metavar="POLICY", help="A run, a checkpoint or a saved policy.", autocompletion=complete.runs),
]
WhichCheckpoint = Annotated[
    str, option("--which", "best|last|STEP", "Checkpoint of a run; the best, or else the last.")
]
Plugins = Annotated[list[str] | None, option("--plugin", "MODULE", "Load this module or .py file first.")]
Images = Annotated[str, option("--images", "video|image", "How pictures are stored.")]
OpenPage = Annotated[bool, typer.Option("--open", help="Open it in a browser.")]
Seed = Annotated[int, count("--seed", "Root of all seeds.", least=0)]
Episodes = Annotated[int, count("--episodes", "Episodes of each environment.")]
