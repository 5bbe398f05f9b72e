"""The rules of the house, kept by reading the source: sizes, names, safety, and the direction of imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import etude

PACKAGE = Path(etude.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
DOORS = (PACKAGE / "__init__", PACKAGE / "__main__")

MAX_FILE_LINES, MAX_TRAINER_LINES, MAX_INIT_LINES, MAX_FUNCTION_LINES = 451, 400, 40, 60

# A module may import its own layer and lower ones. `config.training` is plain data that everyone may read.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("builtins", "errors", "extras", "lazy", "logging", "rng", "secrets", "reading", "types", "config.training"),
    ("plugins", "signatures"),
    ("registry",),
    ("runs", "low_precision", "low_precision_probe"),
    ("policies", "data", "algorithms", "simulation", "rollouts", "callbacks"),
    ("loop",),
    ("engines",),
    ("trainer",),
    ("grpo_trainer",),
    ("deploy", "redteam", "service"),
    ("config",),
    ("sweep",),
    ("cli",),
)
LAYER_OF = {name: height for height, names in enumerate(LAYERS) for name in names}
# Narrower than their layer allows.
ONLY = {
    "registry": {"builtins", "errors", "extras", "lazy", "plugins", "reading", "types", "signatures"},
    "runs": {"errors", "extras", "lazy", "secrets", "types", "config.training", "reading", "runs"},
}

TORCH_FREE = (
    "etude",
    "etude.errors",
    "etude.types.duration",
    "etude.types.protocols",
    "etude.registry",
    "etude.config",
)
TORCH_FREE += ("etude.config.training", "etude.config.schema", "etude.config.load", "etude.cli", "etude.cli.main")
HEAVY = ("torch", "numpy", "scipy", "sklearn", "transformers", "lightning", "ray", "mujoco", "fastapi", "tensorboard")

VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "yaml.unsafe_load", "yaml.full_load", "torch.save"}


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_stay_small(path: Path) -> None:
    limit = {PACKAGE / "trainer.py": MAX_TRAINER_LINES, PACKAGE / "__init__.py": MAX_INIT_LINES + 1}
    assert len(path.read_text(encoding="utf-8").splitlines()) < limit.get(path, MAX_FILE_LINES)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_functions_stay_small(path: Path) -> None:
    functions = (node for node in ast.walk(_tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = {f"{node.name}, line {node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length >= MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_file_names_and_text_are_plain(path: Path) -> None:
    assert path.name not in VAGUE_NAMES
    assert path.read_bytes().isascii()


def test_git_ignores_no_source() -> None:
    """`runs/` is both where users' runs land and a package of ours; only the first is ignored."""
    command = ["git", "-C", str(PACKAGE), "check-ignore", "--no-index", *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_code_can_be_smuggled_in_through_data(path: Path) -> None:
    assert list(_unsafe(_tree(path))) == []


@pytest.mark.parametrize("source", ["import pickle", "from dill import loads", "eval('1')", "torch.load(path)"])
def test_the_safety_check_notices(source: str) -> None:
    assert list(_unsafe(ast.parse(source)))


def _unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"line {node.lineno}: {name}" for name in names if name.split(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in UNSAFE_CALLS or (called == "torch.load" and given.get("weights_only") != "True"):
                yield f"line {node.lineno}: {called}"
            if given.get("weights_only", "True") != "True" or given.get("allow_pickle", "False") != "False":
                yield f"line {node.lineno}: {called} may unpickle"


@pytest.mark.parametrize("path", [path for path in FILES if path.parent / path.stem not in DOORS], ids=_name)
def test_imports_point_one_way(path: Path) -> None:
    place = _part_of(_dotted(path))
    assert place, "a new part of the house needs its place in LAYERS"
    parts = {_part_of(module): module for module in _imported(_tree(path), _dotted(path), path.name == "__init__.py")}
    assert None not in parts, f"{parts[None]}: import the name from the module that defines it"
    upward = {module for part, module in parts.items() if LAYER_OF[part or ""] > LAYER_OF[place]}
    outside = {module for part, module in parts.items() if place in ONLY and part not in ONLY[place]}
    assert upward | outside == set()


@pytest.mark.parametrize(
    "source, found",
    [
        ("from etude.cli.main import main", ["etude.cli.main"]),
        ("def f():\n    import etude.trainer", ["etude.trainer"]),
        ("from etude import trainer, Trainer", ["etude.trainer", "etude.Trainer"]),
        ("from ..engines import torch", ["etude.engines.torch"]),
        ("from . import order", ["etude.data.order"]),
        ("if TYPE_CHECKING:\n    from etude.trainer import Trainer", []),
        ("import torch", []),
    ],
)
def test_the_import_check_notices(source: str, found: list[str]) -> None:
    assert list(_imported(ast.parse(source), "etude.data.map", is_package=False)) == found


def test_packages_of_one_layer_do_not_import_in_circles() -> None:
    edges: dict[str, set[str]] = {}
    for path in FILES:
        place = _part_of(_dotted(path))
        for module in _imported(_tree(path), _dotted(path), path.name == "__init__.py"):
            part = _part_of(module)
            if place and part and part != place and LAYER_OF[part] == LAYER_OF[place]:
                edges.setdefault(place, set()).add(part)
    for start in edges:
        reached, frontier = set[str](), {start}
        while frontier:
            frontier = {part for place in frontier for part in edges.get(place, ())} - reached
            reached |= frontier
        assert start not in reached, f"etude.{start} imports itself by way of {sorted(reached)}"


def test_modules_do_not_import_in_circles() -> None:
    """Counted are imports that run when a module is read, not those inside of functions."""
    edges: dict[str, set[str]] = {}
    for path in FILES:
        at_once = ast.Module(
            [node for node in _tree(path).body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], []
        )
        name = _dotted(path)
        edges[name] = set(_imported(at_once, name, path.name == "__init__.py")) & {_dotted(other) for other in FILES}
    left = dict(edges)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}, "these wait for each other"


NAMED_BY_OTHERS = {"Trainer", "BaseTrainer", "DPO", "IPO", "PPO", "Digits"}
"""Names that users of two libraries know, and the digits that are data here and a task there."""


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, set[str]] = {}
    for path in FILES:
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(_name(path))
    assert {name: found for name, found in places.items() if len(found) > 1}.keys() == NAMED_BY_OTHERS


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _part_of(module: str) -> str | None:
    """Return the part of the house a module belongs to, or None for names of `etude` itself."""
    inner = module.removeprefix("etude").lstrip(".")
    head = inner.split(".")[0]
    return inner if inner in LAYER_OF else head if head in LAYER_OF else None


