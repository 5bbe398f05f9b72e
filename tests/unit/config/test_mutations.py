"""Thousands of damaged configurations: each is refused in words or harmless, and no unknown key ever passes."""

import copy
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import load
from etude.errors import ConfigError
from etude.reading import yaml12

BASE: dict[str, Any] = {
    "schema_version": 1,
    "plugins": ["components.py"],
    "policy": {"type": "net", "params": {"width": 4, "depths": [1, 2], "rate": 0.5, "kind": "gated", "gain": 2.0}},
    "data": {"type": "rows", "params": {"count": 10, "folder": "a/b", "shift": [0.0, 1.0]}},
    "eval_data": {"type": "rows", "params": {"count": 2}},
    "engine": {"type": "stub", "params": {"strategy": "x"}},
    "training": {
        "lr": 0.001,
        "batch_size": 8,
        "optimizer": "sgd",
        "optimizer_params": {"momentum": 0.9, "nesterov": True},
        "training_steps": 100,
        "precision": "bf16",
        "log_every": "10 steps",
        "save_every": 50,
        "shuffle": False,
        "freeze": ["a.*"],
        "early_stopping": {"metric": "eval/loss", "patience": 3},
        "optimizers": {"one": {"match": ["a.*"], "lr": 0.1, "params": {"eps": 1e-8}}, "two": {"type": "sgd"}},
    },
    "run": {"name": "n", "root": "runs"},
    "loggers": [{"type": "sink", "params": {"project": "p"}}],
    "callbacks": [{"type": "beep", "params": {"times": 2, "loud": True}}, {"type": "beep"}],
}
# The names of optimizers are the user's own.
FREE = (("training", "optimizers"),)
WRONG: list[Any] = [
    None, True, False, -1, 0, 10**30, 1.5, -0.0, float("inf"), "", "x", "1e400", "nan", "-5", "2 eons", [], [[]],
    [None], {}, {"type": "net"}, {"": 1}, {"a": {"b": {"c": []}}}, "${", "${a}", "${training.lr}", "${training}",
    "${env:HOME}",
    "${env:ETUDE_NOT_SET}", "${env:ETUDE_NOT_SET,3}", "${env:ETUDE_NOT_SET,}", "${oc.env:HOME}", "\\${x}", "???",
    "\u2028", "\U0001f3b9",
    "a" * 500, list(range(40)),
]  # fmt: skip

Tree = dict[str, Any]
Mutation = Callable[[random.Random, Tree], tuple[str | bytes, bool]]


def _mappings(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Tree]]:
    found = [(path, tree)] if isinstance(tree, dict) else []
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in children:
        found += _mappings(value, (*path, key))
    return found


def _fresh(random_: random.Random, near: list[str]) -> str:
    """Return a key that nobody knows, often one letter off a known one."""
    if near and random_.random() < 0.5:
        word = random_.choice(near)
        return word + random_.choice(["s", "_", "x"]) + random_.choice(string.ascii_lowercase) + "q"
    return "zz" + "".join(random_.choices(string.ascii_letters + "_-. $%", k=random_.randint(1, 12))) + "q"


