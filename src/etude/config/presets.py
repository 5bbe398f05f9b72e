"""Configurations that come with Etude, found by name: `etude train metaworld-act`."""

from __future__ import annotations

import logging
import os
from itertools import takewhile
from pathlib import Path

from etude.errors import ConfigError
from etude.reading.dialect import files_in
from etude.reading.suggest import did_you_mean

logger = logging.getLogger("etude")

_PACKAGE = Path(__file__).resolve().parent.parent


def presets() -> dict[str, Path]:
    """Return the files of all presets by name; models of components lie in folders beside theirs, and are none."""
    folder = _folder()
    return {path.stem: path for path in sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml")])}


def describe_preset(path: Path) -> str:
    """Return what a preset is for: the first sentence of the comment at its head."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines).split(". ")[0].rstrip(".")


def locate(name: str, folder: str = "", named_at: str = "") -> str:
    """Return the file that a name means: what lies in the folder under that name, or else a preset.

    With a slash or a suffix of YAML it is a file, whatever the presets are called. Named in a file, it may be NAME.yaml
    beside that file.

    Args:
        name: What was written.
        folder: Where files are looked for; the working directory unless given.
        named_at: Where it was written, at the head of errors.
    """
    path = os.path.join(folder, name)
    if not name or os.sep in name or name.endswith((".yaml", ".yml")):
        return path
    known, is_here = presets(), os.path.lexists(path)
    if name not in known:
        if is_here:
            return path
        if named_at and os.path.isfile(f"{path}.yaml"):  # among `defaults`, which other readers take without a suffix
            return f"{path}.yaml"
        near = did_you_mean(name, [*known, *files_in(os.path.dirname(path))])
        raise ConfigError(f"{named_at}no such file and no such preset: {name}{near or ';'} see: etude list presets")
    if os.path.isdir(path):
        raise ConfigError(f"{named_at}{path} is a folder here; the preset of that name is {known[name]}")
    if is_here:
        logger.warning("etude: read the file %s, not the preset of that name", path)
        return path
    return _short(known[name])


def nearest_preset(path: str) -> str:
    """Return `; did you mean the preset 'x'?` for what a missing file may have been meant for, or nothing."""
    from difflib import get_close_matches

    for close in get_close_matches(os.path.splitext(os.path.basename(path))[0], presets(), n=1, cutoff=0.6):
        return f"; did you mean the preset {close!r}?"
    return ""


def _folder() -> Path:
    # A wheel carries them inside the package; a clone, installed in place, has them at its top.
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent.parent / "configs"


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
