"""One episode as one HTML page: pictures of every camera and curves of every number, without network."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.video import VideoDecoder, VideoIndex
from etude.data.lerobot.view_page import picture_source
from etude.data.lerobot.viewed import ViewedDataset
from etude.errors import DataError, MissingExtraError
from etude.runs.charts import Series, plan_chart
from etude.runs.durable import write_output
from etude.runs.page import render

PICTURES = 12
_LINES_PER_CHART = 6  # as many as there are colours


def write_page(dataset: ViewedDataset, episode: int, output: Path) -> Path:
    """Write the page of one episode and return where it is."""
    return write_output(output, render_page(dataset, episode))


def render_page(dataset: ViewedDataset, episode: int) -> str:
    """Return the page of one episode as text."""
    total = len(dataset)
    if not 0 <= episode < total:
        raise DataError(f"{dataset.root}: there is no episode {episode}; there are 0 to {total - 1}")
    count = int(dataset.episodes.lengths[episode])
    seconds = count / dataset.fps
    length = f"episode {episode} of {total}, {count} frames, {seconds:.1f} s at {dataset.fps:g} a second"
    return render(
        "data/lerobot/page.html",
        title=f"{dataset.name}, episode {episode}",
        heading=dataset.name,
        facts=[length, f"Task: {dataset.task_text(dataset.tasks[episode])}"],
        strips={name: _strip(dataset, name, episode) for name in dataset.info.cameras},
        charts=_charts(dataset, episode),
    )


def _strip(dataset: ViewedDataset, camera: str, episode: int) -> dict[str, Any]:
    """Return a few pictures of a camera, or why there are none."""
    frames = np.unique(np.linspace(0, dataset.episodes.lengths[episode] - 1, PICTURES).astype(np.int64))
    is_video = dataset.info.features[camera].dtype == "video"
    try:
        found = (_from_video if is_video else _from_images)(dataset, camera, episode, frames)
    except DataError as error:
        return {"pictures": [], "why": str(error)}
    pictures = [
        {"frame": frame, "seconds": frame / dataset.fps, "src": picture_source(data)} for frame, data in found.items()
    ]
    return {"pictures": pictures, "why": "" if pictures else "there are no pictures of this episode"}


def _from_images(dataset: ViewedDataset, camera: str, episode: int, frames: NDArray[np.int64]) -> dict[int, bytes]:
    stored = dataset.pictures(camera, episode)
    return {frame: stored[frame] for frame in frames.tolist() if frame < len(stored)}


def _from_video(dataset: ViewedDataset, camera: str, episode: int, frames: NDArray[np.int64]) -> dict[int, bytes]:
    path, begin_s = dataset.video_of(camera, episode)
    shape = dataset.info.features[camera].shape
    index = VideoIndex(path, shape)
    numbers = index.find(begin_s + frames / dataset.fps, 0.5 / dataset.fps)
    frames, numbers = frames[numbers >= 0], numbers[numbers >= 0]
    if not len(numbers):
        return {}
    found: dict[int, bytes] = {}
    decoder = VideoDecoder(path)
    try:
        shown, places = np.unique(numbers, return_index=True)
        decoder.read(
            index.stamps[shown],
            shape[2],
            lambda place, picture: found.update({int(frames[places[place]]): _jpeg(picture)}),
        )
    finally:
        decoder.close()
    return found


def _jpeg(pixels: NDArray[Any]) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pages with pictures need pillow; run: pip install 'etude[sim]'") from error
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _charts(dataset: ViewedDataset, episode: int) -> dict[str, list[dict[str, Any]]]:
    charts = {}
    for name in dataset.columns:
        values = np.asarray(dataset.values(name, episode), dtype=np.float64)
        frames = list(map(float, range(len(values))))
        lines = [
            Series(label or name, frames, values[:, place].tolist()) for place, label in enumerate(dataset.labels[name])
        ]
        parts = [lines[first : first + _LINES_PER_CHART] for first in range(0, len(lines), _LINES_PER_CHART)]
        charts[name] = [plan_chart(_title(name, part), part) for part in parts]
    return charts


def _title(name: str, lines: list[Series]) -> str:
    short = name.removeprefix("observation.")
    if len(lines) == 1:
        return short if lines[0].name == name else f"{short}: {lines[0].name}"
    return f"{short}: {lines[0].name} to {lines[-1].name}"
