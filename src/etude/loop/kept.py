"""What an object that knows nothing of Etude keeps between steps, as plain values and tensors, and back again.

A trainer made from (models, optimizers, loss, device) counts, averages and schedules in attributes of its own, and an
optimizer may own its schedule. All of it is found by looking, so that nobody has to write `state_dict`.
"""

from __future__ import annotations

import enum
import inspect
import logging
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from etude.loop.sharding import full_tensor, piece_of, shard_like
from etude.runs.shards import Piece
from etude.runs.tree import join_tensors, split_tensors

log = logging.getLogger("etude")
MOST_OF_ONE_RANK = 1 << 14
"""Numbers in a tensor that each rank keeps of its own; a generator's state has 5,056."""
_LEFT_OUT = object()
_STATELESS = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, enum.Enum, Path,
    torch.device, torch.dtype, torch.Size, inspect.Signature,
)  # fmt: skip
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_OPTIMIZER_INTERNALS = frozenset(vars(torch.optim.AdamW([torch.zeros(1)], fused=True))) | {"step", "_opt_called"}


class Kept:
    """The state of one object; `known` are modules, tensors and optimizers that someone else saves.

    A plain value that is built differently now than when it was saved comes from a configuration that has changed
    since, and keeps its new value.
    """

    def __init__(self, target: Any, known: Iterable[Any] = ()) -> None:
        self.target = target
        self.left_out: list[str] = []
        """Attributes that hold something that cannot be saved."""
        self._known = {id(item) for item in known}
        self._held = list(known)  # an id means something only as long as its object lives
        self._own = _has_state(target) and not isinstance(target, nn.Module | Optimizer)
        self._built = _plain_part(self.state())

    def state(self) -> dict[str, Any]:
        """Return the state as it is now."""
        if self._own:
            return {"state": _saveable(self.target.state_dict())}
        self.left_out = []
        found = {name: self._keep(value, name) for name, value in _attributes(self.target).items()}
        return {name: value for name, value in found.items() if value is not _LEFT_OUT}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, and what of it was there from the start."""
        return {"now": self.state(), "built": self._built}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        now, then, here = saved["now"], saved["built"], self._built
        if self._own:
            self.target.load_state_dict(_merged(now["state"], then.get("state"), here.get("state")))
            return
        held = _attributes(self.target)
        for name, value in now.items():
            merged = _merged(value, then.get(name), here.get(name))
            replaced = self._restore(held.get(name), merged)
            if replaced is not _LEFT_OUT:
                setattr(self.target, name, replaced)

    # -- one value ----------------------------------------------------------------------------------------------

    def _keep(self, value: Any, name: str) -> Any:
        if id(value) in self._known or isinstance(value, _STATELESS):
            return _LEFT_OUT
        if value is None or isinstance(value, bool | int | float | str | np.number | np.bool_):
            return value
        if isinstance(value, Tensor):
            # A large one stays where it is: each rank saves its piece.
            return (piece_of if value.numel() > MOST_OF_ONE_RANK else full_tensor)(value.detach())
        if isinstance(value, nn.Module):
            return {"module": self._module_state(value)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"array": torch.from_numpy(value.copy())}
        if isinstance(value, torch.Generator):
            return {"generator": value.get_state()}
        if isinstance(value, np.random.Generator):
            return {"numpy": _saveable(value.bit_generator.state)}
        if isinstance(value, random.Random):
            return {"random": value.getstate()}
        if _has_state(value):
            return {"state": _saveable(value.state_dict())}
        if isinstance(value, Mapping):
            found = {key: self._keep(item, f"{name}.{key}") for key, item in value.items()}
            return {"items": {key: item for key, item in found.items() if item is not _LEFT_OUT}}
        if isinstance(value, list | tuple | deque):
            items = [self._keep(item, f"{name}.{index}") for index, item in enumerate(value)]
            return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else {"list": items}
        if not callable(value):
            self.left_out.append(f"{name} ({type(value).__name__})")
        return _LEFT_OUT

    def _module_state(self, module: nn.Module) -> dict[str, Any]:
        shared = {name for name, tensor in _named_tensors(module) if id(tensor) in self._known}
        return {name: piece_of(value) for name, value in module.state_dict().items() if name not in shared}

    def _restore(self, held: Any, saved: Any) -> Any:
        """Change what can be changed in place; return what must be set instead, or that there is nothing to set."""
        if not isinstance(saved, Mapping):
            if isinstance(held, Tensor) and isinstance(saved, Tensor) and held.shape == saved.shape:
                with torch.no_grad():
                    held.copy_(shard_like(saved, held))
                return _LEFT_OUT
            return saved
        ((kind, content),) = saved.items()
        if kind == "list":
            return self._restore_list(held, content)
        if kind == "array":
            return content.numpy().copy()
        if kind == "items" and held is None:  # made on the way: what can be made again is
            made = {key: self._restore(None, item) for key, item in content.items()}
            return {key: value for key, value in made.items() if value is not _LEFT_OUT}
        if held is None:
            return _LEFT_OUT  # made later, or not at all in this version of the class
        if kind == "module":
            current = held.state_dict()
            held.load_state_dict({**current, **{k: shard_like(v, current.get(k)) for k, v in content.items()}})
        elif kind == "generator":
            held.set_state(content)
        elif kind == "numpy":
            held.bit_generator.state = content
        elif kind == "random":
            held.setstate(content)
        elif kind == "state":
            held.load_state_dict(content)
        elif kind == "items":
            for key, item in content.items():
                replaced = self._restore(held.get(key), item)
                if replaced is not _LEFT_OUT:
                    held[key] = replaced
        return _LEFT_OUT

    def _restore_list(self, held: Any, content: list[Any]) -> Any:
        same = isinstance(held, list | tuple | deque) and len(held) == len(content)
        before = list(held) if same else [None] * len(content)
        after = []
        for old, item in zip(before, content, strict=True):
            replaced = self._restore(old, item)
            after.append(old if replaced is _LEFT_OUT else replaced)
        if isinstance(held, deque):
            return deque(after, held.maxlen)
        return tuple(after) if isinstance(held, tuple) else after


def warn_left_out(kept: Kept, name: str) -> None:
    """Say what of an object's attributes cannot be saved, if there is any."""
    if kept.left_out:
        log.warning(
            "%s keeps %s, which cannot be saved: a resumed run goes on without; give the trainer state_dict "
            "and load_state_dict if it matters", name, ", ".join(kept.left_out[:5])
        )  # fmt: skip


