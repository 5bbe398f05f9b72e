"""Read YAML with the line of every key, and write YAML that reads back the same.

Plain scalars follow the core schema of YAML 1.2, with `_` allowed between digits: only `true` and `false` are
booleans (`on`, `off`, `yes`, `no` are text), `1e-4`, `1E5`, `.5` and `1_000` are numbers, `010` is ten (octal is
`0o10`), dates and times are text. Keys must be text and may not repeat. `.nan` is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from etude.errors import ConfigError

MAX_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_NODES = 100_000
"""More than any configuration needs; what goes beyond is an alias bomb or not a configuration at all."""

Path = tuple[str | int, ...]
Mark = tuple[int, int]
"""Line and column, from 1."""

_INT = re.compile(r"[-+]?[0-9](?:_?[0-9])*")
_BASED = re.compile(r"0(?:o[0-7]+|x[0-9a-fA-F]+)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9](?:_?[0-9])*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INF = re.compile(r"[-+]?\.(?:inf|Inf|INF)")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_WORDS: dict[str, Any] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_TAGS = {"tag:yaml.org,2002:str", "!"}
_COLLECTION_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "!"}


class ReadError(Exception):
    """Text that is not a usable document; carries the place."""

    def __init__(self, message: str, mark: Mark | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.mark = mark


@dataclass
class Document:
    """A document as plain values, with the place of every key and item."""

    value: Any
    marks: dict[Path, Mark]


def read_scalar(text: str) -> Any:
    """Return what a plain (unquoted) scalar stands for."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "0123456789.+-":
        return text
    if _INT.fullmatch(text) or _BASED.fullmatch(text):
        # Python refuses to read integers of more than 4300 digits; no setting has them.
        if len(text) > 1000:
            raise ReadError("a number of more than 1000 digits")
        return int(text.replace("_", ""), 0 if _BASED.fullmatch(text) else 10)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if _INF.fullmatch(text):
        return float(text.replace(".", ""))
    if text in (".nan", ".NaN", ".NAN"):
        raise ReadError("NaN is not a value that anything can be set to")
    return text


def read(text: str) -> Document:
    """Read one document; raise `ReadError` with the place of the first mistake."""
    return _Reader(text).read()


