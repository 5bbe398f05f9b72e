"""What a model's file may say, as plain data: inputs, modules, nodes and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from etude.policies.graph.tree import Item, WrittenAt, kind
from etude.reading.suggest import did_you_mean

TOP = ("schema_version", "settings", "defaults", "imports", "templates", "model")
RETURNS = ("single", "tuple", "dict")
_SETTINGS = ("strict", "allow_imports", "allowed_import_prefixes", "allow_target")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class GraphSettings:
    """What a file allows itself; it can take back what the caller allows, never add to it."""

    strict: bool = True
    allow_imports: bool = True
    allowed_import_prefixes: tuple[str, ...] | None = None
    allow_target: bool = True


@dataclass(frozen=True)
class Input:
    """An input of the model."""

    name: str
    shape: tuple[int | str, ...] | None = None
    """Sizes, or names of sizes that may be any; None where it is not declared."""
    dtype: str = "float32"
    optional: bool = False
    default: Any = None


@dataclass(frozen=True)
class ParsedNode:
    """One call: of a module or an operation."""

    name: str
    kind: str
    """`module` or `op`."""
    target: str
    args: list[Item]
    kwargs: dict[str, Item]
    out: str | list[str] | dict[str, str]
    place: WrittenAt

    @property
    def results(self) -> list[str]:
        """The values it makes."""
        return (
            [self.out]
            if isinstance(self.out, str)
            else list(self.out if isinstance(self.out, list) else self.out.values())
        )


@dataclass
class ParsedGraph:
    """A model before anything is made."""

    inputs: list[Input]
    modules: dict[str, Item]
    nodes: list[ParsedNode]
    outputs: dict[str, str]
    """Values by the key they are returned under."""
    returns: str
    place: WrittenAt
    known: set[str] = field(default_factory=set)


def check_top(root: Item) -> GraphSettings:
    """Check the keys beside `model`."""
    items = root.mapping("a model's file")
    version = items.get("schema_version")
    if version is None:
        near = next((key for key in items if did_you_mean(key, ("schema_version",))), None)
        place = root.place if near is None else items[near].place
        raise place.error("schema_version is missing; write schema_version: 1")
    if version.value != 1 or isinstance(version.value, bool | float):
        raise version.place.error(f"schema_version {kind(version.value)} is not known; this reads version 1")
    if "model" not in items:
        near = next((key for key in items if key not in TOP and did_you_mean(key, ("model",))), None)
        raise (items[near] if near else root).place.error("model is missing; it holds sequential or graph")
    return _settings(items["settings"]) if "settings" in items else GraphSettings()


def _settings(item: Item) -> GraphSettings:
    keys = item.only(_SETTINGS)
    given: dict[str, Any] = {
        key: keys[key].flag(key) for key in ("strict", "allow_imports", "allow_target") if key in keys
    }
    if "allowed_import_prefixes" in keys:
        listed = keys["allowed_import_prefixes"].listed("allowed_import_prefixes")
        given["allowed_import_prefixes"] = tuple(one.text("a prefix") for one in listed)
    return GraphSettings(**given)


def refuse_strays(root: Item, named: set[str]) -> None:
    """Refuse a key at the top that nothing refers to and that looks like one of ours."""
    for key, item in root.value.items():
        near = did_you_mean(key, TOP)
        if key not in TOP and key not in named and near:
            raise item.place.error(f"unknown key{near} A parameter of the file's own needs a ${{{key}}} that uses it")


def parse(model: Item) -> ParsedGraph:
    """Return the graph that the key `model` describes."""
    keys = model.only(("sequential", "graph"))
    if len(keys) != 1:
        raise model.place.error("write either sequential or graph below model")
    ((form, item),) = keys.items()
    return _sequential(item) if form == "sequential" else _graph(item)


def _sequential(item: Item) -> ParsedGraph:
    keys = item.only(("inputs", "layers", "outputs", "return"))
    inputs = _inputs(_required(item, keys, "inputs"))
    if len(inputs) != 1:
        raise keys["inputs"].place.error(f"a sequential model has one input, not {len(inputs)}")
    layers = _required(item, keys, "layers").listed("layers")
    if not layers:
        raise keys["layers"].place.error("layers must not be empty")
    graph = ParsedGraph(inputs, {}, [], {}, "single", item.place, {one.name for one in inputs})
    last = inputs[0].name
    for index, layer in enumerate(layers):
        graph.modules[f"layer{index}"] = layer
        result = f"h{index}"
        args = [Item(f"${last}", layer.place)]
        node = ParsedNode(f"layer{index}", "module", f"layer{index}", args, {}, result, layer.place)
        _add(graph, node)
        last = result
    _outputs(graph, keys, last)
    return graph


def _graph(item: Item) -> ParsedGraph:
    keys = item.only(("inputs", "modules", "nodes", "order", "steps", "outputs", "return"))
    inputs = _inputs(_required(item, keys, "inputs"))
    graph = ParsedGraph(inputs, {}, [], {}, "single", item.place, {one.name for one in inputs})
    for name, spec in keys["modules"].mapping("modules").items() if "modules" in keys else ():
        graph.modules[Item(name, spec.place).name("the module")] = spec
    if ("nodes" in keys) == ("steps" in keys):
        raise item.place.error("write either nodes or steps")
    for name, one in _listed_nodes(item, keys):
        _add(graph, _node(graph, name, one))
    _required(item, keys, "outputs")
    _outputs(graph, keys, "")
    return graph


def _required(item: Item, keys: dict[str, Item], key: str) -> Item:
    if key not in keys:
        raise item.place.error(f"{key} is missing")
    return keys[key]


def _listed_nodes(item: Item, keys: dict[str, Item]) -> list[tuple[str, Item]]:
    if "steps" in keys or isinstance(keys["nodes"].value, list):
        if "order" in keys:
            raise keys["order"].place.error("unknown key; a list of nodes is in order already")
        what = "steps" if "steps" in keys else "nodes"
        return [("", one) for one in keys[what].listed(what)]
    nodes = keys["nodes"].mapping("nodes")
    order = _required(item, keys, "order").listed("order")
    listed: dict[str, Item] = {}
    for one in order:
        name = one.text("a node in order")
        if name in listed:
            raise one.place.error(f"the node {name[:80]!r} is listed twice")
        if name not in nodes:
            raise one.place.error(f"there is no node {name[:80]!r}{did_you_mean(name, nodes)}")
        listed[name] = nodes[name]
    for name, one in nodes.items():
        if name not in listed:
            raise one.place.error(f"the node {name[:80]!r} is not in order")
    return list(listed.items())


def _node(graph: ParsedGraph, name: str, item: Item) -> ParsedNode:
    known = ("call", "args", "kwargs", "out") if name else ("name", "call", "args", "kwargs", "out")
    keys = item.only(known)
    out_item = keys.get("out")
    if name:
        name = Item(name, item.place).name("the node")
    elif "name" in keys:
        name = keys["name"].name("the node")
    elif out_item is None:
        raise item.place.error("a node needs a name, a step needs out")
    else:
        name = f"step{len(graph.nodes)}"
    call = _required(item, keys, "call")
    form, _, target = call.text("call").partition(":")
    if form not in ("module", "op") or not target:
        raise call.place.error(f"must be module:NAME or op:NAME, not {call.value[:80]!r}")
    if form == "module" and target not in graph.modules:
        near = did_you_mean(target, graph.modules) or f"; known: {', '.join(graph.modules) or 'none'}"
        raise call.place.error(f"there is no module {target[:80]!r}{near}")
    args = keys["args"].listed("args") if "args" in keys else []
    kwargs = keys["kwargs"].mapping("kwargs") if "kwargs" in keys else {}
    return ParsedNode(name, form, target, args, kwargs, _out(out_item, name), item.place)


def _out(item: Item | None, name: str) -> str | list[str] | dict[str, str]:
    if item is None:
        return name
    if isinstance(item.value, dict) and item.value:
        return {key: one.name("the value") for key, one in item.value.items()}
    if isinstance(item.value, list) and item.value:
        return [one.name("the value") for one in item.value]
    return item.name("the value")


def _add(graph: ParsedGraph, node: ParsedNode) -> None:
    if any(node.name == other.name for other in graph.nodes):
        raise node.place.error(f"there are two nodes called {node.name!r}")
    for result in node.results:
        if result in graph.known:
            raise node.place.error(f"the value {result!r} exists already; give the result another name with out")
        graph.known.add(result)
    graph.nodes.append(node)


def _inputs(item: Item) -> list[Input]:
    if isinstance(item.value, dict):
        pairs = [(Item(name, one.place), one) for name, one in item.value.items()]
    else:
        pairs = [_named_input(one) for one in item.listed("inputs")]
    found = [_input(name.name("the input"), one) for name, one in pairs]
    names = [one.name for one in found]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise pairs[index][0].place.error(f"there are two inputs called {name!r}")
    if not found:
        raise item.place.error("a model needs an input")
    return found


def _named_input(item: Item) -> tuple[Item, Item]:
    if not isinstance(item.value, dict):
        return item, Item(None, item.place)
    if "name" not in item.value:
        raise item.place.error("an input needs a name")
    return item.value["name"], Item({key: one for key, one in item.value.items() if key != "name"}, item.place)


def _input(name: str, item: Item) -> Input:
    if item.value is None:
        return Input(name)
    if isinstance(item.value, list):
        return Input(name, _shape(item))
    keys = item.only(("shape", "dtype", "optional", "default"))
    dtype = keys["dtype"].text("dtype").removeprefix("torch.") if "dtype" in keys else "float32"
    if dtype not in _DTYPES:
        raise keys["dtype"].place.error(f"unknown dtype {dtype[:80]!r}{did_you_mean(dtype, _DTYPES)}")
    optional = keys["optional"].flag("optional") if "optional" in keys else "default" in keys
    if "default" in keys and not optional:
        raise keys["default"].place.error("an input with a default is optional")
    default = keys["default"].plain() if "default" in keys else None
    return Input(name, _shape(keys["shape"]) if "shape" in keys else None, dtype, optional, default)


def _shape(item: Item) -> tuple[int | str, ...]:
    sizes: list[int | str] = []
    for one in item.listed("a shape"):
        if isinstance(one.value, int) and not isinstance(one.value, bool) and 0 <= one.value < 1 << 40:
            sizes.append(one.value)
        elif isinstance(one.value, str):
            sizes.append(one.name("a size"))
        else:
            raise one.place.error(f"a size is a whole number, or a name such as B for any, not {kind(one.value)}")
    return tuple(sizes)


def _outputs(graph: ParsedGraph, keys: dict[str, Item], last: str) -> None:
    item = keys.get("outputs")
    inferred = "single"
    if item is None:
        graph.outputs = {last: last}
    elif isinstance(item.value, dict):
        graph.outputs, inferred = {key: _output(graph, one) for key, one in item.value.items()}, "dict"
    else:
        listed = item.value if isinstance(item.value, list) else [item]
        names = [_output(graph, one) for one in listed]
        graph.outputs = dict(zip(map(str, range(len(names))), names, strict=True))
        inferred = "single" if len(names) == 1 else "tuple"
    if not graph.outputs:
        raise keys["outputs"].place.error("a model needs an output")
    graph.returns = keys["return"].text("return") if "return" in keys else inferred
    if graph.returns not in RETURNS:
        raise keys["return"].place.error(f"must be single, tuple or dict{did_you_mean(graph.returns, RETURNS)}")
    if graph.returns == "single" and len(graph.outputs) != 1:
        raise keys["return"].place.error(
            f"a single value is returned where there is one output, not {len(graph.outputs)}"
        )
    if graph.returns == "dict" and inferred != "dict":
        values = list(graph.outputs.values())
        graph.outputs = {value: value for value in values}


def _output(graph: ParsedGraph, item: Item) -> str:
    name = item.text("an output").removeprefix("$")
    if name not in graph.known:
        raise item.place.error(f"there is no value {name[:80]!r}{did_you_mean(name, graph.known)}")
    return name
