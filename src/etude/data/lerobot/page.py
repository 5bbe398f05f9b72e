"""One episode as one HTML page: pictures of every camera and curves of every number, without network."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.layout import BOOKKEEPING
from etude.data.lerobot.reader import LeRobotDataset
from etude.errors import DataError, MissingExtraError
from etude.runs.charts import Series, plan_chart
from etude.runs.durable import write_output
from etude.runs.page import render

PICTURES = 12
_LINES_PER_CHART = 6  # as many as there are colours


def write_page(dataset: LeRobotDataset, episode: int, output: Path) -> Path:
    """Write the page of one episode and return where it is."""
    return write_output(output, render_page(dataset, episode))


def render_page(dataset: LeRobotDataset, episode: int) -> str:
    """Return the page of one episode as text."""
    source = dataset.source
    total = len(source.episodes)
    if not 0 <= episode < total:
        raise DataError(f"{source.root}: there is no episode {episode}; there are 0 to {total - 1}")
    rows = source.episodes.rows([episode])
    task = source.tasks[int(source.columns["task_index"][rows[0]])]
    seconds = len(rows) / dataset.fps
    length = f"episode {episode} of {total}, {len(rows)} frames, {seconds:.1f} s at {dataset.fps:g} a second"
    return render(
        "data/lerobot/page.html",
        title=f"{source.root.name}, episode {episode}",
        heading=source.root.name,
        facts=[length, f"Task: {task}"],
        strips={name: _strip(dataset, name, rows) for name in dataset.cameras},
        charts=_charts(dataset, rows),
    )


def _strip(dataset: LeRobotDataset, name: str, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
    frames = np.unique(np.linspace(0, len(rows) - 1, PICTURES).astype(np.int64))
    pictures = np.asarray(dataset.source.columns[name][rows[frames]])
    return [
        {"frame": frame, "seconds": frame / dataset.fps, "jpeg": _jpeg(picture)}
        for frame, picture in zip(frames.tolist(), pictures, strict=True)
    ]


def _jpeg(picture: NDArray[Any]) -> str:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pages with pictures need pillow; run: pip install 'etude[sim]'") from error
    pixels = picture.transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, "JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode()


def _charts(dataset: LeRobotDataset, rows: NDArray[np.int64]) -> dict[str, list[dict[str, Any]]]:
    charts = {}
    for name, column in dataset.source.columns.items():
        if name in BOOKKEEPING or name in dataset.cameras:
            continue
        values = column[rows].double().reshape(len(rows), -1).numpy()
        labels = dataset.source.info.features[name].dimension_names or [str(i) for i in range(values.shape[1])]
        frames = list(map(float, range(len(rows))))
        lines = [Series(label, frames, values[:, place].tolist()) for place, label in enumerate(labels)]
        parts = [lines[first : first + _LINES_PER_CHART] for first in range(0, len(lines), _LINES_PER_CHART)]
        charts[name] = [plan_chart(_title(name, part), part) for part in parts]
    return charts


def _title(name: str, lines: list[Series]) -> str:
    short = name.removeprefix("observation.")
    return f"{short}: {lines[0].name}" if len(lines) == 1 else f"{short}: {lines[0].name} to {lines[-1].name}"
