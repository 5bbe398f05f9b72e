"""Damaged models: each is refused in one sentence or harmless, and no unknown key passes."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from etude.errors import ConfigError
from etude.policies.graph import build_model
from etude.reading import yaml12

BASE: dict[str, Any] = {
    "schema_version": 1,
    "settings": {"strict": True, "allow_imports": False},
    "sizes": {"width": 4, "list": [1, 2]},
    "templates": {"layer": {"_type_": "Linear", "in_features": "${sizes.width}", "out_features": 4}},
    "model": {
        "graph": {
            "inputs": [{"name": "x", "shape": ["B", 4], "dtype": "float32"}, {"name": "y", "optional": True}],
            "modules": {
                "a": {"_template_": "layer", "bias": False},
                "b": {"_type_": "nn.LayerNorm", "_args_": [4], "_kwargs_": {"eps": 1e-5}},
            },
            "nodes": [
                {"name": "one", "call": "module:a", "args": ["$x"]},
                {"name": "two", "call": "module:b", "kwargs": {"input": "$one"}, "out": "t"},
                {"name": "three", "call": "op:cat", "args": [["$one", "$t"]], "kwargs": {"dim": 1}},
                {"name": "four", "call": "op:chunk", "args": ["$three", 2, 1], "out": ["p", "q"]},
            ],
            "outputs": {"p": "$p", "q": "$q"},
            "return": "dict",
        }
    },
}
FREE = ((), ("sizes",), ("templates",), ("model", "graph", "modules"), ("model", "graph", "outputs"))
"""Where names are the user's own."""
WRONG: list[Any] = [
    None, True, -1, 0, 10**30, 1.5, float("inf"), "", "x", "$", "$$", "$x", "$t", "${", "${}", "${sizes}", "${model}",
    "${sizes.width}", "${env:int:HOME}", "${env:ETUDE_NOT_SET}", "${env:json:ETUDE_NOT_SET,[}", [], [[]], [None], {},
    {"": 1}, {"_type_": "Linear"}, {"_type_": 3}, {"_target_": "os.system", "_args_": ["true"]},
    {"_template_": "layer"},
    {"_template_": "none"}, {"_merge_": "append", "_value_": []}, {"_merge_": "keyed", "key": "k", "_value_": [1]},
    {"_value_": 1}, {"_typ_": "Linear"}, "module:a", "op:eval", "op:", "a" * 400, "\u2028", list(range(40)),
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def mutate(draw: random.Random) -> tuple[dict[str, Any], bool]:
    """Return a damaged model, and whether it must be refused."""
    tree = copy.deepcopy(BASE)
    path = draw.choice([place for place in places(tree) if place])
    holder = at(tree, path[:-1])
    kind = draw.choice(["replace", "replace", "remove", "rename", "stray", "swap"])
    if kind == "replace":
        holder[path[-1]] = copy.deepcopy(draw.choice(WRONG))
    elif kind == "remove":
        del holder[path[-1]]
    elif kind == "rename" and isinstance(holder, dict):
        holder[path[-1] + "e"] = holder.pop(path[-1])
    elif kind == "swap":
        other = draw.choice([place for place in places(tree) if place])
        holder[path[-1]] = copy.deepcopy(at(tree, other))
    else:
        target = draw.choice([place for place in places(tree) if isinstance(at(tree, place), dict)])
        at(tree, target)["unheard_of"] = 1
        return tree, target not in FREE
    return tree, False


def survive(seed: int, folder: Path) -> None:
    tree, refused = mutate(random.Random(seed))
    path = folder / "model.yaml"
    try:
        path.write_text(yaml12.write(tree), encoding="utf-8")
    except yaml12.ReadError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers without numbers
        try:
            build_model(path)
        except Exception as error:  # noqa: BLE001 - a component may raise anything
            said = str(error)
            assert "\n" not in said, (seed, said)
            assert "model.yaml" in said, (seed, type(error), said)
            assert isinstance(error, ConfigError) or "node " in said or "module " in said, (seed, type(error), said)
            return
    assert not refused, (seed, tree)


@pytest.mark.slow
def test_damaged_models_are_refused_in_one_sentence(tmp_path: Path) -> None:
    for seed in range(300):
        survive(seed, tmp_path)


@pytest.mark.nightly
def test_thousands_of_damaged_models(tmp_path: Path) -> None:
    for seed in range(1000, 3000):
        survive(seed, tmp_path)


def refused(folder: Path, text: str) -> str:
    path = folder / "model.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        build_model(path)
    return str(caught.value)


SEQUENCE = "schema_version: 1\nmodel: {sequential: {inputs: [%s], layers: [{_type_: %s}]}}\n"
GRAPH = (
    "schema_version: 1\n"
    "model: {graph: {inputs: [x], nodes: [{name: y, call: op:identity, args: [%s]}], outputs: [$y]}}\n"
)


@pytest.mark.parametrize(
    "text, said",
    [
        ("schema_version: 2\nmodel: {}\n", ":1:1: schema_version: schema_version 2 is not known"),
        ("model: {}\n", "schema_version is missing"),
        ("schema_version: 1\nmodle: {}\n", ":2:1: modle: model is missing"),
        ("schema_version: 1\nsettings: {strct: true}\nmodel: {}\n", "unknown key; did you mean 'strict'?"),
        ("schema_version: 1\ndefaults: [nowhere.yaml]\nmodel: {}\n", ":2:12: defaults[0]: there is neither"),
        ("schema_version: 1\ndefaults: [model.yaml]\nmodel: {}\n", "defaults go round in a circle"),
        ("schema_version: 1\nimport: [os]\n" + GRAPH[18:] % "$x", "unknown key; did you mean 'imports'?"),
        (GRAPH % "$z", ":2:74: model.graph.nodes[0].args[0]: there is no value $z"),
        (GRAPH % "$y", "is made by this node or a later one"),
        ("a: ${b}\nb: ${a}\n" + GRAPH % '"${a}"', "refers to itself"),
        ('a: {b: "${a}"}\n' + GRAPH % '"${a}"', "refers to itself"),
        (GRAPH % '"${nope.x}"', "names nothing in this file"),
        ("templates: {a: {_template_: b}, b: {_template_: a}}\n" + GRAPH % "{_template_: a}",
         "round in a circle: a -> b"),
        (GRAPH % ("[" * 70 + "]" * 70), "nested more than"),
        (GRAPH.replace("op:identity", "op:identty") % "$x", "did you mean 'identity'?"),
        (GRAPH.replace("op:identity", "op:softmax") % "$x, 1, 2", "node 'y': too many positional arguments"),
        (SEQUENCE % ("h0", "ReLU"), "'h0' exists already"),
        (SEQUENCE % ("x", "Linaer"), "did you mean 'Linear'?"),
        (SEQUENCE % ("x", "ReLU, inplac: true"),
         "has no parameter 'inplac'; did you mean 'inplace'?"),
        (GRAPH.replace("nodes", "modules: {items: {_type_: ReLU}}, nodes") % "$x",
         "cannot be called 'items'"),
    ],
)  # fmt: skip
def test_mistakes_are_said_with_their_place(tmp_path: Path, text: str, said: str) -> None:
    message = refused(tmp_path, text)
    assert said in message
    assert str(tmp_path) in message


def test_what_multiplies_is_refused(tmp_path: Path) -> None:
    lines = ["a0: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"]
    lines += [f"a{i}: [" + ", ".join([f'"${{a{i - 1}}}"'] * 10) + "]" for i in range(1, 12)]
    assert "values" in refused(tmp_path, "\n".join(lines) + "\n" + GRAPH % '"${a11}"')
    text = ["t0: {a: 1}"] + [f"  t{i}: [" + ", ".join([f"{{_template_: t{i - 1}}}"] * 10) + "]" for i in range(1, 12)]
    assert "values" in refused(tmp_path, "templates:\n  " + "\n".join(text) + "\n" + GRAPH % "{_template_: t11}")
    chain = "\n".join(f"c{i}: ${{c{i + 1}}}" for i in range(400)) + "\nc400: 1\n"
    assert "times removed" in refused(tmp_path, chain + GRAPH % '"${c0}"')
    words = "\n".join(f'w{i}: "${{w{i + 1}}}${{w{i + 1}}}"' for i in range(40)) + "\nw40: word\n"
    assert "multiply" in refused(tmp_path, words + GRAPH % '"${w0}"')
