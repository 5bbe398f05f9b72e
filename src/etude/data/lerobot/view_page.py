"""`etude data view`: a dataset as one HTML file, with as much of its episodes as a file should hold."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from etude.data.lerobot.survey import Survey
from etude.data.lerobot.video import cut_video
from etude.data.lerobot.view_parts import (
    MOST_HISTOGRAMS,
    SHOWN_TASKS,
    draw_distributions,
    draw_lengths,
    list_oddities,
    list_tasks,
    make_columns,
    make_index,
)
from etude.data.lerobot.viewed import ViewedDataset
from etude.errors import DataError
from etude.runs.durable import write_output
from etude.runs.page import format_number, render, scripts, spread, styles

MOST_EPISODES: Final = 400
MOST_VALUES: Final = 4_000_000
"""Numbers in one file: 21 MB."""
MOST_PICTURE_BYTES: Final = 48_000_000
"""Videos and pictures in one file: 64 MB as text."""
PICTURES: Final = 16
"""Pictures of an episode in a file, where a camera is stored as images."""


def render_view(
    dataset: ViewedDataset, survey: Survey, *, episodes: Sequence[tuple[int, dict[str, Any]]] = (), note: str = "",
    is_served: bool = False,
) -> str:  # fmt: skip
    """Return the page of a dataset.

    Args:
        dataset: What is shown.
        survey: What was found in it.
        episodes: The parts that are in the page itself.
        note: What is said above the episodes.
        is_served: Whether the page asks the server that it came from for episodes.
    """
    info, tasks = dataset.info, list_tasks(dataset)
    seconds = info.total_frames / dataset.fps
    robot = f", robot {info.robot_type}" if info.robot_type else ""
    return render(
        "data/lerobot/view.html",
        **scripts("data/lerobot/view_plots.js", "data/lerobot/view.js"),
        style=styles("runs/page.css", "data/lerobot/view.css"),
        title=f"{dataset.name} - Etude data",
        heading=dataset.name,
        facts=[f"{dataset.root.resolve()}: LeRobot {info.version}{robot}, {dataset.fps:g} frames a second"],
        tiles=_tiles(dataset, survey, seconds),
        index=make_index(dataset, survey, is_served=is_served),
        episodes=episodes,
        note=note,
        oddities=list_oddities(survey),
        notes=survey.notes,
        lengths=draw_lengths(dataset),
        coverage=survey.coverage,
        tasks=tasks[:SHOWN_TASKS],
        more_tasks=max(0, len(tasks) - SHOWN_TASKS),
        distributions=draw_distributions(survey.distributions),
        undrawn=max(0, sum(not one.is_constant for one in survey.distributions) - MOST_HISTOGRAMS),
        refreshed=is_served,
        origins="'self' data:" if is_served else "data:",
    )


def _tiles(dataset: ViewedDataset, survey: Survey, seconds: float) -> list[tuple[str, str, str]]:
    lengths = dataset.episodes.lengths
    hours = f"{seconds / 3600:.1f} h" if seconds > 7200 else f"{seconds / 60:.1f} min" if seconds > 120 else ""
    tiles = [
        ("Episodes", f"{len(dataset):,}", f"of {lengths.min():,} to {lengths.max():,} frames"),
        ("Frames", f"{dataset.info.total_frames:,}", f"{hours or f'{seconds:.1f} s'} at {dataset.fps:g} a second"),
        ("Tasks", f"{len(set(dataset.tasks)):,}", ""),
        ("Cameras", str(len(dataset.info.cameras)), ", ".join(name.split(".")[-1] for name in dataset.info.cameras)),
        ("Look odd", f"{len(survey.marks):,}", f"{len(survey.marks) / len(dataset):.1%} of the episodes"),
    ]
    if (reached := dataset.successes()) is not None:
        tiles.insert(3, ("Success", f"{sum(reached) / len(reached):.1%}", f"{sum(reached):,} of {len(reached):,}"))
    if (returns := dataset.returns()) is not None:
        tiles.append(("Summed reward", format_number(sorted(returns)[len(returns) // 2]), "median of the episodes"))
    return tiles


# -- one file ---------------------------------------------------------------------------------------------------


def count_values(dataset: ViewedDataset) -> int:
    """Return how many numbers a dataset holds."""
    return sum(values.size for values in dataset.columns.values())


def why_too_large(dataset: ViewedDataset) -> str:
    """Return in words why a dataset does not fit into one file; nothing if it does."""
    if len(dataset) > MOST_EPISODES:
        return f"{len(dataset):,} episodes"
    if (values := count_values(dataset)) > MOST_VALUES:
        return f"{values:,} numbers"
    if (size := _picture_bytes(dataset)) > MOST_PICTURE_BYTES:
        return f"{size / 1e6:.0f} MB of video"
    return ""


def _picture_bytes(dataset: ViewedDataset) -> int:
    files = {file for clips in dataset.episodes.clips.values() for file in clips.files}
    return sum(file.stat().st_size for file in files if file.is_file())


def write_view(
    dataset: ViewedDataset,
    survey: Survey,
    output: Path,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Write a dataset as one file, and return in words what was left out; nothing if all is there."""
    shown, note = _gather(dataset, survey, advance)
    write_output(output, render_view(dataset, survey, episodes=shown, note=note))
    return note


