"""`etude data`: look at datasets and convert recordings; signatures and help here, work in `cli.datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import AsJson, Images, OpenPage, count, option, output_option

data_app = typer.Typer(help="Look at LeRobot datasets, and convert recordings to them.", no_args_is_help=True)

Root = Annotated[str, typer.Argument(metavar="DATASET", help="Directory of a LeRobot dataset, or its repo_id.")]


@data_app.callback()
def data() -> None:
    """Look at LeRobot datasets, and convert recordings to them."""


@data_app.command()
def inspect(root: Root, as_json: AsJson = False) -> None:
    """Check DATASET and print its features, tasks and size."""
    from etude.cli.datasets import inspect_dataset

    inspect_dataset(root, as_json=as_json)


@data_app.command()
def stats(
    root: Root,
    episodes: Annotated[str | None, option("--episodes", "A-B,C", "Episodes to count, such as 0-9,12.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print mean, spread, range and quantiles of every feature, computed from the data."""
    from etude.cli.datasets import print_stats

    print_stats(root, episodes, as_json=as_json)


@data_app.command()
def view(
    root: Root,
    episode: Annotated[int | None, count("--episode", "This episode alone.", least=0)] = None,
    output: Annotated[Path | None, output_option("Where to write the page [views/DATASET.html].", "FILE")] = None,
    open_page: OpenPage = False,
    serve: Annotated[bool, typer.Option("--serve", help="Serve it, as is done where a file is too small.")] = False,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8701,
    rerun: Annotated[Path | None, option("--rerun", "FILE", "Write a file for the Rerun viewer instead.")] = None,
) -> None:
    """Show DATASET: episodes with videos and curves, distributions, and what looks odd.

    Such as: etude data view data/metaworld-pick-place --open
    """
    from etude.cli.viewing import view as view_dataset

    view_dataset(root, episode=episode, output=output, open_page=open_page, serve=serve, port=port, rerun=rerun)


@data_app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="HDF5 file or folder (ALOHA, robomimic), or Zarr.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory of the new dataset.")],
    format_: Annotated[str, option("--format", "auto|aloha|robomimic|zarr", "How SRC is laid out.")] = "auto",
    fps: Annotated[float | None, option("--fps", "N", "Frames per second [what the layout implies].")] = None,
    task: Annotated[str | None, option("--task", "TEXT", "What the episodes are for.")] = None,
    images: Images = "video",
    rename: Annotated[
        list[str] | None, option("--rename", "OLD=NEW", "Call a feature otherwise, as an environment does.")
    ] = None,
) -> None:
    """Convert SRC to a LeRobot v3.0 dataset; an interrupted conversion goes on.

    Such as: etude data convert pusht_cchi_v7_replay.zarr data/pusht --fps 10 --task "push the T"
    """
    from etude.cli.datasets import convert_recording

    convert_recording(source, target, format_=format_, fps=fps, task=task, images=images, renames=list(rename or []))