def _imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """Yield the modules of ours that are imported anywhere, except for type checking alone."""
    for_types = {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in for_types or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            package = module.split(".")
            base = package[: len(package) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found = [_home(origin, alias.name) for alias in node.names]
        yield from (name for name in found if name.split(".")[0] == "etude" and name != "etude.__version__")


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _home(origin: str, name: str) -> str:
    """Return the module that `from origin import name` reads: a submodule of origin, or origin itself."""
    inside = PACKAGE.parent.joinpath(*origin.split("."), name)
    is_module = inside.is_dir() or inside.with_suffix(".py").exists()
    return f"{origin}.{name}" if is_module or origin == "etude" else origin


def test_command_line_and_configuration_import_no_torch() -> None:
    program = (
        "import importlib, sys\n"
        f"for module in {TORCH_FREE!r}:\n"
        "    importlib.import_module(module)\n"
        f"    heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "    assert not heavy, f'{module} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", etude.__all__)
def test_public_names_are_there(name: str) -> None:
    (home,) = (home for home, names in etude._HOMES.items() if name in names)
    found = getattr(etude, name)
    assert found is getattr(import_module(f"etude.{home}"), name)
    assert found.__name__ == name
    assert name in dir(etude)


def test_unknown_public_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="Trainr"):
        etude.Trainr  # noqa: B018


def test_the_names_type_checkers_see_are_the_public_names() -> None:
    block = next(node for node in ast.walk(_tree(PACKAGE / "__init__.py")) if _is_type_checking(node))
    seen = {alias.name for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(etude.__all__)