def _gather(
    dataset: ViewedDataset, survey: Survey, advance: Callable[[int, int], None]
) -> tuple[list[tuple[int, dict[str, Any]]], str]:
    """Return the episodes that a file holds, odd ones first to come in, and what is said about the others."""
    order = sorted(range(len(dataset)), key=lambda number: (number not in survey.marks, number))
    width = sum(values.shape[1] for values in dataset.columns.values())
    values_left, bytes_left = MOST_VALUES, MOST_PICTURE_BYTES
    parts: dict[int, dict[str, Any]] = {}
    unfilmed = 0
    for number in order[:MOST_EPISODES]:
        values_left -= int(dataset.episodes.lengths[number]) * width
        if values_left < 0:
            break
        cameras = []
        for camera in dataset.info.cameras:
            shown, size = _embed(dataset, camera, number, bytes_left)
            bytes_left -= size
            cameras.append(shown)
        unfilmed += any(one.get("left_out") for one in cameras)
        parts[number] = {"columns": make_columns(dataset, number), "cameras": cameras}
        advance(len(parts), min(len(order), MOST_EPISODES))
    said = []
    if len(parts) < len(dataset):
        said.append(f"This file holds {len(parts):,} of {len(dataset):,} episodes, odd ones first.")
    if unfilmed:
        said.append(
            f"The videos of {unfilmed:,} episodes are left out: {MOST_PICTURE_BYTES // 1_000_000} MB are in it."
        )
    return sorted(parts.items()), " ".join([*said, "`etude data view DATASET --serve` shows all."] if said else [])


def _embed(dataset: ViewedDataset, camera: str, episode: int, most_bytes: int) -> tuple[dict[str, Any], int]:
    try:
        if dataset.info.features[camera].dtype == "video":
            return _embed_video(dataset, camera, episode, most_bytes)
        return _embed_pictures(dataset, camera, episode, most_bytes)
    except DataError as error:
        return {"name": camera, "kind": "none", "why": str(error)}, 0


def _embed_video(dataset: ViewedDataset, camera: str, episode: int, most_bytes: int) -> tuple[dict[str, Any], int]:
    path, begin_s = dataset.video_of(camera, episode)
    # Half a frame before the end, so that the first picture of the next episode stays out.
    end_s = begin_s + (float(dataset.episodes.lengths[episode]) - 0.5) / dataset.fps
    data, from_s = cut_video(path, begin_s, end_s)
    if len(data) > most_bytes:
        return _left_out(camera), 0
    source = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    return {"name": camera, "kind": "video", "src": source, "from_s": from_s}, len(data)


def _embed_pictures(dataset: ViewedDataset, camera: str, episode: int, most_bytes: int) -> tuple[dict[str, Any], int]:
    found = dataset.pictures(camera, episode)
    frames = spread(range(len(found)), PICTURES)
    size = sum(len(found[frame]) for frame in frames)
    if size > most_bytes:
        return _left_out(camera), 0
    sources = [picture_source(found[frame]) for frame in frames]
    return {"name": camera, "kind": "pictures", "frames": frames, "src": sources}, size


def _left_out(camera: str) -> dict[str, Any]:
    return {"name": camera, "kind": "none", "why": "its pictures are left out of this file", "left_out": True}


def picture_source(data: bytes) -> str:
    """Return an encoded picture as the source of an image, inside its page."""
    return f"data:{picture_kind(data)};base64,{base64.b64encode(data).decode()}"


def picture_kind(data: bytes) -> str:
    """Return the media type of an encoded picture."""
    return "image/png" if data.startswith(b"\x89PNG") else "image/jpeg"
