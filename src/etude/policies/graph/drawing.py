"""Describe a model in rows, and draw it as SVG: inputs at the top, every node below what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from etude.policies.graph.model import GraphModel
from etude.policies.graph.tree import Item

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 220, 56, 24, 44, 16
_LONGEST = 34
"""Characters that fit in a box."""


class Row(NamedTuple):
    """One node of a model, or one of its inputs or outputs."""

    name: str
    call: str
    reads: tuple[str, ...]
    """The values it is given."""
    makes: tuple[str, ...]
    shape: str
    parameters: int


def describe_model(model: GraphModel) -> list[Row]:
    """Return inputs, nodes and outputs in order; a module that several nodes call is counted with the first."""
    rows = [
        Row(one.name, "input" + " (optional)" * one.optional, (), (one.name,), model.shapes.get(one.name, ""), 0)
        for one in model.plan.inputs
    ]
    counted: set[int] = set()
    for node in model.plan.nodes:
        parameters = model.graph_modules[node.target].parameters() if node.kind == "module" else ()
        fresh = {id(one): one.numel() for one in parameters if id(one) not in counted}
        counted |= set(fresh)
        shape = ", ".join(filter(None, (model.shapes.get(name, "") for name in node.results)))
        reads = tuple(dict.fromkeys(name for item in (*node.args, *node.kwargs.values()) for name in _references(item)))
        rows.append(
            Row(node.name, f"{node.kind}:{node.target}", reads, tuple(node.results), shape, sum(fresh.values()))
        )
    names = {slot: name for name, slot in model.plan.slots.items()}
    given = {key: names[slot] for key, slot in model.plan.outputs.items()}
    for key, name in given.items():
        label = key if model.plan.returns == "dict" else name
        rows.append(Row(label, "output", (name,), (), model.shapes.get(name, ""), 0))
    return rows


def _references(item: Item) -> Iterator[str]:
    if isinstance(item.value, dict | list):
        for inner in item.value.values() if isinstance(item.value, dict) else item.value:
            yield from _references(inner)
    elif isinstance(item.value, str) and item.value.startswith("$") and not item.value.startswith("$$"):
        yield item.value[1:]


def draw(rows: list[Row], title: str) -> str:
    """Return the drawing as the text of an SVG file."""
    maker = {name: index for index, row in enumerate(rows) for name in row.makes}
    levels: list[int] = []
    for row in rows:
        levels.append(1 + max((levels[maker[name]] for name in row.reads), default=-1))
    columns: dict[int, int] = {}
    places: list[tuple[int, int]] = []
    for level in levels:
        column = columns.get(level, 0)
        columns[level] = column + 1
        places.append((MARGIN + column * (WIDTH + GAP_X), 2 * MARGIN + level * (HEIGHT + GAP_Y)))
    width = max(x for x, _ in places) + WIDTH + MARGIN
    height = max(y for _, y in places) + HEIGHT + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{_safe(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, (x, y) in zip(rows, places, strict=True):
        for name in row.reads:
            from_x, from_y = places[maker[name]]
            lines.append(_edge(from_x + WIDTH // 2, from_y + HEIGHT, x + WIDTH // 2, y))
    lines += [_box(row, x, y) for row, (x, y) in zip(rows, places, strict=True)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _edge(x: int, y: int, to_x: int, to_y: int) -> str:
    middle = (y + to_y) // 2
    return f'<path d="M{x},{y} C{x},{middle} {to_x},{middle} {to_x},{to_y}" fill="none" stroke="#888"/>'


def _box(row: Row, x: int, y: int) -> str:
    fill = {"i": "#e8f0fe", "m": "#fff3e0", "o": "#f1f3f4"}[row.call[0]]
    count = f"{row.parameters:,} parameters" if row.parameters else ""
    texts = [(row.name, "bold"), (f"{row.call}  {count}".strip(), "normal"), (row.shape, "normal")]
    inner = "".join(
        f'<text x="{x + 8}" y="{y + 16 + 16 * index}" font-weight="{weight}">{_safe(_short(text))}</text>'
        for index, (text, weight) in enumerate(texts)
    )
    tip = f"<title>{_safe(f'{row.name} {row.call} {row.shape}')}</title>"
    box = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#888"/>'
    return f"<g>{tip}{box}{inner}</g>"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _safe(text: str) -> str:
    return escape("".join(one if one.isprintable() else "?" for one in text))
