"""What a sweep or a repetition with seeds is about, kept beside its runs: it goes on only as what it was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError
from etude.reading.plain import show_value
from etude.runs.durable import write_atomically
from etude.runs.groups import flatten
from etude.secrets import redact_tree

if TYPE_CHECKING:
    from etude.config.load import Loaded

MOST_NAMED = 3
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
_NUMBER = re.compile(r"[0-9._-]+")


def keep_plan(path: Path, plan: Mapping[str, Any], fixed: Sequence[str], remedy: str) -> None:
    """Write a plan as JSON; refuse to go on with one that was another.

    Args:
        path: Where it is kept.
        plan: Everything about it, as plain values.
        fixed: The keys that must be the same as before.
        remedy: What to do where they are not, at the end of the sentence.
    """
    wanted = json.loads(json.dumps(redact_tree(plan), default=str))
    before = read_plan(path)
    if before is not None:
        changes = [text for key in fixed for text in _changes(key, before.get(key), wanted.get(key))]
        if changes:
            more = f" and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
            raise ConfigError(
                f"{path.parent} was begun with other settings: {'; '.join(changes[:MOST_NAMED])}{more}; {remedy}"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(wanted, indent=2) + "\n").encode())


def read_plan(path: Path) -> dict[str, Any] | None:
    """Return the plan of a folder; None if it has none."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read ({error}); move the folder away to begin anew") from None
    if not isinstance(plan, dict):
        raise ConfigError(f"{path} holds no plan; move the folder away to begin anew")
    return plan


def _changes(key: str, before: Any, now: Any) -> Iterator[str]:
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys((*before, *now)):
            if before.get(name) != now.get(name):
                yield f"{name} was {show_value(before.get(name))} and is {show_value(now.get(name))}"
    else:
        yield f"{key} was {show_value(before)} and is {show_value(now)}"


def settings_of(loaded: Loaded, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a configuration says by dotted names, seeds, places and some keys left out."""

    def is_left_out(name: str) -> bool:
        return any(name == key or name.startswith(f"{key}.") for key in without)

    return {name: value for name, value in flatten(loaded.stored()) if not is_left_out(name)}


@dataclass(frozen=True)
class SweepFolder:
    """The folder that holds the runs of a sweep."""

    root: Path
    name: str

    @property
    def folder(self) -> Path:
        """The folder."""
        return self.root / self.name

    def overrides(self, run: str) -> list[str]:
        """Return the overrides that put a run into the folder."""
        return [f"run.root={_as_yaml(str(self.folder))}", f"run.name={_as_yaml(run)}"]

    def require(self, loaded: Loaded, run: str) -> None:
        """Refuse a file that puts its runs elsewhere, whatever overrides say."""
        kept = loaded.config.run
        if (Path(kept.root), kept.name) != (self.folder, run):
            raise ConfigError(
                f"{loaded.path}: keeps its run in {Path(kept.root) / (kept.name or '')} whatever run.root and run.name "
                "say, so that several runs would be one; leave that to run.root and run.name"
            )


def _as_yaml(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and not _NUMBER.fullmatch(text) else json.dumps(text)
