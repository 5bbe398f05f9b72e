"""Find the definitions in a module's source without importing the module or its parents."""

from __future__ import annotations

import ast
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

Definition = ast.ClassDef | ast.FunctionDef | None

# Modules whose names stand for themselves in annotations; importing them costs nothing that matters.
_LIGHT = frozenset(
    {"typing", "collections.abc", "pathlib", "pydantic", "etude.types.duration", "etude.config.training"}
)


class Source:
    """The top level of one module: its definitions, constants and imports."""

    def __init__(self, module: str, tree: ast.Module, package: str) -> None:
        self.module = module
        self.definitions: dict[str, ast.ClassDef | ast.FunctionDef] = {}
        self.constants: dict[str, ast.expr] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        """Local name -> (module, attribute); the attribute is empty for `import module`."""
        self._package = package
        for node in tree.body:
            self._add(node)

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            self.definitions[node.name] = node
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self.constants[node.target.id] = node.value
        elif isinstance(node, ast.Import):
            for name in node.names:
                self.imports[name.asname or name.name.partition(".")[0]] = (name.name if name.asname else "", "")
        elif isinstance(node, ast.ImportFrom):
            parents = self._package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            for name in node.names:
                self.imports[name.asname or name.name] = (module, name.name)
        elif isinstance(node, ast.If):  # `if TYPE_CHECKING:`
            for child in node.body:
                self._add(child)

    def definition(self, name: str) -> tuple[Source, Definition]:
        """Return the class or function that a name stands for, with the module that defines it."""
        if name in self.definitions:
            return self, self.definitions[name]
        if name in self.imports and self.imports[name][1]:
            home = find_source(self.imports[name][0])
            if home is not None and home is not self:
                return home.definition(self.imports[name][1])
        return self, None

    def lookup(self, name: str) -> Any:
        """Return what a name in an annotation stands for: an object, an alias as a syntax tree, or None."""
        if name in self.constants:
            return self.constants[name], self.lookup
        head, _, rest = name.partition(".")
        if head not in self.imports:
            return None
        module, attribute = self.imports[head]
        if not attribute:
            module, _, attribute = (f"{module or head}.{rest}").rpartition(".")
        elif rest:
            return None
        if module in _LIGHT:
            __import__(module)
            return getattr(sys.modules[module], attribute, None)
        if module.partition(".")[0] != self.module.partition(".")[0]:
            return None
        home = find_source(module)
        return home.lookup(attribute) if home is not None and home is not self else None


SOURCES: dict[str, Source | None] = {}
"""What has been parsed, by module."""


def find_source(module: str) -> Source | None:
    """Return the parsed source of a module that is installed; None if there is none."""
    if module not in SOURCES:
        SOURCES[module] = _parse(module)
    return SOURCES[module]


def _parse(module: str) -> Source | None:
    spec = find_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        with open(spec.origin, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return None
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    return Source(module, tree, package)


def find_spec(module: str) -> ModuleSpec | None:
    """Find a module without importing its parents (`importlib.util.find_spec` would import them)."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        # As text: transformers keeps paths there, which the finder passes over.
        spec = PathFinder.find_spec(name, list(map(str, spec.submodule_search_locations)))
    return spec