class _Reader:
    """Builds values from parser events, without recursion: depth and size are bounded before they hurt."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.marks: dict[Path, Mark] = {}
        self.anchors: dict[str, Any] = {}
        self.open_anchors: list[str | None] = []
        self.nodes = 0
        self.root: Any = None
        self.stack: list[tuple[Any, Path]] = []
        """Open collections with their paths."""
        self.keys: list[tuple[str, Mark] | None] = []
        """The pending key of each open collection."""

    def read(self) -> Document:
        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents = 0
        try:
            for event in yaml.parse(self.text, Loader=loader):
                documents += isinstance(event, yaml.DocumentStartEvent)
                if documents > 1:
                    raise ReadError("more than one document; remove the second '---'", _mark(event))
                self._event(event)
        except yaml.MarkedYAMLError as error:
            place = error.problem_mark or error.context_mark
            mark = (place.line + 1, place.column + 1) if place else None
            raise ReadError(f"not valid YAML: {_sentence(error)}", mark) from None
        except yaml.YAMLError as error:
            raise ReadError(f"not valid YAML: {' '.join(str(error).split())}") from None
        return Document(self.root, self.marks)

    def _event(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if event.tag is not None and event.tag not in _COLLECTION_TAGS:
                raise ReadError(f"the tag {event.tag!r} is not supported", _mark(event))
            if len(self.stack) >= MAX_DEPTH:
                raise ReadError(f"nested more than {MAX_DEPTH} levels deep", _mark(event))
            value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
            path = self._place(value, event)
            self.stack.append((value, path))
            self.keys.append(None)
            self.open_anchors.append(event.anchor)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            value, path = self.stack.pop()
            self.keys.pop()
            if isinstance(value, dict) and "<<" in value:
                self._merge(value, path)
            anchor = self.open_anchors.pop()
            if anchor is not None:
                self.anchors[anchor] = value

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        mark = _mark(event)
        if event.tag is not None and event.tag not in _TAGS:
            raise ReadError(f"the tag {event.tag!r} is not supported; write the value plainly", mark)
        plain = event.implicit[0] and event.tag is None
        try:
            value = read_scalar(event.value) if plain else event.value
        except ReadError as error:
            raise ReadError(error.message, mark) from None
        if event.anchor is not None:
            self.anchors[event.anchor] = value
        if self._expects_key():
            if not isinstance(value, str):
                raise ReadError(f"the key {event.value or 'null'!r} is not text; put it in quotes", mark)
            self._key(value, mark)
        else:
            self._place(value, event)

    def _alias(self, event: yaml.AliasEvent) -> None:
        mark = _mark(event)
        if event.anchor in self.open_anchors:
            raise ReadError(f"the alias *{event.anchor} contains itself", mark)
        if event.anchor not in self.anchors:
            raise ReadError(f"the alias *{event.anchor} is not defined above; put text with * in quotes", mark)
        value = self.anchors[event.anchor]
        if self._expects_key():
            if not isinstance(value, str):
                raise ReadError(f"the key *{event.anchor} is not text", mark)
            self._key(value, mark)
        else:
            self._place(self._copy(value, mark, len(self.stack)), event)

    def _copy(self, value: Any, mark: Mark, depth: int) -> Any:
        self._count(mark)
        if depth > MAX_DEPTH:
            raise ReadError(f"nested more than {MAX_DEPTH} levels deep", mark)
        if isinstance(value, dict):
            return {key: self._copy(item, mark, depth + 1) for key, item in value.items()}
        return [self._copy(item, mark, depth + 1) for item in value] if isinstance(value, list) else value

    def _count(self, mark: Mark) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise ReadError(f"more than {MAX_NODES} values; do its aliases multiply?", mark)

    def _expects_key(self) -> bool:
        return bool(self.stack) and isinstance(self.stack[-1][0], dict) and self.keys[-1] is None

    def _key(self, key: str, mark: Mark) -> None:
        container, path = self.stack[-1]
        if key in container:
            first = self.marks[(*path, key)]
            raise ReadError(f"the key {key!r} appears twice; it is first set in line {first[0]}", mark)
        self.keys[-1] = (key, mark)

    def _place(self, value: Any, event: yaml.Event) -> Path:
        mark = _mark(event)
        self._count(mark)
        if not self.stack:
            self.root = value
            return ()
        container, path = self.stack[-1]
        if isinstance(container, list):
            here: Path = (*path, len(container))
            container.append(value)
            self.marks[here] = mark
            return here
        pending = self.keys[-1]
        if pending is None:
            raise ReadError("a mapping or a list cannot be a key", mark)
        key, key_mark = pending
        self.keys[-1] = None
        here = (*path, key)
        container[key] = value
        self.marks[here] = key_mark
        return here

    def _merge(self, container: dict[str, Any], path: Path) -> None:
        """Add what the merge key `<<` names and the mapping does not set itself."""
        value, mark = container.pop("<<"), self.marks[(*path, "<<")]
        for source in value if isinstance(value, list) else [value]:
            if not isinstance(source, dict):
                raise ReadError("'<<' takes a mapping or a list of mappings", mark)
            for key, item in source.items():
                if key not in container:
                    container[key] = item
                    self.marks[(*path, key)] = mark


def _mark(event: yaml.Event) -> Mark:
    start = event.start_mark
    assert start is not None
    return start.line + 1, start.column + 1


def _sentence(error: yaml.MarkedYAMLError) -> str:
    parts = [" ".join(str(part).split()) for part in (error.context, error.problem) if part]
    return ", ".join(parts)


# ---- writing ---------------------------------------------------------------------------------------------------------


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes every text that would otherwise be read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    try:
        style = None if value and read_scalar(value) == value else "'"
    except ReadError:
        style = "'"
    # Only double quotes keep line breaks and characters that do not print as they are.
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if _CONTROL.search(value) else style)


def _represent_list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.SequenceNode:
    flat = not any(isinstance(item, dict | list) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flat)


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(list, _represent_list)


def write(value: Any) -> str:
    """Return a document that `read` gives back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False)


def read_bytes(data: bytes) -> str:
    """Return the text of a configuration file, or raise `ReadError`."""
    if len(data) > MAX_BYTES:
        raise ReadError(f"larger than {MAX_BYTES >> 20} MiB; is it a configuration file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ReadError("not UTF-8 text", (line, error.start - data.rfind(b"\n", 0, error.start))) from None


def as_config_error(error: ReadError, where: str) -> ConfigError:
    """Turn a `ReadError` into the error that users see."""
    place = f"{where}:{error.mark[0]}:{error.mark[1]}" if error.mark else where
    return ConfigError(f"{place}: {error.message}")
