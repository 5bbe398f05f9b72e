"""From what a model or a `compute_loss` returns to a loss that is weighed rightly, whatever the split of the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from etude.types import Loss, Number, batch_length, split_loss

IGNORED_LABEL = -100


def takes_batch(model: nn.Module, inputs: Any) -> bool:
    """Tell whether a model wants a batch as one argument, `forward(batch)`, or its parts by name, `forward(**batch)`.

    One argument that every call must give, and whose name is not that of a part of the batch, is the batch.
    """
    if not isinstance(inputs, Mapping):
        return True
    parameters = list(inspect.signature(model.forward).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 1 and needed[0].name not in inputs


def takes_anything(model: nn.Module) -> bool:
    """Tell whether the signature of `forward` says nothing about what a batch may hold."""
    parameters = inspect.signature(model.forward).parameters.values()
    return len(parameters) == 1 or any(p.kind is p.VAR_KEYWORD for p in parameters)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function takes an argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def count_items(inputs: Any, shifts_labels: bool) -> Number:
    """Return what a plain mean over a batch is a mean over: the labels that count, else the samples.

    Class labels are counted by transformers' own convention: -100 does not count, and a causal language model does not
    predict the first.
    """
    if isinstance(inputs, Mapping):
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if isinstance(labels, Tensor) and labels.dim() and not labels.is_floating_point():
            if shifts_labels and "shift_labels" not in inputs:
                labels = labels[..., 1:]
            return labels.ne(IGNORED_LABEL).sum()
    return batch_length(inputs)


class Share(NamedTuple):
    """One micro-batch's part of a step: total loss = root * factor, over `weight` things."""

    root: Tensor
    factor: float
    weight: float
    metrics: Mapping[str, Number]

    @property
    def mean(self) -> Tensor:
        """The mean loss; nought where nothing counts."""
        if self.factor == self.weight:
            return self.root
        return self.root * (self.factor / self.weight if self.weight else 0.0)


def weigh(value: Any, inputs: Any, items: Number) -> Share:
    """Accept a Loss, `{"loss": mean, "weight": ...}`, `{"loss": mean}`, `(mean, ...)` or a mean of `items`."""
    if isinstance(value, Tensor) and value.dim() == 1 and value.numel() > 1:
        value = value.mean()  # one loss for each device under nn.DataParallel
    root, factor, weight, metrics = split_loss(value, inputs)
    if not carries_weight(value):
        own = value.get("weight") if isinstance(value, Mapping) else None
        factor = weight = float(items if own is None else own)  # type: ignore[assignment]  # not a count of samples
        metrics = {name: number for name, number in metrics.items() if name != "weight"}
    return Share(root, float(factor), float(weight), metrics)


def carries_weight(value: Any) -> bool:
    """Tell whether what was returned says itself what its loss sums over."""
    if isinstance(value, Mapping):
        value = value.get("loss")
    elif isinstance(value, tuple) and value:
        value = value[0]
    return isinstance(value, Loss) or hasattr(value, "mean_of")


def mean_of(value: Any, inputs: Any) -> Tensor:
    """Return the mean loss in what a model or `compute_loss` returned."""
    return weigh(value, inputs, batch_length(inputs)).mean


def split_outputs(returned: Any) -> tuple[Any, Any]:
    """Return (loss, outputs) of what a `compute_loss` returned that was asked for its outputs too.

    One that pays no heed to that may return a Loss, a dictionary or a scalar.
    """
    if isinstance(returned, tuple) and returned:
        return returned[0], returned[1] if len(returned) == 2 else returned[1:]
    return returned, returned


def predictions_of(outputs: Any, ignored: Sequence[str]) -> tuple[Tensor, ...]:
    """Return what of a model's outputs can be predictions: every tensor that is no single number."""
    if isinstance(outputs, Mapping):
        found = [value for name, value in outputs.items() if name not in {"loss", "weight", *ignored}]
    else:
        found = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    return tuple(value.detach() for value in found if isinstance(value, Tensor) and value.dim())
