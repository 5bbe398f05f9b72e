"""What translations of whole files share: paths that are looked for, own sections with the last word, plain checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from etude.reading.origins import Layer
from etude.reading.translate import Translation
from etude.reading.yaml12 import Path


def find_path(written: str, layer: Layer, path: Path, *, here_first: bool = False) -> tuple[str, str]:
    """Return where a file or directory is: beside the file that names it, or in the working directory; or the fault."""
    name = os.path.expanduser(written)
    if "\0" in name:
        return written, "no such file"
    origin = layer.origin(path)
    beside = os.path.abspath(os.path.join(os.path.dirname(origin.file), name))
    here = os.path.abspath(name)
    places = (here, beside) if here_first else (beside, here)
    for candidate in places:
        if os.path.exists(candidate):
            return candidate, ""
    tried = f"neither {places[0]} nor {places[1]}" if beside != here else f"no {here}"
    return written, f"there is {tried}"


class FileTranslation(Translation):
    """A file of another kind under translation, beside whose keys stand sections of an ordinary experiment."""

    def move_path(self, theirs: str, ours: str, *, wanted: bool = True) -> None:
        """Carry a path over, as it is found; one that is not wanted any more need not be there."""
        written = self.value(theirs)
        if not isinstance(written, str):
            self.move(theirs, ours)
            return
        found, fault = find_path(written, self.layer, tuple(theirs.split(".")))
        if fault and wanted:
            self.fault(theirs, fault)
        self.move(theirs, ours, lambda _: found)

    def move_named(self, theirs: str, ours: str) -> None:
        """Carry over `file.py:name`, with the file where it is found; a name without a file is a registered one."""
        written = self.value(theirs)
        file, colon, name = written.rpartition(":") if isinstance(written, str) else ("", "", "")
        if isinstance(written, str) and written.endswith(".py"):
            self.fault(theirs, f"name what to take from the file: {written}:NAME")
        if colon and file.endswith(".py"):
            self.move_file(theirs, ours, f":{name}", file)
        else:
            self.move(theirs, ours)

    def move_file(self, theirs: str, ours: str, name: str = "", file: str | None = None) -> None:
        """Carry over a Python file: as the working directory knows it, or else beside the recipe."""
        written = file if file is not None else self.value(theirs)
        if not isinstance(written, str):
            self.drop(theirs, text)
            return
        found, fault = find_path(written, self.layer, tuple(theirs.split(".")), here_first=True)
        if fault:
            self.fault(theirs, fault)
        self.move(theirs, ours, lambda _: text(found) + name)

    def move_agreed(self, theirs: Sequence[str], ours: str) -> None:
        """Carry over what may stand at several keys, and must then be the same."""
        given = [key for key in theirs if self.value(key) is not None]
        for other in given[1:]:
            if self.value(other) != self.value(given[0]):
                first = f"{given[0]} is {self.value(given[0])!r}"
                self.fault(other, f"is {self.value(other)!r}, but {first}; write one of them")
        for key in reversed(theirs):
            self.move(key, ours)

    def written(self, theirs: str) -> Any:
        """Return a value that something is made of, which then cannot come from the environment."""
        if self.comes_from_environment(theirs):
            self.fault(theirs, "cannot come from the environment; write it out")
            return None
        return self.value(theirs)

    def move_own(self, sections: tuple[str, ...]) -> None:
        """Let sections of an ordinary experiment say the last word, key by key."""
        for section in sections:
            for key in self.section(section):
                self._move_over(f"{section}.{key}", levels=2 if key == "optimizers" else 0)

    def _move_over(self, key: str, levels: int) -> None:
        value = self.value(key)
        if levels and isinstance(value, dict) and value:
            for inner in value:
                self._move_over(f"{key}.{inner}", levels - 1)
        else:
            self.move(key, key, keep_null=True)


def truth(value: Any) -> bool:
    """Require true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return value


def text(value: Any) -> str:
    """Require text."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"expected text, got {value!r}")
    return value


def run_folder(value: Any) -> str:
    """Require what can be the directory of a run, and return it whole."""
    folder = os.path.abspath(os.path.expanduser(text(value)))
    if not os.path.basename(folder):
        raise ValueError(f"{value!r} cannot be the directory of a run")
    return folder
