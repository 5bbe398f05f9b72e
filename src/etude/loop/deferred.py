"""Policies that are built without their large tensors, which are then made one by one, each to the bits it would have.

Under a `Deferral`, a tensor beyond a few kilobytes is made on the meta device, where it has a shape and no memory, and
what is done to it is written down. What draws random numbers is carried out at once on memory that is let go again, so
that everything drawn later is as it would be, and the state of the generator is noted with it. Each tensor can then be
made from its own notes: at most a few tensors of its size are alive at a time, whatever the size of the policy.
"""

from __future__ import annotations

import gc
import heapq
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

SMALL_BYTES = 4096
"""Tensors up to this size are made as always."""
_FILLS = frozenset(
    {"uniform_", "normal_", "log_normal_", "exponential_", "cauchy_", "geometric_", "random_", "zero_", "fill_"}
)
"""What overwrites every element, whatever was there."""
_DRAWS = frozenset({"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"})
"""What makes random tensors, looking at no value."""
_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_VALUES = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
_REFUSED = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})


class CannotDefer(Exception):
    """A policy does what cannot be done without its weights; the text says what."""


@dataclass(frozen=True)
class Ref:
    """A tensor as a window on memory that is numbered."""

    memory: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class Note:
    """One operation: what it reads and writes, and where the generator stood."""

    func: Any
    args: Any
    kwargs: Any
    outs: list[Ref | None]
    reads: set[int]
    writes: set[int]
    overwrites: set[int] = field(default_factory=set)
    state: Tensor | None = None
    constants: dict[int, Tensor] = field(default_factory=dict)


