"""What a component takes: its parameters, read from the source without importing it, or from a live object.

Reading the source keeps `etude check` and `etude list` free of torch; what it says of Etude's own components is stored
(`etude.signatures.stored`), so that none of theirs is parsed at a start. Imports only the standard library.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from etude.signatures.annotations import interpret, understood
from etude.signatures.nested import ParametersOf, find_nested
from etude.signatures.source import Source, find_source
from etude.signatures.stored import read_stored
from etude.signatures.values import Parameter as Parameter
from etude.signatures.values import Signature as Signature


def _inherit(own: Signature, inherited: Signature | None) -> Signature:
    """Complete a signature that ends in `**kwargs` by what the next class in line takes."""
    if not own.open or inherited is None or not inherited.parameters:
        return own
    names = {p.name for p in own.parameters}
    rest = tuple(p for p in inherited.parameters if p.name not in names)
    return Signature(own.parameters + rest, inherited.open, own.summary)


def _group(annotation: Any) -> Signature | None:
    """Return the parameters that `**options: Annotated[Any, ParametersOf(...)]` stands for."""
    said = find_nested(annotation)
    return parse_static(said.target) if isinstance(said, ParametersOf) else None


# ---- from source -----------------------------------------------------------------------------------------------------


def read_static(target: str) -> Signature | None:
    """Return the signature of `module:attribute` without importing it; None if its source does not tell."""
    return read_stored(target) or parse_static(target)


def parse_static(target: str) -> Signature | None:
    """Read the signature of `module:attribute` from its source; None if the source does not tell."""
    module, _, attribute = target.partition(":")
    source = find_source(module)
    return None if source is None else _read_name(source, attribute)


def _read_name(source: Source, name: str) -> Signature | None:
    home, node = source.definition(name)
    if isinstance(node, ast.FunctionDef):
        return _from_function(home, node, ast.get_docstring(node) or "")
    return _from_class(home, node) if isinstance(node, ast.ClassDef) else None


def _from_class(source: Source, node: ast.ClassDef) -> Signature:
    doc = ast.get_docstring(node) or ""
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is not None:
        own = _from_function(source, init, doc + "\n" + (ast.get_docstring(init) or ""), skip_first=True)
        if not own.open:
            return own
    elif _dataclass_decorator(node) is not None:
        return Signature(tuple(_dataclass_fields(source, node).values()), summary=_first_line(doc))
    inherited = next((_from_class(home, base) for home, base in _bases(source, node)), None)
    if init is not None:
        return _inherit(own, inherited)
    if inherited is not None:
        return Signature(inherited.parameters, inherited.open, _first_line(doc))
    return Signature(summary=_first_line(doc))


def _bases(source: Source, node: ast.ClassDef) -> Iterable[tuple[Source, ast.ClassDef]]:
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        home, found = source.definition(ast.unparse(plain))
        if isinstance(found, ast.ClassDef) and not is_foreign(home.module):
            yield home, found


def _from_function(source: Source, node: ast.FunctionDef, doc: str, *, skip_first: bool = False) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = list(zip(positional, defaults, strict=True))[skip_first:]
    by_name = [(a, d) for a, d in pairs if a not in arguments.posonlyargs]
    by_name += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    helps = _helps(doc)
    found = tuple(_parameter(source, a.arg, a.annotation, d, helps.get(a.arg, "")) for a, d in by_name)
    own = Signature(found, arguments.kwarg is not None, _first_line(doc))
    rest = arguments.kwarg.annotation if arguments.kwarg is not None else None
    return own if rest is None else _inherit(own, _group(interpret(rest, source.lookup)))


def _parameter(
    source: Source, name: str, annotation: ast.expr | None, default: ast.expr | None, text: str
) -> Parameter:
    kind = Any if annotation is None else interpret(annotation, source.lookup)
    written = "" if annotation is None else ast.unparse(annotation)
    return Parameter(name, written, kind, _default_text(source, default), default is None, text)


def _default_text(source: Source, node: ast.expr | None) -> str:
    if node is None:
        return ""
    try:
        return repr(ast.literal_eval(_Inline(source).visit(copy.deepcopy(node))))
    except ValueError:
        return ast.unparse(node)


class _Inline(ast.NodeTransformer):
    """Puts the constants of a module in place of their names."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return what the name stands for."""
        return self.source.constants.get(node.id, node)


def _dataclass_decorator(node: ast.ClassDef) -> ast.expr | None:
    return next((d for d in node.decorator_list if re.match(r"(dataclasses\.)?dataclass\b", ast.unparse(d))), None)


