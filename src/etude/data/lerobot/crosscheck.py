"""Compare what a dataset holds with what its writer noted about it: the only sign of a flipped bit without checksums.

Shape letters: E episodes, D numbers of one frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.episodes import Episodes, read_lines
from etude.data.lerobot.layout import STATS_PATH, FeatureInfo, Info, read_json
from etude.data.lerobot.tables import read_schema, read_table
from etude.errors import DataError

Array = NDArray[Any]
Told = dict[str, Array]
"""What was noted of one feature, by statistic: (E, D), NaN where nothing was."""

_KINDS: Final = ("min", "max", "mean")
_EXTREME_SHARE: Final = 2.0**-22
"""Relative error of an extreme that was stored in float32."""
_MEAN_SHARE: Final = 1e-6
_WHOLE_SHARE: Final = 1e-4
"""For statistics over all frames, which others compute in float32, batch by batch."""
PICTURE_SHIFT: Final = 0.03
"""How far the mean colour (0..1) of an episode may be off that of the others; lossy codecs stay within 0.01."""
_REMEDY: Final = "a file is damaged, or the statistics are out of date (then say cross_check: false)"


def read_told(info: Info, episodes: Episodes, names: Sequence[str]) -> dict[str, Told]:
    """Read what was noted about each episode; features about which nothing was are left out."""
    sizes = {name: _size(info.features[name]) for name in names}
    rows = _rows_v3(episodes.meta_files, sizes) if info.is_v3 else _rows_v2(info.root, sizes, len(episodes))
    return {name: told for name, told in rows.items() if told and np.isfinite(np.hstack(list(told.values()))).any()}


def _size(feature: FeatureInfo) -> int:
    return feature.shape[2] if feature.is_camera else int(np.prod(feature.shape))


def _rows_v3(files: Sequence[Path], sizes: Mapping[str, int]) -> dict[str, Told]:
    wanted = {f"stats/{name}/{kind}": (name, kind) for name in sizes for kind in _KINDS}
    parts: dict[str, dict[str, list[Array]]] = {name: {kind: [] for kind in _KINDS} for name in sizes}
    order: list[Array] = []
    for path in files:
        present = set(read_schema(path)[0])
        table = read_table(path, ["episode_index", *(column for column in wanted if column in present)])
        order.append(table.column("episode_index").to_numpy())
        for column, (name, kind) in wanted.items():
            values = table.column(column).to_pylist() if column in present else [None] * table.num_rows
            parts[name][kind].append(_stack(values, sizes[name]))
    rank = np.argsort(np.concatenate(order), kind="stable")
    return {
        name: {kind: np.concatenate(arrays)[rank] for kind, arrays in kinds.items()} for name, kinds in parts.items()
    }


def _rows_v2(root: Path, sizes: Mapping[str, int], count: int) -> dict[str, Told]:
    path = root / "meta/episodes_stats.jsonl"
    lines = {line.get("episode_index"): line.get("stats") for line in read_lines(path)} if path.exists() else {}
    stats = [lines.get(number) for number in range(count)]
    return {
        name: {kind: _stack([_lookup(one, name, kind) for one in stats], size) for kind in _KINDS}
        for name, size in sizes.items()
    }


def _lookup(stats: Any, *path: str) -> Any:
    for key in path:
        stats = stats.get(key) if isinstance(stats, Mapping) else None
    return stats


def _stack(values: Sequence[Any], size: int) -> Array:
    """Return nested lists as rows (E, D) of numbers; what is missing or of another size is NaN."""
    found = np.full((len(values), size), np.nan)
    for row, value in enumerate(values):
        try:
            flat = np.asarray(value, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError):
            continue
        if flat.size == size:
            found[row] = flat
    return found


def check_numbers(columns: Mapping[str, Array], info: Info, episodes: Episodes) -> None:
    """Compare least, greatest and mean value of every feature in every episode with what was noted."""
    told = read_told(info, episodes, list(columns))
    for name, values in columns.items():
        if name in told:
            _check_episodes(name, values.reshape(len(values), -1), told[name], info, episodes)
    if rest := [name for name in columns if name not in told]:
        _check_whole({name: columns[name] for name in rest}, info)


def _check_episodes(name: str, values: Array, told: Told, info: Info, episodes: Episodes) -> None:
    starts = episodes.starts
    wide = values.astype(np.float64)
    low, high = np.minimum.reduceat(wide, starts), np.maximum.reduceat(wide, starts)
    size = np.maximum(np.abs(low), np.abs(high))
    mean = np.add.reduceat(wide, starts) / episodes.lengths[:, None]
    for kind, found, share in (
        ("min", low, _EXTREME_SHARE),
        ("max", high, _EXTREME_SHARE),
        ("mean", mean, _MEAN_SHARE),
    ):
        allowed = share * np.maximum(size, np.nan_to_num(np.abs(told[kind]))) + 1e-12
        wrong = np.abs(found - told[kind]) > allowed
        if kind == "mean" and values.dtype.kind == "f":
            for episode in np.flatnonzero(wrong.any(1)).tolist():
                # Some writers add up in float32, frame after frame, which drifts away in a way of its own.
                drifted = values[starts[episode] : episodes.ends[episode]].mean(0)
                wrong[episode] &= np.abs(drifted.astype(np.float64) - told[kind][episode]) > allowed[episode]
        if wrong.any():
            episode, place = (int(index) for index in np.argwhere(wrong)[0])
            raise DataError(
                f"{info.root}: episode {episode}: the {kind} of {name!r} in dimension {place} is "
                f"{found[episode, place]:.9g}, but {told[kind][episode, place]:.9g} was noted; {_REMEDY}"
            )


def _check_whole(columns: Mapping[str, Array], info: Info) -> None:
    """Compare with `meta/stats.json`, where nothing was noted about single episodes."""
    path = info.root / STATS_PATH
    if not path.exists():
        return
    stats = read_json(path, "the statistics")
    for name, values in columns.items():
        flat = values.reshape(len(values), -1).astype(np.float64)
        found = {"min": flat.min(0), "max": flat.max(0), "mean": flat.mean(0)}
        scale = np.abs(flat).max(0)
        for kind, value in found.items():
            told = _stack([_lookup(stats, name, kind)], flat.shape[1])[0]
            wrong = np.abs(value - told) > _WHOLE_SHARE * np.maximum(scale, np.nan_to_num(np.abs(told))) + 1e-12
            if wrong.any():
                place = int(wrong.argmax())
                raise DataError(
                    f"{path}: the {kind} of {name!r} in dimension {place} is said to be {told[place]:.9g}, but is "
                    f"{value[place]:.9g}; {_REMEDY}"
                )


def check_tasks(task_index: Array, tasks: Sequence[str], info: Info, episodes: Episodes) -> None:
    """Compare the task of every frame with the tasks that were noted for its episode."""
    owner = np.repeat(np.arange(len(episodes)), episodes.lengths)
    for episode, task in np.unique(np.stack([owner, task_index]), axis=1).T.tolist():
        noted = episodes.tasks[episode]
        if noted and 0 <= task < len(tasks) and tasks[task] not in noted:
            raise DataError(
                f"{info.root}: episode {episode} has frames for the task {tasks[task]!r}, but {noted} was noted; "
                f"{_REMEDY}"
            )


def check_pictures(name: str, means: Array, info: Info, episodes: Episodes) -> None:
    """Compare the mean colour of every episode (E, C), in 0..1, with what was noted, up to a shift that all share."""
    told = read_told(info, episodes, [name]).get(name)
    if told is None:
        return
    off = means - told["mean"][: len(means)]
    usual = np.nanmedian(off, axis=0) if np.isfinite(off).any() else np.zeros(off.shape[1])
    wrong = np.abs(off - usual) > PICTURE_SHIFT
    if wrong.any():
        episode = int(wrong.any(1).argmax())
        channel = int(wrong[episode].argmax())
        raise DataError(
            f"{info.root}: episode {episode}: camera {name!r} has a mean of {means[episode, channel]:.3f} in channel "
            f"{channel}, but {told['mean'][episode, channel]:.3f} was noted; {_REMEDY}"
        )
