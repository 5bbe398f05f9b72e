"""A graph of modules and operations as one `nn.Module`.

The nodes are put in a plan when the model is built: every value, constants included, has a slot of a list, and a step
names the slots it reads and the one it fills. A call copies the list and goes through the steps; there is nothing to
look up by name but the module, which may be replaced at any time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from etude.errors import ConfigError
from etude.policies.graph.objects import check_call, literal, placed
from etude.policies.graph.operations import OPERATIONS
from etude.policies.graph.schema import Input, ParsedGraph, ParsedNode
from etude.policies.graph.tree import Item
from etude.reading.suggest import did_you_mean


class Step(NamedTuple):
    """One call of the plan."""

    label: str
    """The node, file and line, for errors."""
    module: str
    """Name of the module to call; empty for a function."""
    function: Callable[..., Any] | None
    takes: tuple[int, ...]
    """Slots of the arguments."""
    keyed: tuple[tuple[str, int], ...]
    """Slots of the arguments by name."""
    puts: int
    spread: tuple[tuple[Any, int], ...]
    """Keys of the result and the slots they go to, for several results."""
    done: tuple[int, ...]
    """Slots that nothing reads any more."""


@dataclass
class Plan:
    """How a graph is run."""

    inputs: list[Input]
    start: list[Any]
    steps: list[Step]
    slots: dict[str, int]
    outputs: dict[str, int]
    returns: str
    nodes: list[ParsedNode]


class GraphModel(nn.Module):
    """Run a plan over modules.

    Args:
        modules: The modules by name.
        plan: What to call, in order.
    """

    def __init__(self, modules: dict[str, nn.Module], plan: Plan) -> None:
        super().__init__()
        self.graph_modules = nn.ModuleDict(modules)
        self.plan = plan
        self.shapes: dict[str, str] = {}
        """Shapes of the values by name, where they could be tried."""
        self._steps, self._start, self._count = plan.steps, plan.start, len(plan.inputs)
        self._least = max((i + 1 for i, one in enumerate(plan.inputs) if not one.optional), default=0)
        self._returns, self._outputs = plan.returns, plan.outputs
        self._single = next(iter(plan.outputs.values()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs for the inputs, given in order or by name."""
        values = self._start.copy()
        if kwargs or not self._least <= len(args) <= self._count:
            self._bind(values, args, kwargs)
        else:
            values[: len(args)] = args
        if torch.compiler.is_compiling():
            self.run(values)
        else:
            try:
                self.run(values)
            except Exception as error:  # whatever a module raises keeps its type, and gains its node
                label = _label(error.__traceback__)
                if label:
                    placed(error, label, briefly=False)
                raise
        if self._returns == "single":
            return values[self._single]
        if self._returns == "tuple":
            return tuple([values[slot] for slot in self._outputs.values()])
        return {key: values[slot] for key, slot in self._outputs.items()}

    def run(self, values: list[Any]) -> None:
        """Go through the steps; what is read for the last time is let go of."""
        modules = self._modules["graph_modules"]._modules  # type: ignore[union-attr]
        # Calls of one and two arguments are spelt out: a list of them would cost 0.2 us a step more.
        for label, module, function, takes, keyed, puts, spread, done in self._steps:  # noqa: B007 - read on errors
            call: Any = function or modules[module]
            count = len(takes)
            if keyed:
                values[puts] = call(*[values[i] for i in takes], **{key: values[i] for key, i in keyed})
            elif count == 1:
                values[puts] = call(values[takes[0]])
            elif count == 2:
                values[puts] = call(values[takes[0]], values[takes[1]])
            else:
                values[puts] = call(*[values[i] for i in takes])
            if spread:
                _spread(values, puts, spread)
            for i in done:
                values[i] = None

    def _bind(self, values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = self.plan.inputs
        if len(args) > len(inputs):
            raise TypeError(
                f"the model takes {len(inputs)} inputs, {', '.join(i.name for i in inputs)}; got {len(args)}"
            )
        names = [one.name for one in inputs]
        for key in kwargs:
            if key not in names:
                raise TypeError(f"the model has no input {key!r}{did_you_mean(key, names)}")
        for index, one in enumerate(inputs):
            if index < len(args):
                if one.name in kwargs:
                    raise TypeError(f"the input {one.name!r} is given twice")
                values[index] = args[index]
            elif one.name in kwargs:
                values[index] = kwargs[one.name]
            elif one.optional:
                values[index] = one.default
            else:
                raise TypeError(f"the input {one.name!r} is missing")


def _spread(values: list[Any], puts: int, spread: tuple[tuple[Any, int], ...]) -> None:
    result, values[puts] = values[puts], None
    if isinstance(spread[0][0], int) and (not isinstance(result, tuple | list) or len(result) != len(spread)):
        count = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
        raise ValueError(f"gives {count}, and out names {len(spread)}")
    for key, slot in spread:
        values[slot] = result[key]


_RUN = GraphModel.run.__code__


def _label(trace: TracebackType | None) -> str:
    """Return the step that was running in the outermost run of a plan."""
    while trace is not None:
        if trace.tb_frame.f_code is _RUN:
            return str(trace.tb_frame.f_locals.get("label", ""))
        trace = trace.tb_next
    return ""


# ---- from nodes to steps ---------------------------------------------------------------------------------------------


def make_list(*items: Any) -> list[Any]:
    """Return values as a list."""
    return [*items]


def make_dict(keys: tuple[str, ...], *items: Any) -> dict[str, Any]:
    """Return values as a dictionary."""
    return dict(zip(keys, items, strict=True))


class _Planner:
    def __init__(self, graph: ParsedGraph, modules: dict[str, nn.Module], *, strict: bool) -> None:
        self.graph, self.modules, self.strict = graph, modules, strict
        self.start: list[Any] = [one.default for one in graph.inputs]
        self.slots = {one.name: index for index, one in enumerate(graph.inputs)}
        self.steps: list[Step] = []

    def plan(self) -> Plan:
        graph = self.graph
        for node in graph.nodes:
            self._node(node)
        outputs = {key: self.slots[name] for key, name in graph.outputs.items()}
        steps = _free(self.steps, set(outputs.values()), self._passing())
        return Plan(graph.inputs, self.start, steps, self.slots, outputs, graph.returns, graph.nodes)

    def _passing(self) -> set[int]:
        """Slots that hold something only while the model runs: not constants."""
        made = {step.puts for step in self.steps} | {slot for step in self.steps for _, slot in step.spread}
        return made | set(range(len(self.graph.inputs)))

    def _slot(self, value: Any = None) -> int:
        self.start.append(value)
        return len(self.start) - 1

    def _node(self, node: ParsedNode) -> None:
        label = f"{node.place}: node {node.name!r} ({node.kind}:{node.target})"
        takes = tuple(self._argument(item, label) for item in node.args)
        keyed = tuple((key, self._argument(item, label)) for key, item in node.kwargs.items())
        function = None if node.kind == "module" else _operation(node)
        if self.strict:
            called: Any = function or self.modules[node.target].forward
            places = {key: item.place for key, item in node.kwargs.items()}
            check_call(called, list(takes), dict(keyed), node.place, places, f"node {node.name!r}")
        if function is not None:
            takes, keyed = _in_order(function, takes, keyed)
        puts, spread = self._results(node)
        self.steps.append(
            Step(label, node.target if function is None else "", function, takes, keyed, puts, spread, ())
        )

    def _results(self, node: ParsedNode) -> tuple[int, tuple[tuple[Any, int], ...]]:
        puts = self._slot()
        if isinstance(node.out, str):
            self.slots[node.out] = puts
            return puts, ()
        pairs = node.out.items() if isinstance(node.out, dict) else enumerate(node.out)
        spread: list[tuple[Any, int]] = []
        for key, name in pairs:
            self.slots[name] = self._slot()
            spread.append((key, self.slots[name]))
        return puts, tuple(spread)

    def _argument(self, item: Item, label: str) -> int:
        """Return the slot of an argument; lists and mappings with references inside are put together by steps."""
        value = item.value
        if isinstance(value, str) and value.startswith("$") and not value.startswith("$$"):
            return self._reference(value[1:], item)
        if not _refers(item):
            return self._slot(_constant(item))
        function: Callable[..., Any]
        if isinstance(value, dict):
            function, inner = (
                make_dict,
                [self._slot(tuple(value)), *(self._argument(one, label) for one in value.values())],
            )
        else:
            function, inner = make_list, [self._argument(one, label) for one in value]
        puts = self._slot()
        self.steps.append(Step(label, "", function, tuple(inner), (), puts, (), ()))
        return puts

    def _reference(self, name: str, item: Item) -> int:
        if name in self.slots:
            return self.slots[name]
        if name in self.graph.known:
            raise item.place.error(
                f"${name} is made by this node or a later one; nodes run in the order they are listed"
            )
        near = (
            did_you_mean(name, self.slots) or f"; known: {', '.join(self.slots)}; text that begins with $ is written $$"
        )
        raise item.place.error(f"there is no value ${name[:80]}{near}")


def _operation(node: ParsedNode) -> Callable[..., Any]:
    if node.target not in OPERATIONS:
        near = did_you_mean(node.target, OPERATIONS) or f"; known: {', '.join(OPERATIONS)}"
        raise ConfigError(f"{node.place}: there is no operation {node.target[:80]!r}{near}")
    return OPERATIONS[node.target]


def _in_order(
    function: Callable[..., Any], takes: tuple[int, ...], keyed: tuple[tuple[str, int], ...]
) -> tuple[tuple[int, ...], tuple[tuple[str, int], ...]]:
    """Pass what is given by name by position, as far as the parameters follow on each other: that is faster."""
    names = [
        name for name, one in inspect.signature(function).parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    left = dict(keyed)
    while len(takes) < len(names) and names[len(takes)] in left:
        takes = (*takes, left.pop(names[len(takes)]))
    return takes, tuple(left.items())


def _refers(item: Item) -> bool:
    if isinstance(item.value, dict | list):
        inner = item.value.values() if isinstance(item.value, dict) else item.value
        return any(_refers(one) for one in inner)
    return isinstance(item.value, str) and item.value.startswith("$") and not item.value.startswith("$$")


def _constant(item: Item) -> Any:
    if isinstance(item.value, dict):
        return {key: _constant(one) for key, one in item.value.items()}
    if isinstance(item.value, list):
        return [_constant(one) for one in item.value]
    value = literal(item.value)
    return value[1:] if isinstance(value, str) and value.startswith("$$") else value


def _free(steps: list[Step], kept: set[int], passing: set[int]) -> list[Step]:
    """Let every step forget what no later one reads."""
    freed: list[Step] = []
    later = set(kept)
    for step in reversed(steps):
        read = {*step.takes, *(slot for _, slot in step.keyed)}
        made = {slot for _, slot in step.spread} if step.spread else {step.puts}
        freed.append(step._replace(done=tuple(sorted(((read | made) & passing) - later))))
        later |= read
    return freed[::-1]


def make_plan(graph: ParsedGraph, modules: dict[str, nn.Module], *, strict: bool = True) -> Plan:
    """Return the plan of a graph over its modules."""
    return _Planner(graph, modules, strict=strict).plan()
