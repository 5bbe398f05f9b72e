"""Files of rows: JSON lines, CSV and parquet, each row with the place to name when something is wrong with it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.data.lines import read_json_lines
from etude.errors import DataError
from etude.extras import import_extra


def read_rows(path: str | Path, what: str, *, plain: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, each with its place in words.

    Args:
        path: A file whose name ends in .csv or .parquet; any other has one JSON value in each line.
        what: What it holds, for error messages.
        plain: Take a line that begins neither an object nor a quoted text as the text it is.
    """
    kind = Path(path).suffix.lower()
    if kind == ".csv":
        yield from _read_csv(path, what)
    elif kind == ".parquet":
        yield from _read_parquet(path, what)
    else:
        for number, row in read_json_lines(path, what, plain=plain):
            yield f"{path}, line {number}", row


def _read_csv(path: str | Path, what: str) -> Iterator[tuple[str, Any]]:
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            for number, row in enumerate(reader, 1):
                place = f"{path}, row {number}"
                if None in row or None in row.values():
                    raise DataError(f"{place}: it has not one value for each of {', '.join(reader.fieldnames or ())}")
                yield place, row
    except OSError as error:
        raise DataError(f"the {what} of {path} cannot be read: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no CSV file: {error}") from None


def _read_parquet(path: str | Path, what: str) -> Iterator[tuple[str, Any]]:
    from etude.data.lerobot.tables import read_table

    import_extra("pyarrow.parquet", "sim")
    if not Path(path).is_file():
        raise DataError(f"the {what} of {path} cannot be read: no such file")
    for number, row in enumerate(read_table(Path(path)).to_pylist(), 1):
        yield f"{path}, row {number}", row
