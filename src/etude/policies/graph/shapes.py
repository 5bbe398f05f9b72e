"""Try a model once without numbers, on the meta device: what does not fit is found before any data is read."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from etude.policies.base import evaluating
from etude.policies.graph.model import GraphModel
from etude.policies.graph.objects import placed
from etude.policies.graph.schema import Input
from etude.rng import generators_kept

FIRST, STRIDE = 2, 8
"""Sizes tried for a name such as B: 2 for the first, then multiples of 8, which halve well."""
_UNTRIABLE = ("meta tensor", "on meta", "'meta'", "device meta", "data-dependent")


def try_shapes(model: GraphModel) -> None:
    """Run a copy of the model on the meta device and note the shapes; an error names its node and keeps its type."""
    inputs = model.plan.inputs
    if any(one.shape is None and not one.optional for one in inputs):
        return
    sizes = _sizes(inputs)
    if any(is_lazy(parameter) for parameter in model.parameters()):
        _materialise(model, sizes)
    values = model.plan.start.copy()
    label = ""
    with generators_kept(), torch.no_grad(), torch.device("meta"):
        values[: len(inputs)] = [_example(one, sizes, "meta") for one in inputs]
        trial = _on_meta(model)
        if trial is None:
            return
        for step in model.plan.steps:
            trial._steps, label = [step._replace(done=())], step.label
            try:
                trial.run(values)
            except Exception as error:  # noqa: BLE001 - whatever a module raises keeps its type, and gains its node
                if isinstance(error, NotImplementedError) or any(word in str(error) for word in _UNTRIABLE):
                    break  # it asks for numbers: only a real call can tell
                raise placed(error, label) from error.__cause__
    model.shapes = {name: described(values[slot]) for name, slot in model.plan.slots.items()}


def described(value: Any) -> str:
    """Return the shape of a value as text."""
    if isinstance(value, Tensor):
        kind = "" if value.dtype == torch.float32 else f" {str(value.dtype).removeprefix('torch.')}"
        return f"{list(value.shape)}{kind}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {described(inner)}" for key, inner in value.items()) + "}"
    return "" if value is None else type(value).__name__


def _sizes(inputs: list[Input]) -> dict[str, int]:
    names = list(dict.fromkeys(size for one in inputs for size in one.shape or () if isinstance(size, str)))
    return {name: FIRST if index == 0 else STRIDE * index for index, name in enumerate(names)}


def _example(one: Input, sizes: dict[str, int], device: str) -> Any:
    if one.shape is None:
        return one.default
    shape = [sizes[size] if isinstance(size, str) else size for size in one.shape]
    return torch.zeros(shape, dtype=getattr(torch, one.dtype), device=device)


def _materialise(model: GraphModel, sizes: dict[str, int]) -> None:
    """Give lazy modules their weights, by a call in evaluation mode."""
    with torch.no_grad(), evaluating(model):
        model(*[_example(one, sizes, "cpu") for one in model.plan.inputs])


def _on_meta(model: GraphModel) -> GraphModel | None:
    """Return a copy whose tensors have shapes and no numbers: what a trial changes, it changes there."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
                if not isinstance(tensor, Tensor) or is_lazy(tensor):
                    continue
                bare = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # noqa: BLE001 - a module that cannot be copied cannot be tried either; it still works
        return None