def with_ranks(state: Mapping[str, Any], gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Return a state with what each rank keeps of its own, where ranks differ; every rank must call.

    Large tensors, such as averaged weights, follow from what all ranks share: those of rank 0 stand for all.
    """
    skeleton, tensors = split_tensors(state["now"])
    small = {
        name: [str(value.dtype).removeprefix("torch."), list(value.shape), value.flatten().tolist()]
        for name, value in tensors.items()
        if isinstance(value, Tensor) and value.numel() <= MOST_OF_ONE_RANK
    }
    everyone = gather([skeleton, small])
    if all(one == everyone[0] for one in everyone):
        return dict(state)
    ranks = [
        [
            inner,
            {
                name: torch.tensor(v, dtype=getattr(torch, kind)).reshape(shape)
                for name, (kind, shape, v) in own.items()
            },
        ]
        for inner, own in everyone
    ]
    return {**state, "ranks": ranks}


def of_rank(saved: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Return what one rank had kept; one that is new takes over from rank 0."""
    ranks = saved.get("ranks", [])
    if rank >= len(ranks):
        return saved
    skeleton, small = ranks[rank]
    return {**saved, "now": join_tensors(skeleton, {**split_tensors(saved["now"])[1], **small})}


def tensors_of(module: nn.Module) -> list[Any]:
    """Return a module with everything in it that has an identity: submodules, parameters and buffers."""
    return [*module.modules(), *module.parameters(), *module.buffers()]


def _attributes(target: Any) -> dict[str, Any]:
    found = dict(getattr(target, "__dict__", {}))
    hidden: frozenset[str] = frozenset()
    if isinstance(target, nn.Module):
        hidden = _MODULE_INTERNALS
        found |= {**target._parameters, **target._buffers, **target._modules}
    elif isinstance(target, Optimizer):
        hidden = _OPTIMIZER_INTERNALS
    return {name: value for name, value in found.items() if name not in hidden}


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _has_state(value: Any) -> bool:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def _saveable(value: Any) -> Any:
    """Return a state less what no file can hold, such as the functions of a schedule."""
    if isinstance(value, Mapping):
        return {key: _saveable(item) for key, item in value.items() if _is_saveable(item)}
    if isinstance(value, list):
        return [_saveable(item) for item in value]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.value if isinstance(value, enum.Enum) else value


def _is_saveable(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if isinstance(value, list | tuple | deque):
        return all(map(_is_saveable, value))
    plain = bool | int | float | str | np.number | np.bool_ | np.ndarray | enum.Enum
    return value is None or isinstance(value, Tensor | plain)


def _plain_part(value: Any) -> Any:
    """Return a state without its tensors: they come from weights and data, never from a configuration."""
    if isinstance(value, Mapping):
        return {key: _plain_part(item) for key, item in value.items() if not isinstance(item, Tensor | Piece)}
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor | Piece | Mapping) for item in value):
        return None
    return list(value) if isinstance(value, list) else value


def _merged(saved: Any, built_then: Any, built_now: Any) -> Any:
    if isinstance(saved, Mapping):
        then = built_then if isinstance(built_then, Mapping) else {}
        here = built_now if isinstance(built_now, Mapping) else {}
        return {key: _merged(item, then.get(key), here.get(key)) for key, item in saved.items()}
    plain = saved is None or isinstance(saved, bool | int | float | str)
    # Not there at both times means made on the way: a counter that began later, the entry of a table.
    changed = plain and built_then is not None and built_now is not None and built_then != built_now
    return built_now if changed else saved
