"""The losses that a training service knows by name: sums over the target tokens of a datum.

Shape letters: N targets of one datum, whatever their shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from etude.algorithms import losses
from etude.errors import ConfigError, DataError
from etude.service.in_process import LOSSES, policy_loss

CONFIG: Final = {**LOSSES, "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}}
"""The losses by name, with what each takes in `loss_fn_config`."""
_POLICY_INPUTS: Final = ("logprobs", "advantages")


def config_of(loss_fn: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """Return the parameters of a loss, defaults filled in; refuse what it does not take."""
    if loss_fn not in CONFIG:
        raise ConfigError(f"unknown loss_fn {loss_fn[:80]!r}; this service knows {', '.join(CONFIG)}")
    known = CONFIG[loss_fn]
    for name, value in given.items():
        if name not in known:
            takes = ", ".join(known) or "nothing"
            raise ConfigError(f"{loss_fn} has no option {name[:80]!r} in loss_fn_config; it takes {takes}")
        if isinstance(value, str):
            raise ConfigError(f"{loss_fn}: {name} must be a number, got {value[:80]!r}")
        if not math.isfinite(value):
            raise ConfigError(f"{loss_fn}: {name} must be finite, got {value}")
    return known | {name: float(value) for name, value in given.items()}


def require_inputs(loss_fn: str, inputs: Mapping[str, Tensor], where: str) -> None:
    """Refuse a datum that lacks what its loss needs, has what it does not take, or has it in another shape."""
    needed = () if loss_fn == "cross_entropy" else _POLICY_INPUTS
    extra = ("weights",) if loss_fn == "cross_entropy" else ("sequence_ratio_mask",) if loss_fn == "gspo" else ()
    known = ("target_tokens", "mask", *needed, *extra)
    for name in ("target_tokens", *needed):
        if name not in inputs:
            raise DataError(f"{where}: {loss_fn} needs {name!r} in loss_fn_inputs")
    for name, value in inputs.items():
        if name not in known:
            raise DataError(f"{where}: {loss_fn} takes no {name[:80]!r} in loss_fn_inputs; it takes {', '.join(known)}")
        if value.shape != inputs["target_tokens"].shape:
            shapes = f"{list(value.shape)}, but target_tokens {list(inputs['target_tokens'].shape)}"
            raise DataError(f"{where}: {name} has the shape {shapes}")
    ratio_mask = inputs.get("sequence_ratio_mask")
    if ratio_mask is not None and bool(((ratio_mask == 0) & (inputs["advantages"] != 0)).any()):
        raise DataError(f"{where}: a token outside sequence_ratio_mask has an advantage; set it to 0")


def loss_by_token(
    loss_fn: str, config: Mapping[str, float], log_probs_N: Tensor, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Return the loss of each target of one datum, given its log-probabilities."""
    shape = log_probs_N.shape
    flat = {name: value.reshape(1, -1) for name, value in inputs.items()}
    log_probs_1N = log_probs_N.reshape(1, -1)
    mask_1N = flat["mask"].float() if "mask" in flat else torch.ones_like(log_probs_1N)
    if loss_fn == "cross_entropy":
        weights_1N = flat["weights"].float() if "weights" in flat else torch.ones_like(log_probs_1N)
        return losses.cross_entropy(log_probs_1N, torch.where(mask_1N != 0, weights_1N, 0.0)).reshape(shape)
    given = log_probs_1N, flat["logprobs"].float(), flat["advantages"].float()
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    if loss_fn != "gspo":
        return policy_loss(loss_fn, config)(*given, mask_1N).reshape(shape)
    counted_1N = mask_1N * flat["sequence_ratio_mask"].float() if "sequence_ratio_mask" in flat else mask_1N
    return losses.gspo(*given, counted_1N, clip_low=1.0 - low, clip_high=high - 1.0).reshape(shape)
