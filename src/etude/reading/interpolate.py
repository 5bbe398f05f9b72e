"""Replace `${a.b}` by the value at that key and `${env:NAME}` by the environment; OmegaConf does the replacing.

What comes from the environment counts as a secret: it is registered as one, and what is stored, printed or reported
keeps the text `${env:NAME}`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from etude.reading.origins import Problem, leaves, lookup
from etude.reading.yaml12 import MAX_NODES, Path
from etude.secrets import register_secret

MAX_TEXT = 1 << 20
"""Characters that one interpolated text may have."""

_START = re.compile(r"(\\*)\$\{")
_REFERENCE = re.compile(
    r"\$\{\s*(?:env:\s*(?P<env>[A-Za-z_]\w*)\s*(?P<default>,[^{}$]*)?"
    r"|(?P<dots>\.*)(?P<path>[\w-]+(?:\.[\w-]+|\[\d+\])*))\s*\}"
)
_ESCAPED_REFERENCE = re.compile(r"(\\*)" + _REFERENCE.pattern)
_RESOLVER = "etude.env"


class Interpolation(str):
    """Text of which a part comes from the environment; kept as written wherever it is stored."""

    __slots__ = ()


@dataclass
class Interpolated:
    """A tree twice: with every value, and as it may be stored and shown."""

    values: dict[str, Any]
    stored: dict[str, Any]
    problems: list[Problem]


def interpolate(tree: dict[str, Any]) -> Interpolated:
    """Resolve every `${...}` of a tree, and find the ones that cannot be resolved."""
    texts = {path: value for path, value in leaves(tree) if isinstance(value, str) and "${" in value}
    if not texts:
        return Interpolated(tree, tree, [])
    checker = _Checker(tree, texts)
    problems = [Problem(path, fault) for path in texts if (fault := checker.fault(path)) is not None]
    if problems:
        return Interpolated(tree, tree, problems)
    return _resolve(tree, texts)


def _resolve(tree: dict[str, Any], texts: dict[Path, str]) -> Interpolated:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    used: list[str] = []

    def env(name: str, *default: Any) -> Any:
        if len(default) > 1:
            raise ValueError("the default has a comma; put it in quotes")
        if name not in os.environ:
            return default[0]
        used.append(name)
        register_secret(os.environ[name])
        # OmegaConf reads what a resolver returns as it is: `${...}` in a secret is not interpolated again.
        return os.environ[name]

    OmegaConf.register_resolver(_RESOLVER, env, replace=True)
    config = OmegaConf.create(_rename_resolver(tree))
    values, stored, problems = _copy(tree), _copy(tree), []
    for path, text in texts.items():
        used.clear()
        try:
            node: Any = config
            for key in path:
                node = node[key]
            value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            problems.append(Problem(path, f"cannot resolve {text!r}: {str(error).partition(chr(10))[0]}"))
            continue
        _put(values, path, value)
        _put(stored, path, Interpolation(text) if used else value)
    return Interpolated(values, stored, problems)


def escape(text: str) -> str:
    """Return text that interpolates to `text`."""
    return _START.sub(lambda match: match[1] * 2 + "\\${", text)


def _rename_resolver(tree: Any) -> Any:
    # Our resolver has a name of its own, so that it collides with nobody's `env` in the same process.
    if isinstance(tree, dict):
        return {key: _rename_resolver(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_rename_resolver(value) for value in tree]
    if not isinstance(tree, str):
        return tree
    # OmegaConf takes `???` for a value that is missing.
    return r"\???" if tree == "???" else _ESCAPED_REFERENCE.sub(_rename, tree)


def _rename(match: re.Match[str]) -> str:
    if len(match[1]) % 2 or not match["env"]:
        return match[0]
    default = (match["default"] or "").strip()
    return f"{match[1]}${{{_RESOLVER}:{match['env']}{default if default != ',' else ',' + repr('')}}}"


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items()}
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


def _put(tree: Any, path: Path, value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


class _Checker:
    """Finds what would go wrong before OmegaConf is asked: syntax, missing keys, circles, unset variables, bombs."""

    def __init__(self, tree: dict[str, Any], texts: dict[Path, str]) -> None:
        self.tree = tree
        self.texts = texts
        self.sizes: dict[Path, tuple[int, int]] = {}
        self.under_way: list[Path] = []

    def fault(self, path: Path) -> str | None:
        """Return what is wrong with the text at a path."""
        try:
            self._size(path)
        except _Fault as fault:
            self.under_way.clear()
            return str(fault)
        return None

    def _size(self, path: Path) -> tuple[int, int]:
        """Return how many values and characters a text grows to; the sizes are found without building anything."""
        if path in self.sizes:
            return self.sizes[path]
        if path in self.under_way:
            circle = [*self.under_way[self.under_way.index(path) :], path]
            raise _Fault("refers to itself: " + " -> ".join(".".join(map(str, p)) for p in circle))
        if len(self.under_way) > 100:
            raise _Fault("refers to other values more than 100 times removed")
        self.under_way.append(path)
        text = self.texts[path]
        nodes, length = 1, len(text)
        for match in _START.finditer(text):
            if len(match[1]) % 2:
                continue  # escaped
            more_nodes, more_length = self._reference(path, text, match.end(1))
            nodes, length = nodes + more_nodes, length + more_length
        if nodes > MAX_NODES or length > MAX_TEXT:
            raise _Fault("grows too large when it is interpolated")
        self.under_way.pop()
        self.sizes[path] = nodes, length
        return nodes, length

    def _reference(self, path: Path, text: str, start: int) -> tuple[int, int]:
        match = _REFERENCE.match(text, start)
        if match is None:
            remedy = "write ${a.b}, ${env:NAME} or ${env:NAME,default}, and \\${ for the characters themselves"
            raise _Fault(f"cannot read {text[start : start + 40]!r}; {remedy}")
        if match["env"]:
            return self._variable(match["env"], match["default"])
        keys = match["path"].replace("[", ".").replace("]", "").split(".")
        dots = len(match["dots"])
        if dots > len(path):
            raise _Fault(f"{match[0]} points outside the configuration")
        target = self._find(path[: len(path) - dots] if dots else (), keys, match[0])
        if target == path[: len(target)]:
            raise _Fault(f"{match[0]} refers to something that contains it")
        nodes = length = 0
        for inner, value in leaves(lookup(self.tree, target), target):
            more = self._size(inner) if inner in self.texts else (1, len(value) if isinstance(value, str) else 24)
            nodes, length = nodes + more[0], length + more[1]
        return nodes, length

    @staticmethod
    def _variable(name: str, default: str | None) -> tuple[int, int]:
        if name not in os.environ and default is None:
            raise _Fault(f"the environment variable {name} is not set; export it, or write ${{env:{name},default}}")
        return 1, len(os.environ.get(name, default or ""))

    def _find(self, base: Path, keys: list[str], written: str) -> Path:
        path, value = base, lookup(self.tree, base)
        for key in keys:
            step: str | int = int(key) if isinstance(value, list) and key.isdecimal() else key
            here = (*path, step)
            known = step in value if isinstance(value, dict) else isinstance(step, int) and step < len(value)
            if not known:
                raise _Fault(f"{written} names no key of the configuration")
            path, value = here, lookup(self.tree, here)
            if here in self.texts and key is not keys[-1]:
                raise _Fault(f"{written} goes through {'.'.join(map(str, here))}, which is itself interpolated")
        return path


class _Fault(Exception):
    """One text cannot be interpolated."""