class Deferral(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which large tensors are not made but noted; `make` makes one."""

    def __init__(self, small_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._small_bytes = SMALL_BYTES if small_bytes is None else small_bytes
        self._notes: list[Note] = []
        self._writers: dict[int, list[int]] = {}
        self._numbers: dict[int, int] = {}
        """By the address of a meta tensor's memory its number; addresses come again, numbers do not."""
        self._made: list[weakref.ref[Tensor]] = []
        self._count = 0
        self._making = False

    # -- noting -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Deferral:
        self._facade = _Facade(self)
        self._facade.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._facade.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # we look behind the facade
            return func(*args, **(kwargs or {})) if self._making else self._carry_out(func, args, kwargs or {})

    def _carry_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            return self._from_real(func, args, kwargs) if not tensors else func(*args, **kwargs)
        schema = func._schema
        if func.__name__.split(".")[0] in _REFUSED:
            raise CannotDefer(f"{func} changes where weights lie")
        changed = _changed(schema, args, kwargs)
        gives = any("Tensor" in str(returned.type) for returned in schema.returns)
        if any(not tensor.is_meta for tensor in changed) or not (gives or changed):
            # A value is asked for, or goes into a tensor that is there: then it is needed now.
            return func(*self._real(args), **self._real(kwargs))
        return self._note(func, args, kwargs, changed)

    def _from_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a tensor out of nothing: really, if it is small or lies elsewhere."""
        device = kwargs.get("device")
        if "device" not in {argument.name for argument in func._schema.arguments} or (
            device is not None and torch.device(device).type != "cpu"
        ):
            return func(*args, **kwargs)
        shape = func(*args, **_on_meta(func, kwargs))
        if not isinstance(shape, Tensor) or shape.nbytes <= self._small_bytes:
            return func(*args, **kwargs)
        return self._note(func, args, kwargs, [])

    def _note(self, func: Any, args: Any, kwargs: Any, changed: list[Tensor]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        constants: dict[int, Tensor] = {}
        twins = tree_map(lambda value: self._twin(value, constants), (args, kwargs))
        inputs = [value for value in tree_flatten(twins)[0] if isinstance(value, Tensor)]
        addresses = {_address(tensor) for tensor in inputs}
        refs = tree_map(self._ref, twins)
        found = func(*twins[0], **_on_meta(func, twins[1]))
        outs = [value for value in tree_flatten(found)[0] if isinstance(value, Tensor)]
        fresh = [out for out in outs if _address(out) not in addresses]
        if not fresh and not changed:
            return found  # another window on the same memory
        for out in fresh:
            self._number(out)
        self._made += [weakref.ref(out) for out in outs]
        written = {self._ref(tensor).memory for tensor in [*changed, *fresh]}
        note = Note(
            func, refs[0], refs[1], [self._ref(out) if _address(out) not in addresses else None for out in outs],
            {self._ref(tensor).memory for tensor in inputs}, written, constants=constants,
        )  # fmt: skip
        covers = [t for t in changed if t.numel() * t.dtype.itemsize == t.untyped_storage().nbytes()]
        if name in _FILLS or (name == "copy_" and self._ref(inputs[0]).memory != self._ref(inputs[1]).memory):
            note.overwrites = {self._ref(tensor).memory for tensor in covers}
            note.reads -= note.overwrites
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(name, note, inputs)
        index = len(self._notes)
        self._notes.append(note)
        for memory in written:
            self._writers.setdefault(memory, []).append(index)
        return found

    def _draw(self, name: str, note: Note, inputs: list[Tensor]) -> None:
        """Note where the generator stands, and let it go on as if the numbers had been kept."""
        if name not in _FILLS | _DRAWS:
            raise CannotDefer(f"{note.func} draws numbers that depend on weights")
        note.state = _generator(note.kwargs).get_state()
        scratch = {ref.memory: _empty(ref) for ref in map(self._ref, inputs)}
        note.func(*tree_map(lambda v: _window(v, scratch), note.args), **_on_cpu(note.kwargs, scratch))

    def _twin(self, value: Any, constants: dict[int, Tensor]) -> Any:
        """Return a meta tensor in place of a real one, whose values are kept."""
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        constants[self._number(twin)] = value.detach().clone(memory_format=torch.preserve_format)
        return twin

    def _number(self, tensor: Tensor) -> int:
        self._count += 1
        self._numbers[_address(tensor)] = self._count
        return self._count

    def _ref(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if _address(value) not in self._numbers:
            raise CannotDefer("it has tensors on the meta device of its own")
        number = self._numbers[_address(value)]
        return Ref(number, value.shape, value.stride(), int(value.storage_offset()), value.dtype)

    # -- making -------------------------------------------------------------------------------------------------

    def ref(self, tensor: Tensor) -> Ref:
        """Return what a noted tensor is made from, for when the tensor itself is gone."""
        found: Ref = self._ref(tensor)
        return found

    def survivors(self) -> Iterator[Tensor]:
        """Yield the noted tensors that somebody still holds."""
        gc.collect()  # what only a circle holds is held by nobody
        yield from (tensor for reference in self._made if (tensor := reference()) is not None)

    @torch.no_grad()
    def make(self, ref: Ref) -> Tensor:
        """Return the real tensor, with every bit that it would have had; nothing else stays alive."""
        before, self._making = self._making, True
        try:
            return self._make(ref)
        finally:
            self._making = before

    def _make(self, ref: Ref) -> Tensor:
        order = self._needed(ref.memory)
        last = {m: index for index in order for m in self._notes[index].reads | self._notes[index].writes}
        memory: dict[int, Tensor] = {}
        for index in order:
            note = self._notes[index]
            memory |= note.constants
            self._repeat(note, memory)
            for number in [m for m in memory if last.get(m, -1) <= index and m != ref.memory]:
                del memory[number]
        found: Tensor = _window(ref, memory)
        return found

    def _needed(self, memory: int) -> list[int]:
        """Return the notes that some memory depends on, in their order."""
        chosen: set[int] = set()
        todo = [(-len(self._notes), memory)]
        done: set[tuple[int, int]] = set()
        while todo:
            before, number = heapq.heappop(todo)
            for index in reversed([i for i in self._writers.get(number, ()) if i < -before]):
                if (index, number) in done:
                    break
                done.add((index, number))
                chosen.add(index)
                note = self._notes[index]
                for other in note.reads - {number}:
                    heapq.heappush(todo, (-index, other))
                if number in note.overwrites or number not in note.reads:
                    break
        return sorted(chosen)

    def _repeat(self, note: Note, memory: dict[int, Tensor]) -> None:
        for value in tree_flatten((note.args, note.kwargs))[0]:
            if isinstance(value, Ref) and value.memory in note.overwrites and value.memory not in memory:
                memory[value.memory] = _empty(value)
        generator = _generator(note.kwargs)
        held = generator.get_state() if note.state is not None else None
        if note.state is not None:
            generator.set_state(note.state)
        try:
            found = note.func(*tree_map(lambda v: _window(v, memory), note.args), **_on_cpu(note.kwargs, memory))
        finally:
            if held is not None:
                generator.set_state(held)
        outs = [value for value in tree_flatten(found)[0] if isinstance(value, Tensor)]
        for ref, out in zip(note.outs, outs, strict=True):
            if ref is not None:
                memory[ref.memory] = out if out.stride() == ref.stride else _empty(ref).copy_(out)

    def _real(self, tree: Any) -> Any:
        return tree_map(lambda v: self.make(self._ref(v)) if isinstance(v, Tensor) and v.is_meta else v, tree)


class _Facade(TorchFunctionMode):
    """Lets code that builds a policy see what it would see: tensors on the CPU, with values if it asks for them.

    Some initialisers of torch do nothing to a tensor that says it is on the meta device.
    """

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()
        self._deferral = deferral

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:  # made anew at each look, so equal and not the same
            return False
        if func == _DEVICE:
            device = func(*args)
            return torch.device("cpu") if device.type == "meta" else device
        if func in _VALUES:
            with torch._C.DisableTorchFunction():
                args = self._deferral._real(args)
        return func(*args, **(kwargs or {}))


def finish(module: nn.Module, deferral: Deferral) -> dict[str, Ref]:
    """Make what is no parameter, and return by name the parameters that are still to be made.

    Raises CannotDefer where something would be left without values, or would no longer share them.
    """
    waiting = {name: p for name, p in module.named_parameters() if p.is_meta}
    owners = [deferral.ref(parameter).memory for parameter in waiting.values()]
    if len(set(owners)) < len(owners):
        raise CannotDefer("two of its parameters share memory")
    for part in module.modules():
        for kept in (part._buffers, vars(part)):
            for name, value in list(kept.items()):
                if isinstance(value, Tensor) and value.is_meta and not isinstance(value, nn.Parameter):
                    if deferral.ref(value).memory in owners:
                        raise CannotDefer(f"its attribute {name!r} is a window on a parameter")
                    kept[name] = deferral.make(deferral.ref(value)).requires_grad_(value.requires_grad)
    if any(deferral.ref(tensor).memory not in owners for tensor in deferral.survivors()):
        raise CannotDefer("it keeps tensors where neither parameters nor buffers are looked for")
    return {name: deferral.ref(parameter) for name, parameter in waiting.items()}


def _changed(schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    found = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in tree_flatten(value)[0] if isinstance(tensor, Tensor)]
    return found


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _empty(ref: Ref) -> Tensor:
    return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)


def _window(value: Any, memory: dict[int, Tensor]) -> Any:
    if not isinstance(value, Ref):
        return value
    storage = memory[value.memory].untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.offset, value.size, value.stride)


def _on_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    bare = {key: None if key in ("generator", "pin_memory") else value for key, value in kwargs.items()}
    takes = "device" in {argument.name for argument in func._schema.arguments}
    return {**bare, "device": torch.device("meta")} if takes else bare


def _on_cpu(kwargs: dict[str, Any], memory: dict[int, Tensor]) -> dict[str, Any]:
    found = {key: _window(value, memory) for key, value in kwargs.items()}
    return {**found, "device": torch.device("cpu")} if "device" in found else found


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator


def nbytes(ref: Ref) -> int:
    """Return how large a tensor is once it is made."""
    return math.prod(ref.size) * ref.dtype.itemsize
