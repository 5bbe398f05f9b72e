"""`etude model`: look at a model that is written in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import AsJson, output_option

model_app = typer.Typer(help="Look at models that are written in YAML.", no_args_is_help=True)


@model_app.callback()
def model() -> None:
    """Look at models that are written in YAML."""


@model_app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The model's file (YAML).")],
    output: Annotated[Path | None, output_option("Where to write the drawing [NAME.svg].", "FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Build the model of FILE, print its graph with shapes and parameters, and draw it.

    The drawing of any/where/NAME.yaml is NAME.svg in the working directory, unless --output names another place.
    Shapes are known where the file declares those of its inputs.
    """
    show_model(file, output or Path(file.name).with_suffix(".svg"), as_json=as_json)


def show_model(file: Path, output: Path, *, as_json: bool = False) -> None:
    """Print a model and write its drawing."""
    from etude.cli.output import print_json, print_table, say
    from etude.errors import ConfigError, EtudeError, one_line
    from etude.policies.graph.build import build_model
    from etude.policies.graph.drawing import describe_model, draw
    from etude.runs.durable import write_output

    try:
        built = build_model(file)
    except EtudeError:
        raise
    except Exception as error:  # a component may raise anything about what the file gives it
        raise ConfigError(f"{one_line(error, 600)} ({type(error).__name__})") from error
    rows = describe_model(built)
    drawing = draw(rows, file.name)
    write_output(output, drawing)
    total = sum(parameter.numel() for parameter in built.parameters())
    if as_json:
        print_json({"parameters": total, "drawing": str(output), "nodes": [row._asdict() for row in rows]})
        return
    table = [
        (
            row.name,
            row.call,
            ", ".join(row.reads) or "-",
            row.shape or "?",
            f"{row.parameters:,}" if row.parameters else "",
        )
        for row in rows
    ]
    print_table(("node", "what", "reads", "shape", "parameters"), table, right=(4,))
    say(f"{total:,} parameters; drawing: {output}")
