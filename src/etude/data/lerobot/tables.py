"""Parquet in and out: every fault of a file becomes one sentence that names it."""

from __future__ import annotations

import io
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.layout import FeatureInfo
from etude.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]

Array = NDArray[Any]

_PNG = b"\x89PNG\r\n\x1a\n"


def arrow() -> Any:
    """Import pyarrow, with its parquet part; name the extra if it is absent."""
    try:
        import pyarrow
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("LeRobot datasets need pyarrow; run: pip install 'etude[sim]'") from error
    return pyarrow


def read_table(path: Path, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """Read a parquet file, or some of its columns."""
    pa = arrow()
    try:
        # By way of an open file: pyarrow would take a name such as "a*b" or "hdfs://" for something else.
        with path.open("rb") as file:
            opened = pa.parquet.ParquetFile(file, page_checksum_verification=True)
            table = opened.read(columns=None if columns is None else list(columns))
            table.validate(full=True)
            return table
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; the dataset is not complete, so fetch or record it again") from None
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file ({_short(error)}); it may be truncated") from error


def read_episode_table(path: Path, episode: int, columns: Sequence[str]) -> pyarrow.Table:
    """Read some columns of one episode out of a file that holds several, in the order of its frames."""
    pa = arrow()
    try:
        with path.open("rb") as file:
            wanted = ["frame_index", *columns]
            table = pa.parquet.read_table(file, columns=wanted, filters=[("episode_index", "=", episode)])
            return table.sort_by("frame_index")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; the dataset is not complete, so fetch or record it again") from None
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file ({_short(error)}); it may be truncated") from error


def read_schema(path: Path) -> tuple[list[str], int]:
    """Return the names of the columns and the number of rows of a parquet file, without reading its rows."""
    pa = arrow()
    try:
        with path.open("rb") as file:
            metadata = pa.parquet.ParquetFile(file)
            return list(metadata.schema_arrow.names), int(metadata.metadata.num_rows)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; the dataset is not complete, so fetch or record it again") from None
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file ({_short(error)}); it may be truncated") from error


def numbers(table: pyarrow.Table, feature: FeatureInfo, path: Path) -> Array:
    """Return one column as an array (rows, *shape); a shape of (1,) may be stored as plain numbers."""
    pa = arrow()
    column = _column(table, feature.name, path)
    nulls = column.null_count
    try:
        flat = column.combine_chunks()
        while isinstance(flat, pa.ChunkedArray):
            flat = pa.concat_arrays(flat.chunks) if flat.num_chunks else pa.array([], flat.type)
        rows = len(flat)
        lengths_fit = True
        if isinstance(flat, pa.ExtensionArray):
            flat = flat.storage
        while pa.types.is_list(flat.type) or pa.types.is_large_list(flat.type) or _is_fixed(flat.type):
            nulls += flat.null_count
            if not _is_fixed(flat.type):
                lengths = flat.value_lengths().to_numpy(zero_copy_only=False)
                lengths_fit = lengths_fit and bool((lengths == lengths[:1]).all())
            flat = flat.flatten()
        nulls += flat.null_count
        if nulls or not lengths_fit or len(flat) != rows * math.prod(feature.shape):
            raise _misfit(column, feature, path)
        values = _cast(flat.to_numpy(zero_copy_only=False), feature, path)
    except (pa.ArrowException, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: column {feature.name!r} cannot be read as {feature.dtype} ({_short(error)})"
        ) from error
    return values.reshape(rows, *feature.shape)


def _cast(values: Array, feature: FeatureInfo, path: Path) -> Array:
    wanted = feature.numpy_dtype
    if values.dtype == wanted:
        return values
    if values.dtype.kind not in "biuf":
        raise DataError(f"{path}: column {feature.name!r} holds {values.dtype}, but info.json says {feature.dtype}")
    same_kind = values.dtype.kind == wanted.kind or {values.dtype.kind, wanted.kind} <= set("iu")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(wanted)
        kept = same_kind and (wanted.kind == "f" or bool((cast == values).all()))
    if not kept:
        raise DataError(
            f"{path}: column {feature.name!r} holds {values.dtype}, which {feature.dtype} in info.json cannot hold"
        )
    return cast


def _is_fixed(kind: Any) -> bool:
    return bool(arrow().types.is_fixed_size_list(kind))


def _misfit(column: Any, feature: FeatureInfo, path: Path) -> DataError:
    """Name the first row whose value has not the promised shape."""
    for row, value in enumerate(column.to_pylist()):
        found = _shape_of(value)
        if found != feature.shape and not (feature.shape == (1,) and found == ()):
            shown = "nothing" if value is None else f"shape {list(found) if found is not None else 'uneven'}"
            return DataError(
                f"{path}: column {feature.name!r} has {shown} in row {row}, but info.json says {list(feature.shape)}"
            )
    return DataError(f"{path}: column {feature.name!r} does not fit the shape {list(feature.shape)} in info.json")


def _shape_of(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None if value is None else ()
    inner = {_shape_of(item) for item in value}
    first = next(iter(inner), ())
    return None if len(inner) > 1 or first is None else (len(value), *first)


def pictures(table: pyarrow.Table, name: str, path: Path) -> list[bytes]:
    """Return the encoded pictures of an image column, one a row."""
    found = []
    for row, value in enumerate(_column(table, name, path).to_pylist()):
        data = value.get("bytes") if isinstance(value, dict) else value
        if data is None and isinstance(value, dict) and isinstance(value.get("path"), str):
            raise DataError(f"{path}: image {name!r} in row {row} is only a path, {value['path']!r}; embed the images")
        if not isinstance(data, bytes):
            raise DataError(f"{path}: image {name!r} in row {row} holds no picture")
        found.append(data)
    return found


def decode_picture(data: bytes, shape: tuple[int, ...], where: str) -> Array:
    """Decode PNG or JPEG to (H, W, C) uint8 of the promised shape."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("image features need pillow; run: pip install 'etude[sim]'") from error
    if data.startswith(_PNG) and not _is_sound_png(data):
        raise DataError(f"{where}: the picture cannot be decoded (a checksum in it is wrong)")
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.asarray(image.convert("L" if shape[2] == 1 else "RGB"))
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: the picture cannot be decoded ({_short(error)})") from error
    pixels = pixels.reshape(*pixels.shape[:2], shape[2])
    if pixels.shape != shape:
        raise DataError(f"{where}: the picture has shape {list(pixels.shape)}, but info.json says {list(shape)}")
    return pixels


def _is_sound_png(data: bytes) -> bool:
    """Whether the checksum of every chunk is right; pillow leaves out those of the pixels."""
    view, place = memoryview(data), len(_PNG)
    while place + 12 <= len(data):
        size = int.from_bytes(view[place : place + 4])
        end = place + 8 + size
        if end + 4 > len(data) or zlib.crc32(view[place + 4 : end]) != int.from_bytes(view[end : end + 4]):
            return False
        if data[place + 4 : place + 8] == b"IEND":
            return True
        place = end + 4
    return False


def encode_picture(pixels: Array) -> bytes:
    """Encode (H, W, C) uint8 as PNG."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("image features need pillow; run: pip install 'etude[sim]'") from error
    buffer = io.BytesIO()
    # Level 1 is four times as fast as the default 6 on camera pictures, and 5 % larger.
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def integers(table: pyarrow.Table, name: str, path: Path) -> NDArray[np.int64]:
    """Return a column of whole numbers."""
    return numbers(table, FeatureInfo(name, "int64", (1,)), path)[:, 0]


def _column(table: pyarrow.Table, name: str, path: Path) -> Any:
    if table.column_names.count(name) != 1:
        raise DataError(
            f"{path}: column {name!r}, which info.json promises, is missing; there are {table.column_names}"
        )
    return table.column(name)


def arrow_type(feature: FeatureInfo) -> Any:
    """Return the type in which lerobot stores a feature."""
    pa = arrow()
    if feature.dtype == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kind = pa.bool_() if feature.dtype == "bool" else pa.from_numpy_dtype(feature.numpy_dtype)
    if feature.shape == (1,):
        return kind
    if len(feature.shape) == 1:
        return pa.list_(kind, feature.shape[0])
    for _ in feature.shape:
        kind = pa.list_(kind)
    return kind


def arrow_column(feature: FeatureInfo, values: Any) -> Any:
    """Turn the values of one episode into a column: an array (rows, *shape), or encoded pictures."""
    pa = arrow()
    kind = arrow_type(feature)
    if feature.dtype == "image":
        listed = [{"bytes": data, "path": f"frame-{row:06d}.png"} for row, data in enumerate(values)]
        return pa.array(listed, kind)
    if feature.shape == (1,):
        return pa.array(values.reshape(-1), kind)
    if len(feature.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=kind)
    return pa.array(values.tolist(), kind)


def table_bytes(table: pyarrow.Table) -> bytes:
    """Return a table as the content of a parquet file."""
    sink = io.BytesIO()
    arrow().parquet.write_table(table, sink, compression="snappy", write_page_checksum=True)
    return sink.getvalue()


def tasks_table(tasks: Sequence[str]) -> pyarrow.Table:
    """Return the table of tasks as pandas would write it, with the text as index: lerobot reads it by pandas."""
    pa = arrow()
    index = "__index_level_0__"
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(list(tasks), pa.string())})
    text = {"pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    described = [
        {"name": "task_index", "field_name": "task_index", **text, "pandas_type": "int64", "numpy_type": "int64"},
        {"name": None, "field_name": index, **text},
    ]
    heads = [{"name": None, "field_name": None, **text, "metadata": {"encoding": "UTF-8"}}]
    pandas = {"index_columns": [index], "column_indexes": heads, "columns": described, "pandas_version": "2.2.3"}
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def read_tasks(path: Path) -> dict[int, str]:
    """Read the table of tasks: text by index."""
    table = read_table(path)
    texts = [name for name in table.column_names if name != "task_index"]
    if len(texts) != 1:
        raise DataError(f"{path}: a table of tasks has task_index and one column of text, got {table.column_names}")
    values = table.column(texts[0]).to_pylist()
    return checked_tasks(zip(integers(table, "task_index", path).tolist(), values, strict=True), path)


def checked_tasks(pairs: Iterable[tuple[Any, Any]], path: Path) -> dict[int, str]:
    """Return tasks by index; refuse what is no text and what comes twice."""
    tasks: dict[int, str] = {}
    for index, text in pairs:
        if isinstance(index, bool) or not isinstance(index, int) or not isinstance(text, str) or index in tasks:
            raise DataError(f"{path}: task {index!r} with text {text!r} is malformed or there twice")
        tasks[index] = text
    return tasks


def stats_columns(stats: Mapping[str, Mapping[str, Array]]) -> dict[str, Any]:
    """Flatten statistics of an episode to `stats/<feature>/<statistic>`."""
    return {f"stats/{name}/{kind}": value.tolist() for name, all_ in stats.items() for kind, value in all_.items()}


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:160] if text else type(error).__name__
