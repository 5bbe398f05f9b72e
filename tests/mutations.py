"""Files with something changed: each is read, or refused in sentences that name a place in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from etude.errors import ConfigError
from etude.reading import yaml12

VALUES: list[Any] = [None, True, -1, 0, 1.5, float("inf"), "", "x", "${a.b}", "\0", [], [1], {}, {"x": 1}, {"type": 3}]

Free = Callable[[Any], Sequence[Any]]
"""From a file to those of its mappings whose keys are somebody else's affair."""


def mutated(draw: random.Random, text: str, free: Free) -> tuple[Any, bool]:
    """Return a file with one thing changed, and whether it now holds a key that nothing knows."""
    tree: Any = yaml12.read(text).value
    containers = []

    def visit(node: Any) -> None:
        if isinstance(node, dict | list) and node:
            containers.append(node)
            for inner in node.values() if isinstance(node, dict) else node:
                visit(inner)

    visit(tree)
    place = draw.choice(containers)
    is_free = any(place is one for one in free(tree))
    kind = draw.choice(["value", "value", "remove", "rename", "add"])
    if isinstance(place, list) or kind == "value":
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        place[draw.choice(keys)] = draw.choice(VALUES)
        return tree, False
    key = draw.choice(list(place))
    if kind == "add":
        place[f"{key}_x"] = draw.choice(VALUES[1:])
        return tree, not is_free
    value = place.pop(key)
    if kind == "rename":
        place[f"{key[:-1]}_{key[-1]}"] = value
    return tree, kind == "rename" and not is_free


def check_mutations(count: int, seed: int, text: str, read: Callable[[str], object], name: str, free: Free) -> None:
    """Change a file many times, and read each: nothing but sentences about it may come of that.

    Args:
        count: How many times.
        seed: Of what is changed.
        text: The file.
        read: Reads a changed one.
        name: What the file is called in errors.
        free: Where unknown keys are no mistake.
    """
    draw = random.Random(seed)
    for _ in range(count):
        tree, is_unknown = mutated(draw, text, free)
        changed = yaml12.write(tree)
        try:
            read(changed)
        except ConfigError as error:
            lines = str(error).splitlines()
            assert lines, changed
            assert all(len(line) < 600 for line in lines), (changed, lines)
            assert all(line.startswith((name, "override")) for line in lines), (changed, lines)
        else:
            assert not is_unknown, changed
