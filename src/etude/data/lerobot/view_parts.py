"""What a view of a dataset is made of: its index, one part for each episode, and drawings of its distributions."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.oddities import KINDS
from etude.data.lerobot.survey import BINS, Distribution, Survey
from etude.data.lerobot.viewed import ViewedDataset
from etude.runs.page import format_number

Array = NDArray[Any]

MOST_HISTOGRAMS: Final = 256
SHOWN_TASKS: Final = 30
_BAR_WIDTH, _BAR_HEIGHT = 240, 64
_LARGEST_FLOAT32: Final = 3e38


def make_index(dataset: ViewedDataset, survey: Survey, *, is_served: bool) -> dict[str, Any]:
    """Return what the page knows of every episode."""
    tasks = dataset.tasks
    coverage = survey.coverage
    constant: dict[str, list[int]] = {}
    for one in survey.distributions:
        if one.is_constant and not one.broken:
            constant.setdefault(one.feature, []).append(one.place)
    return {
        "name": dataset.name, "fps": dataset.fps, "served": is_served,
        "lengths": dataset.episodes.lengths.tolist(),
        "tasks": tasks, "texts": {str(task): dataset.task_text(task) for task in sorted(set(tasks))},
        "kinds": KINDS,
        "odd": {
            str(episode): [[mark.kind, mark.text, mark.frame, round(min(mark.weight, 1e9), 3)] for mark in marks]
            for episode, marks in survey.marks.items()
        },
        "success": dataset.successes(), "returns": dataset.returns(), "constant": constant,
        "coverage": coverage and {"x": coverage.x, "y": coverage.y, "titles": [coverage.x_title, coverage.y_title]},
    }  # fmt: skip


def make_columns(dataset: ViewedDataset, episode: int) -> list[dict[str, Any]]:
    """Return the numbers of one episode, as bytes in base64."""
    return [
        {"name": name, "labels": list(dataset.labels[name]), **_packed(dataset.values(name, episode))}
        for name in dataset.columns
    ]


def _packed(values: Array) -> dict[str, Any]:
    wide = np.asarray(values, dtype=np.float64)
    # float32 halves the page; what does not fit it is not to become infinite.
    with np.errstate(invalid="ignore"):
        is_large = bool((np.isfinite(wide) & (np.abs(wide) > _LARGEST_FLOAT32)).any())
    data = np.ascontiguousarray(wide.astype("<f8" if is_large else "<f4"))
    return {"type": "f8" if is_large else "f4", "data": base64.b64encode(data.tobytes()).decode()}


def list_oddities(survey: Survey) -> list[dict[str, Any]]:
    """Return for each kind how many episodes have it, and the worst of them."""
    found = []
    for kind, title in KINDS.items():
        marks = [mark for some in survey.marks.values() for mark in some if mark.kind == kind]
        worst = sorted(marks, key=lambda mark: (-mark.weight, mark.episode))
        if worst:
            episodes = len({mark.episode for mark in marks})
            found.append({"kind": kind, "title": title, "episodes": episodes, "worst": worst[:4]})
    return found


def list_tasks(dataset: ViewedDataset) -> list[tuple[str, int, int]]:
    """Return the tasks with how many episodes and frames each has, the largest first."""
    tasks = dataset.tasks
    counted = Counter(tasks)
    frames = np.bincount(np.unique(tasks, return_inverse=True)[1], weights=dataset.episodes.lengths)
    by_task = dict(zip(sorted(counted), frames.astype(np.int64).tolist(), strict=True))
    return [(dataset.task_text(task), count, by_task[task]) for task, count in counted.most_common()]


def draw_lengths(dataset: ViewedDataset) -> dict[str, Any]:
    """Return the histogram of the episodes' lengths."""
    lengths = dataset.episodes.lengths
    least, greatest = int(lengths.min()), int(lengths.max())
    bins = max(1, min(BINS, greatest - least + 1))
    counts = np.histogram(lengths, bins=bins)[0].tolist()
    return {
        "title": "Frames of an episode", "path": _bars(counts), "low": format_number(least),
        "high": format_number(greatest), "note": f"median {format_number(float(np.median(lengths)))}", "warn": "",
    }  # fmt: skip


def draw_distributions(distributions: Sequence[Distribution]) -> dict[str, list[dict[str, Any]]]:
    """Return the histograms of every dimension that moves, by feature."""
    drawn: dict[str, list[dict[str, Any]]] = {}
    for one in [one for one in distributions if not one.is_constant or one.broken][:MOST_HISTOGRAMS]:
        warned = []
        if one.beyond:
            furthest = max(one.least, one.greatest, key=abs)
            values = "value lies" if one.beyond == 1 else "values lie"
            warned.append(f"{one.beyond:,} {values} beyond, the furthest {format_number(furthest)}")
        if one.broken:
            warned.append(f"{one.broken:,} not finite")
        drawn.setdefault(one.feature, []).append({
            "title": one.label or one.feature, "path": _bars(one.counts), "low": format_number(one.low),
            "high": format_number(one.high), "note": f"median {format_number(one.middle)}", "warn": "; ".join(warned),
        })  # fmt: skip
    return drawn


def _bars(counts: Sequence[int]) -> str:
    """Return bars as one path; the least that is not nothing is still seen."""
    width, most = _BAR_WIDTH / len(counts), max(*counts, 1)
    gap = 1.0 if width > 3 else 0.0
    parts = []
    for place, count in enumerate(counts):
        if count:
            height = max(1.0, count / most * (_BAR_HEIGHT - 2))
            parts.append(f"M{place * width:.1f} {_BAR_HEIGHT}v-{height:.1f}h{width - gap:.1f}v{height:.1f}z")
    return "".join(parts)
