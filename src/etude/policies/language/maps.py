"""The linear maps of a Llama as decoding needs them: small ones joined, adapters beside or in them, or laid out anew.

A step of one row does little but read the weights. One core reads 27 GB a second, and 11 of them through MKL's product
of one row with weights as they are stored. Weights of a model that is large enough for it to matter are therefore laid
out for as many rows as there are, adapters joined to them on the way. All products of a step of SmolLM2 (538 MB), in
milliseconds of one core:

    rows                        1     2     4     8    16    32
    as they are stored         47    83    68    78   102   147
    transposed, see one_row    25
    packed by oneDNN           38    47    32    42    59    99

Packed weights are multiplied with four rows at least, of which some may be padding: fewer take longer, and from four on
a row comes to the same bits whatever goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from etude.policies.language.adapted import Adapted, merged_weight, read
from etude.policies.language.head import HAS_ONEDNN, linear, working_type
from etude.policies.language.one_row import MapsForOne, RowLayer, RowModel

JOIN_BELOW = 1 << 18
"""Projections with fewer weights than this are joined: copying them costs less than the calls it saves."""
MERGE_STEPS = 16
"""Large weights are copied, with their adapters in them, for as many tokens: joining adapters of rank 32 takes as long
as 14 tokens of SmolLM2 take longer with them beside its weights (each 9 ms of 54), laying them out 0.5 s, which one row
saves in 20 tokens and 32 rows in 10."""
MERGE_BELOW = 1 << 28
"""Weights of a model that may be copied for it, 1 GB of float32; the copy is gone when all is drawn."""
LAY_OUT_ABOVE = 1 << 24
"""Weights of a model below which it does not matter how they are laid out: the cache holds much of them."""
LEAST_ROWS = 4
CAN_PACK = HAS_ONEDNN and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class Maps:
    """Linear maps of the same states: one joined matrix or several, and the adapters of those that have some."""

    def __init__(self, given: Sequence[Adapted], dtype: torch.dtype) -> None:
        if sum(one.weight.numel() for one in given) <= JOIN_BELOW:
            merged = [merged_weight(one).to(dtype) for one in given]
            self._weights = (torch.cat(merged),) if len(merged) > 1 else tuple(merged)
            given = []
        else:
            self._weights = tuple(one.weight.to(dtype) for one in given)
        self._ups = [(at, one.up.t(), one.scale) for at, one in enumerate(given) if one.up is not None]
        self._downs = [one.down for one in given if one.down is not None]
        self._down = torch.cat(self._downs) if len(self._downs) > 1 else self._downs[0] if self._downs else None

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return what each matrix makes of states."""
        found = [functional.linear(x, weight) for weight in self._weights]
        if self._down is not None:
            lows = functional.linear(x, self._down).view(-1, self._down.shape[0])
            parts = torch.split(lows, [down.shape[0] for down in self._downs], 1)
            for low, (at, up, scale) in zip(parts, self._ups, strict=True):
                found[at].view(-1, up.shape[1]).addmm_(low, up, alpha=scale)
        return found


class MapsForMany:
    """The same joined into one matrix, for several rows: packed as oneDNN reads it."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 2 * LEAST_ROWS)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return what the matrix makes of states."""
        given = x.reshape(-1, x.shape[-1])
        rows = given.shape[0]
        if rows < LEAST_ROWS:
            given = functional.pad(given, (0, 0, 0, LEAST_ROWS - rows))
        found: Tensor = torch.ops.mkldnn._linear_pointwise(given, self._weight, None, "none", [], "")
        return [found[:rows].view(*x.shape[:-1], -1)]


class _HeadMap:
    """The head as it is stored, with adapters beside it."""

    def __init__(self, given: Adapted) -> None:
        self._given = given

    def __call__(self, x: Tensor) -> list[Tensor]:
        weight, down, up, scale = self._given
        found = linear(x, weight)
        if down is not None and up is not None:
            found.addmm_(functional.linear(x, down), up.t(), alpha=scale)
        return [found]


Map = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer."""

    attention_norm: Tensor
    qkv: Map
    out: Map
    mlp_norm: Tensor
    gate_up: Map
    down: Map


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """What a decoder multiplies with."""

    layers: list[LayerWeights]
    head: Map
    row: RowModel | None = None
    """The same for a row alone."""


class Layouts:
    """The weights of a model as they are when they are first asked for, laid out for the number of rows."""

    def __init__(self, model: Any, steps: int) -> None:
        """Read a model's weights, for about so many tokens of each row."""
        self._model = model
        size, weight = sum(one.numel() for one in model.parameters()), model.model.embed_tokens.weight
        self._dtype = working_type(weight)
        merges = steps >= MERGE_STEPS and size <= MERGE_BELOW
        is_plain = weight.device.type == "cpu" and self._dtype == weight.dtype == torch.float32
        self.is_laid_out = merges and size >= LAY_OUT_ABOVE and is_plain and CAN_PACK
        """Whether the weights are copies."""
        self.look: Callable[[Any], Adapted] = _read_merged if merges else read
        self._found: dict[str, ModelWeights] = {}

    def of(self, rows: int) -> ModelWeights:
        """Return the weights for so many rows."""
        kind = "stored" if not self.is_laid_out else "one" if rows == 1 else "many"
        if kind not in self._found:
            self._found[kind] = self._stored() if kind == "stored" else self._laid_out(kind == "one")
        return self._found[kind]

    def _stored(self) -> ModelWeights:
        def join(given: Sequence[Adapted]) -> Map:
            return Maps(given, self._dtype)

        head = small(self.look(self._model.lm_head))
        layers = [_layer(layer, join, self.look) for layer in self._model.model.layers]
        return ModelWeights(layers, _HeadMap(head._replace(weight=head.weight.to(self._dtype))))

    def _laid_out(self, for_one: bool) -> ModelWeights:
        kind: Any = MapsForOne if for_one else MapsForMany

        def join(given: Sequence[Adapted]) -> Any:
            weights = [one.weight.detach() for one in given]
            return kind(torch.cat(weights) if len(weights) > 1 else weights[0])

        inner = self._model.model
        layers = [_layer(layer, join, self.look) for layer in inner.layers]
        head, row = join([self.look(self._model.lm_head)]), None
        if for_one:
            row = RowModel(
                [_row(layer) for layer in layers], _array(inner.norm.weight), head, inner.norm.variance_epsilon
            )
        return ModelWeights(layers, head, row)


def _row(layer: Any) -> RowLayer:
    norms = _array(layer.attention_norm), _array(layer.mlp_norm)
    return RowLayer(norms[0], layer.qkv, layer.out, norms[1], layer.gate_up, layer.down)


def _array(given: Tensor) -> Any:
    return given.detach().numpy()


def projections(layer: Any) -> tuple[Any, ...]:
    """Return the linear modules of a layer."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


def small(given: Adapted) -> Adapted:
    """Return the adapters of a small weight joined to it."""
    return Adapted(merged_weight(given)) if given.weight.numel() <= JOIN_BELOW else given


def _layer(layer: Any, join: Callable[[Sequence[Adapted]], Map], look: Callable[[Any], Adapted]) -> LayerWeights:
    q, k, v, out, gate, up, down = (look(module) for module in projections(layer))
    return LayerWeights(
        layer.input_layernorm.weight,
        join((q, k, v)),
        join((out,)),
        layer.post_attention_layernorm.weight,
        join((gate, up)),
        join((down,)),
    )


def _read_merged(module: Any) -> Adapted:
    return Adapted(merged_weight(read(module)))
