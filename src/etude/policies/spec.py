"""The part of a DataSpec that a policy keeps: what it sees and does, small enough to save beside its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from etude.errors import DataError
from etude.types import DataSpec, Feature

ROLES = ("state", "environment", "image", "task", "text", "action")
_STATISTICS = ("mean", "std", "min", "max", "q01", "q99")
_CHANNELS = (1, 3, 4)


def condense(spec: DataSpec) -> DataSpec:
    """Return what policies use of a spec: images as (C, H, W) with statistics per channel in 0..1, counted tasks."""
    features = {name: _condense(name, feature) for name, feature in spec.features.items() if _is_used(feature)}
    return DataSpec(features, spec.fps)


def _is_used(feature: Feature) -> bool:
    # Sentences come with the data, but only numbers can be fed to a layer.
    return feature.role in ROLES and (feature.role != "text" or feature.dtype.startswith(("float", "bfloat")))


def _condense(name: str, feature: Feature) -> Feature:
    given = feature.stats or {}
    stats = {key: torch.as_tensor(given[key]).double() for key in _STATISTICS if key in given}
    shape, classes = tuple(feature.shape), feature.classes
    if feature.role == "task":
        highest = stats.get("max")
        classes = classes or (None if highest is None else int(highest.max()) + 1)
        return Feature(shape, feature.dtype, "task", classes, feature.names)
    if feature.role == "image":
        channels_last = _is_channels_last(name, feature)
        stats = _per_channel(name, stats, feature.shape[-1 if channels_last else 0])
        shape = (shape[2], shape[0], shape[1]) if channels_last else shape
    else:
        stats = {key: _fitted(name, key, value, shape) for key, value in stats.items()}
    lists = {key: value.tolist() for key, value in stats.items()}
    names = None if feature.role == "image" else feature.names
    return Feature(shape, feature.dtype, feature.role, classes, names, lists or None)


def _fitted(name: str, key: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    if value.numel() != math.prod(shape):
        raise DataError(f"the statistic {key!r} of {name} has shape {tuple(value.shape)}, the feature has {shape}")
    return value.reshape(shape)


def _is_channels_last(name: str, feature: Feature) -> bool:
    shape, names = feature.shape, feature.names
    if len(shape) == 3:
        if names is not None and len(names) == 3:
            places = [place for place, text in enumerate(names) if text.lower() in ("channel", "channels", "c")]
            if places in ([0], [2]):
                return places == [2]
        if shape[0] in _CHANNELS or shape[2] in _CHANNELS:
            return shape[0] not in _CHANNELS
    raise DataError(f"{name} has shape {tuple(shape)}; an image is (channels, height, width) with 1, 3 or 4 channels")


def _per_channel(name: str, stats: Mapping[str, Tensor], channels: int) -> dict[str, Tensor]:
    """Reduce statistics of pixels to statistics of channels, (C, 1, 1), in the range 0..1."""
    if not stats:
        return {}
    rows = {key: _channel_rows(name, value, channels) for key, value in stats.items()}
    means = rows.get("mean")
    reduced = {key: value.mean(1) for key, value in rows.items() if key in ("mean", "q01", "q99")}
    if "std" in rows and means is not None:
        # The spread of a channel is the spread at each pixel and the spread between pixels.
        reduced["std"] = (rows["std"].square() + means.square()).mean(1).sub(means.mean(1).square()).clamp(min=0).sqrt()
    reduced |= {key: getattr(rows[key], f"a{key}")(1) for key in ("min", "max") if key in rows}
    highest = reduced.get("max", reduced.get("mean"))
    scale = 255.0 if highest is not None and float(highest.max()) > 1.0 else 1.0
    return {key: (value / scale).reshape(channels, 1, 1) for key, value in reduced.items()}


def _channel_rows(name: str, value: Tensor, channels: int) -> Tensor:
    if value.numel() == channels:
        return value.reshape(channels, 1)
    if value.dim() == 3 and value.shape[0] == channels:
        return value.flatten(1)
    if value.dim() == 3 and value.shape[2] == channels:
        return value.flatten(0, 1).T
    raise DataError(f"the statistics of {name} have shape {tuple(value.shape)}; give one number per channel")


def spec_to_json(spec: DataSpec) -> dict[str, Any]:
    """Return a condensed spec as JSON values."""
    features = {
        name: {
            "shape": list(feature.shape),
            "dtype": feature.dtype,
            "role": feature.role,
            "classes": feature.classes,
            "names": list(feature.names) if feature.names else None,
            "stats": dict(feature.stats) if feature.stats else None,
        }
        for name, feature in spec.features.items()
    }
    return {"features": features, "fps": spec.fps}


def spec_from_json(value: Mapping[str, Any]) -> DataSpec:
    """Return the spec that `spec_to_json` wrote."""
    features = {
        name: Feature(
            tuple(entry["shape"]), entry["dtype"], entry["role"], entry["classes"],
            tuple(entry["names"]) if entry["names"] else None, entry["stats"],
        )
        for name, entry in value["features"].items()
    }  # fmt: skip
    return DataSpec(features, value["fps"])