def _dataclass_fields(source: Source, node: ast.ClassDef) -> dict[str, Parameter]:
    fields: dict[str, Parameter] = {}
    for home, base in _bases(source, node):
        if _dataclass_decorator(base) is not None:
            fields.update(_dataclass_fields(home, base))
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        written, default = ast.unparse(statement.annotation), statement.value
        if written.startswith(("ClassVar", "typing.ClassVar")):
            continue
        if isinstance(default, ast.Call) and ast.unparse(default.func) in ("field", "dataclasses.field"):
            options = {k.arg: k.value for k in default.keywords}
            init = options.get("init")
            if isinstance(init, ast.Constant) and init.value is False:
                continue
            default = options.get("default", options.get("default_factory"))
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = " ".join(after.value.value.split())
        fields[statement.target.id] = _parameter(source, statement.target.id, statement.annotation, default, text)
    return fields


# ---- from a live object ----------------------------------------------------------------------------------------------


def read_runtime(target: Callable[..., Any]) -> Signature:
    """Read the signature of a class or function that is at hand."""
    doc = inspect.getdoc(target) or ""
    if not inspect.isclass(target):
        return _from_callable(target, doc)
    if "__dataclass_fields__" in vars(target):  # what its fields mean is written below them, in the source alone
        written = read_static(f"{target.__module__}:{target.__qualname__}")
        if written is not None:
            return written
    inits = [c for c in target.__mro__ if "__init__" in vars(c) and not is_foreign(c.__module__)]
    if not inits:
        return Signature(summary=_first_line(doc))
    signature: Signature | None = None
    for owner in reversed(inits):
        init = vars(owner)["__init__"]
        text = (inspect.getdoc(owner) or "") + "\n" + (inspect.getdoc(init) or "")
        signature = _inherit(_from_callable(init, text, skip_first=True), signature)
    assert signature is not None
    return Signature(signature.parameters, signature.open, _first_line(vars(target).get("__doc__") or ""))


def is_foreign(module: str) -> bool:
    """Tell whether a class comes from a library whose base classes take no parameters of the user's."""
    return module.partition(".")[0] in ("torch", "builtins", "abc", "typing", "collections") and not module.startswith(
        "torch.optim"
    )


def _from_callable(target: Callable[..., Any], doc: str, *, skip_first: bool = False) -> Signature:
    try:
        found: Sequence[inspect.Parameter] = list(inspect.signature(target).parameters.values())[skip_first:]
    except (TypeError, ValueError):  # some builtins do not tell
        return Signature(open=True, summary=_first_line(doc))
    helps = _helps(doc)
    space = getattr(inspect.unwrap(target), "__globals__", {})

    def lookup(name: str) -> Any:
        head, *rest = name.split(".")
        value = space.get(head)
        for part in rest:
            value = getattr(value, part, None)
        return value

    parameters = []
    for parameter in found:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation, empty = parameter.annotation, parameter.empty
        required = parameter.default is empty
        text = "" if annotation is empty else annotation
        parameters.append(
            Parameter(
                name=parameter.name,
                type=text if isinstance(text, str) else _type_text(text),
                annotation=Any if annotation is empty else understood(annotation, lookup),
                default="" if required else _value_text(parameter.default),
                required=required,
                help=helps.get(parameter.name, ""),
            )
        )
    rest = next((p.annotation for p in found if p.kind is p.VAR_KEYWORD), None)
    own = Signature(tuple(parameters), rest is not None, _first_line(doc))
    return own if rest in (None, inspect.Parameter.empty) else _inherit(own, _group(understood(rest, lookup)))


def _type_text(annotation: Any) -> str:
    plain = isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias)
    return annotation.__name__ if plain else str(annotation).replace("typing.", "")


def _value_text(value: Any) -> str:
    return value.__name__ if inspect.isclass(value) or inspect.isfunction(value) else repr(value)


# ---- docstrings ------------------------------------------------------------------------------------------------------


def _first_line(doc: str) -> str:
    return doc.strip().partition("\n")[0].strip()


def _helps(doc: str) -> dict[str, str]:
    """Read the `Args:` section of a docstring."""
    found: dict[str, str] = {}
    name, inside, base = "", False, 0
    for line in doc.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.strip() in ("Args:", "Arguments:", "Parameters:"):
            inside, base, name = True, 0, ""
        elif inside and line.strip():
            base = base or indent
            entry = re.match(r"(\w+)(?: \(.*?\))?:\s+(.*)", line.strip()) if indent == base else None
            if indent < base or indent == 0:
                inside = False
            elif entry is not None:
                name = entry[1]
                found[name] = entry[2].strip()
            elif name:
                found[name] += " " + line.strip()
    return found
