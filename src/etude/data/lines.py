"""Files with one JSON value in each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.errors import DataError


def read_json_lines(path: str | Path, what: str, *, plain: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield line numbers and values; lines without any text are passed over.

    Args:
        path: The file.
        what: What it holds, for the error message.
        plain: Take a line that begins neither an object nor a quoted text as the text it is.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"the {what} of {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"the {what} of {path} cannot be read: it is no text in UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if plain and not line.lstrip().startswith(("{", '"')):
            yield number, line
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: {error.msg}") from None
