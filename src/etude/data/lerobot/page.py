"""One episode as one HTML page: pictures of every camera and curves of every number, without network."""

from __future__ import annotations

import base64
import hashlib
import io
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.layout import BOOKKEEPING
from etude.data.lerobot.reader import LeRobotDataset
from etude.errors import DataError, MissingExtraError
from etude.runs import charts
from etude.runs.charts import Series, draw_chart
from etude.runs.durable import write_atomically
from etude.runs.report_theme import SCRIPT, STYLE

PICTURES = 12
_LINES_PER_CHART = 6  # as many as there are colours
_STRIP = (
    ".strip{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px}"
    ".strip figure{margin:0}.strip img{width:100%;border-radius:6px;display:block}"
    ".strip figcaption{font-size:.75rem;color:var(--soft)}"
)


def write_page(dataset: LeRobotDataset, episode: int, output: Path) -> Path:
    """Write the page of one episode and return where it is."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, render_page(dataset, episode).encode())
    return output


def render_page(dataset: LeRobotDataset, episode: int) -> str:
    """Return the page of one episode as text."""
    source = dataset.source
    total = len(source.episodes)
    if not 0 <= episode < total:
        raise DataError(f"{source.root}: there is no episode {episode}; there are 0 to {total - 1}")
    rows = source.episodes.rows([episode])
    script = SCRIPT % {
        "width": charts.WIDTH, "height": charts.HEIGHT, "left": charts.LEFT,
        "right": charts.RIGHT, "top": charts.TOP, "bottom": charts.BOTTOM,
    }  # fmt: skip
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    task = source.tasks[int(source.columns["task_index"][rows[0]])]
    facts = (
        f"episode {episode} of {total}, {len(rows)} frames, {len(rows) / dataset.fps:.1f} s at {dataset.fps:g} a second"
    )
    title = f"{source.root.name}, episode {episode}"
    body = "".join(_camera(dataset, name, rows) for name in dataset.cameras) + _curves(dataset, rows)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_STRIP}</style></head>\n"
        f'<body><div class="page"><header><h1>{escape(source.root.name)}</h1><p class="facts">{escape(facts)}</p>'
        f'<p class="facts">Task: {escape(task)}</p></header><input type="checkbox" id="log" hidden>'
        f"<main>{body}</main></div><script>{script}</script></body></html>\n"
    )


def _camera(dataset: LeRobotDataset, name: str, rows: NDArray[np.int64]) -> str:
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, PICTURES).astype(np.int64))]
    pictures = np.asarray(dataset.source.columns[name][chosen])
    items = "".join(
        f'<figure><img alt="{escape(name)} at frame {row - rows[0]}" src="data:image/jpeg;base64,{_jpeg(picture)}">'
        f"<figcaption>frame {row - rows[0]}, {(row - rows[0]) / dataset.fps:.2f} s</figcaption></figure>"
        for row, picture in zip(chosen.tolist(), pictures, strict=True)
    )
    return f'<section><h2>{escape(name)}</h2><div class="strip">{items}</div></section>'


def _jpeg(picture: NDArray[Any]) -> str:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pages with pictures need pillow; run: pip install 'etude[sim]'") from error
    pixels = picture.transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, "JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode()


def _curves(dataset: LeRobotDataset, rows: NDArray[np.int64]) -> str:
    sections = []
    for name, column in dataset.source.columns.items():
        if name in BOOKKEEPING or name in dataset.cameras:
            continue
        values = column[rows].double().reshape(len(rows), -1).numpy()
        labels = dataset.source.info.features[name].dimension_names or [str(i) for i in range(values.shape[1])]
        frames = list(map(float, range(len(rows))))
        lines = [Series(label, frames, values[:, place].tolist()) for place, label in enumerate(labels)]
        drawn = "".join(
            draw_chart(_title(name, lines[first : first + _LINES_PER_CHART]), lines[first : first + _LINES_PER_CHART])
            for first in range(0, len(lines), _LINES_PER_CHART)
        )
        sections.append(f'<section><h2>{escape(name)}</h2><div class="charts">{drawn}</div></section>')
    return "".join(sections)


def _title(name: str, lines: list[Series]) -> str:
    short = name.removeprefix("observation.")
    return f"{short}: {lines[0].name}" if len(lines) == 1 else f"{short}: {lines[0].name} to {lines[-1].name}"
