"""The numbers of a dataset: parquet files copied once into memory-mapped arrays, in order, whatever they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.cache import Cache
from etude.data.lerobot.episodes import Episodes
from etude.data.lerobot.layout import BOOKKEEPING, Info
from etude.data.lerobot.tables import numbers, read_table
from etude.data.lerobot.validate import put_in_order
from etude.errors import DataError

Array = NDArray[Any]

CACHE_FORMAT = 3
"""Part of every key: raised when what is cached changes its form."""


def columns_key(info: Info, episodes: Episodes, hashes: Mapping[Path, str]) -> tuple[str, list[Any]]:
    """Return the kind and the key of the cache entry that holds the numbers of these files."""
    features = info.columns
    described = {name: [feature.dtype, list(feature.shape)] for name, feature in features.items()}
    meta = [hashes[path] for path in episodes.meta_files]
    key = [CACHE_FORMAT, described, meta, [hashes[path] for path in sorted(set(episodes.data_files))]]
    return f"columns_{hashlib.sha256(json.dumps(sorted(features)).encode()).hexdigest()[:8]}", key


def open_columns(
    info: Info, episodes: Episodes, cache: Cache, hashes: Mapping[Path, str]
) -> tuple[dict[str, Array], Array]:
    """Return every column of numbers, mapped from the cache, and the order of rows in the files; nothing is judged."""
    kind, key = columns_key(info, episodes, hashes)
    for attempt in (1, 2):
        entry = cache.get(kind, key, partial(_build, info, episodes))
        try:
            return _map(entry)
        except (OSError, ValueError, KeyError, TypeError) as error:
            cache.drop(entry)  # somebody damaged the cache: it can be made again
            if attempt == 2:
                raise DataError(f"{entry}: the cache cannot be read back ({error}); set cache_dir") from error
    raise AssertionError


def _build(info: Info, episodes: Episodes, target: Path) -> None:
    features = info.columns
    parts: dict[str, list[Array]] = {name: [] for name in features}
    for path in sorted(set(episodes.data_files)):
        table = read_table(path, list(features))
        for name, feature in features.items():
            parts[name].append(numbers(table, feature, path))
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    for name in BOOKKEEPING:
        columns[name] = columns[name].reshape(-1)
    columns, order = put_in_order(columns, episodes, info.root)
    names = {name: f"{number}.npy" for number, name in enumerate(columns)}
    for name, file in names.items():
        np.save(target / file, columns[name], allow_pickle=False)
    np.save(target / "order.npy", order, allow_pickle=False)
    (target / "columns.json").write_text(json.dumps(names))


def _map(entry: Path) -> tuple[dict[str, Array], Array]:
    names = json.loads((entry / "columns.json").read_text())
    columns = {name: np.load(entry / file, mmap_mode="c", allow_pickle=False) for name, file in names.items()}
    return columns, np.load(entry / "order.npy", allow_pickle=False)
