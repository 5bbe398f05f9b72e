"""`etude check`: every value of a config, and the file and line, override or default it comes from."""

from __future__ import annotations

import os
from pathlib import Path

from etude.cli.output import print_json, print_table


def check_config(config: Path, overrides: list[str], *, as_json: bool) -> None:
    """Validate a config and print it resolved."""
    # Pydantic searches every installed package for plugins of its own: 25 ms, and nothing here is theirs to watch.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from etude.config.load import load

    loaded = load(config, overrides)
    rows = _grouped(loaded.explain())
    if as_json:
        values = {path: {"value": value, "origin": origin} for path, value, origin in rows}
        print_json({"config": loaded.stored(), "values": values})
    else:
        print_table(("key", "value", "origin"), rows)


def _grouped(rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    # The defaults of a component's parameters come last; they belong beside the component.
    order: dict[str, int] = {}
    for path, _, _ in rows:
        order.setdefault(path.split(".")[0], len(order))
    return sorted(rows, key=lambda row: order[row[0].split(".")[0]])