def insert_unknown(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    _, mapping = random_.choice(_mappings(tree))
    key, value = _fresh(random_, list(mapping)), random_.choice([1, "x", [], None, True, 0.5])
    items = list(mapping.items())
    items.insert(random_.randint(0, len(items)), (key, value))
    mapping.clear()
    mapping.update(items)
    return yaml12.write(tree), True


def rename_key(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    _, mapping = random_.choice([(p, m) for p, m in _mappings(tree) if m and p not in FREE])
    key = random_.choice(list(mapping))
    mapping[_fresh(random_, [key])] = mapping.pop(key)
    return yaml12.write(tree), True


def drop_key(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    _, mapping = random_.choice([(p, m) for p, m in _mappings(tree) if m])
    del mapping[random_.choice(list(mapping))]
    return yaml12.write(tree), False


def wrong_value(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    for _ in range(random_.randint(1, 3)):
        _, mapping = random_.choice([(p, m) for p, m in _mappings(tree) if m])
        mapping[random_.choice(list(mapping))] = copy.deepcopy(random_.choice(WRONG))
    return yaml12.write(tree), False


def move_subtree(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    mappings = [m for _, m in _mappings(tree) if m]
    source, target = random_.choice(mappings), random_.choice(mappings)
    target[random_.choice(list(target))] = copy.deepcopy(source[random_.choice(list(source))])
    return yaml12.write(tree), False


def nest_deeply(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    depth, kind = random_.choice([10, 60, 70, 5000]), random_.choice(["[", "{a: "])
    _, mapping = random_.choice([(p, m) for p, m in _mappings(tree) if m])
    mapping[random_.choice(list(mapping))] = "@@@"
    closed = {"[": "]", "{a: ": "}"}[kind] if random_.random() < 0.7 else ""
    return yaml12.write(tree).replace("'@@@'", kind * depth + "1" + closed * depth).replace("@@@", kind * depth), False


def noise(random_: random.Random, tree: Tree) -> tuple[bytes, bool]:
    data = bytearray(yaml12.write(tree).encode())
    for _ in range(random_.randint(1, 8)):
        where = random_.randrange(len(data))
        action = random_.randrange(3)
        if action == 0:
            data[where] = random_.randrange(256)
        elif action == 1:
            data.insert(where, random_.choice(b"\x00\t\n :{}[]&*!|>'\"%@`#-?,$\\~"))
        else:
            del data[where : where + random_.randint(1, 20)]
    return bytes(data), False


def indent_damage(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    lines = yaml12.write(tree).splitlines()
    for _ in range(random_.randint(1, 4)):
        where = random_.randrange(len(lines))
        change = random_.choice([" ", "   ", "\t", ""])
        lines[where] = change + (lines[where].lstrip() if random_.random() < 0.5 else lines[where])
    return "\n".join(lines), False


def duplicate_line(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    lines = yaml12.write(tree).splitlines()
    where = random_.randrange(len(lines))
    lines.insert(random_.randrange(len(lines)), lines[where])
    return "\n".join(lines), False


def circular_defaults(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    wrong: list[Any] = [["x.yaml"], ["base.yaml", "./x.yaml"], ["gone.yaml"], "x.yaml", [{"a": "x.yaml"}], [["x"]]]
    wrong += [{"a": "base.yaml"}, [None], [""], ["."], ["\x00"], ["${run.name}"], ["/dev/null"], ["components.py"]]
    tree["defaults"] = random_.choice(wrong)
    return yaml12.write(tree), False


def anchors(random_: random.Random, tree: Tree) -> tuple[str, bool]:
    lines = yaml12.write(tree).splitlines()
    for mark in random_.sample(["&a", "*a", "<<: *a", "&a *a", "!!int", "!x", "? ", "- "], 2):
        where = random_.randrange(len(lines))
        key, colon, rest = lines[where].partition(":")
        lines[where] = f"{key}{colon} {mark} {rest}" if random_.random() < 0.7 else f"{lines[where]}\n{mark}"
    return "\n".join(lines), False


# Unknown keys are what matters most, so they come up most.
MUTATIONS: list[Mutation] = [insert_unknown] * 3 + [rename_key, wrong_value, noise] * 2
MUTATIONS += [drop_key, move_subtree, nest_deeply, indent_damage, duplicate_line, circular_defaults, anchors]


def _try(folder: Path, seed: int) -> None:
    random_ = random.Random(seed)
    mutate = random_.choice(MUTATIONS)
    tree = copy.deepcopy(BASE) if random_.random() < 0.95 else {"defaults": ["base.yaml"], **copy.deepcopy(BASE)}
    document, must_fail = mutate(random_, tree)
    data = document if isinstance(document, bytes) else document.encode()
    (folder / "x.yaml").write_bytes(data)
    overrides = random_.choice([[], [], [], ["training.lr=1"], ["run.name=a", "callbacks.0.params.times=3"]])
    try:
        load("x.yaml", overrides)
    except ConfigError as error:
        assert str(error), f"seed {seed}: an empty message"
        places = ("x.yaml:", "base.yaml:", "components.py:", "override ")
        assert all(line.startswith(places) for line in str(error).splitlines()), f"seed {seed}: {error}"
    else:
        assert not must_fail, f"seed {seed}: {mutate.__name__} was accepted"


@pytest.fixture
def damaged(folder: Path) -> Path:
    (folder / "base.yaml").write_text("run: {root: other}\ntraining: {seed: 3}\n")
    (folder / "x.yaml").write_text(yaml12.write(BASE))
    load("x.yaml")  # what is damaged is sound
    return folder


def test_damaged_configurations_are_refused_in_words(damaged: Path) -> None:
    for seed in range(300):
        _try(damaged, seed)


@pytest.mark.slow
@pytest.mark.parametrize("quarter", [0, *(pytest.param(other, marks=pytest.mark.nightly) for other in (1, 2, 3))])
def test_ten_thousand_damaged_configurations_are_refused_in_words(damaged: Path, quarter: int) -> None:
    for seed in range(quarter * 2_500, (quarter + 1) * 2_500):
        _try(damaged, seed)


@pytest.mark.parametrize(
    "path", [path for path, _ in _mappings(BASE)], ids=lambda path: ".".join(map(str, path)) or "root"
)
def test_an_unknown_key_is_refused_wherever_it_stands(damaged: Path, path: tuple[Any, ...]) -> None:
    tree = copy.deepcopy(BASE)
    place = next(mapping for where, mapping in _mappings(tree) if where == path)
    place["zzz"] = 1
    (damaged / "x.yaml").write_text(yaml12.write(tree))
    dotted = ".".join(map(str, (*path, "zzz")))
    with pytest.raises(ConfigError, match=rf"x\.yaml:\d+:\d+: {dotted}: (unknown key|expected a mapping)"):
        load("x.yaml")
    with pytest.raises(ConfigError, match=rf"override '{dotted}=1': {dotted}: (unknown key|expected a mapping)"):
        (damaged / "x.yaml").write_text(yaml12.write(BASE))
        load("x.yaml", [f"{dotted}=1"])
