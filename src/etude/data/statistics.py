"""The statistics that came with data: batches are normalised by them, and actions go back to the data's units."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from etude.errors import DataError

WIDTH_FLOOR = 1e-6
"""A dimension narrower than this, relative to its size, is constant: its width is 0, and it becomes 0 always."""
NEEDED: Mapping[str, tuple[str, str]] = {
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
}
"""The two statistics that a mode of normalising needs."""
PICKLED = """is a pickle, which may run any code when it is read, and is not read; turn one that you trust into JSON:
    import json, pickle, numpy as np
    stats = pickle.load(open("dataset_stats.pkl", "rb"))
    json.dump(stats, open("dataset_stats.json", "w"), default=lambda value: np.asarray(value).tolist())"""
"""What is said of statistics that were pickled."""
_KEPT = ("mean", "std", "min", "max")


class NormStats:
    """Normalise batches by statistics, and give normalised tensors back in the data's units.

    Every floating-point key that is named is mapped by mean and std (or by min and max, to [-1, 1]), and so are
    pictures of uint8, which are brought to 0..1 first where their statistics lie there. Other whole numbers and keys
    that a batch lacks stay as they are. A constant dimension becomes 0, and comes back as the constant.

    Args:
        norm_stats: `{key: {"mean": ..., "std": ...}}`, as a dataset factory returns them.
    """

    def __init__(self, norm_stats: Mapping[str, Any]) -> None:
        self.load(norm_stats)

    @classmethod
    def from_any(cls, stats: Any) -> Self:
        """Take statistics as a mapping of lists, arrays or tensors, as another `NormStats`, or as a JSON file."""
        if isinstance(stats, NormStats):
            return cls(stats.values)
        if isinstance(stats, str | Path):
            if Path(stats).suffix == ".pkl":
                raise DataError(f"{stats} {PICKLED}")
            return cls.from_json(Path(stats).expanduser().read_text(encoding="utf-8"))
        if not isinstance(stats, Mapping):
            raise DataError(f"norm_stats must be {{key: {{mean, std}}}}, got {type(stats).__name__}")
        return cls(stats)

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | str) -> Self:
        """Take what `to_json` gave, or its text."""
        if isinstance(values, str):
            try:
                values = json.loads(values)
            except ValueError as error:
                raise DataError(f"statistics are not JSON: {error}") from error
        return cls.from_any(values)

    def load(self, norm_stats: Mapping[str, Any]) -> None:
        """Take other statistics from here on."""
        self.values: dict[str, dict[str, Tensor]] = {}
        """The statistics themselves, in float64."""
        self._affine: dict[str, tuple[Tensor, Tensor]] = {}
        self._pixel_scales: dict[str, float] = {}
        for name, stats in norm_stats.items():
            if not isinstance(stats, Mapping):
                raise DataError(f"norm_stats must be {{key: {{mean, std}}}}, got {type(stats).__name__} for {name!r}")
            known = {key: stats[key] for key in _KEPT if stats.get(key) is not None}
            self.values[name] = {key: _number(name, value) for key, value in known.items()}
            if not self.values[name]:
                raise DataError(
                    f"norm_stats of {name!r} have no mean and std, but {', '.join(map(str, stats)) or 'none'}"
                )
            mode = "min_max" if "mean" not in known and "min" in known else "mean_std"
            shape = next(iter(self.values[name].values())).shape
            center, width = center_and_width(name, self.values[name], mode, shape)
            self._affine[name] = center.float(), width.float()
            # A plain number: what is exported must not look into tensors to decide what to do.
            is_bytes = any(float(value.max()) > 1.0 for value in self.values[name].values())
            self._pixel_scales[name] = 1.0 if is_bytes else 255.0

    def __contains__(self, name: object) -> bool:
        return name in self._affine

    def normalize(self, batch: Any, *, complete: bool = True) -> Any:
        """Return the batch with every key that the statistics name normalised, on the device and in the type it has.

        Args:
            batch: Tensors by name.
            complete: Whether a batch in which nothing is named is a mistake; an observation may have nothing.
        """
        if not isinstance(batch, Mapping) or (complete and not any(name in batch for name in self._affine)):
            found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise DataError(f"norm_stats name {', '.join(self._affine)}, none of which is in the batch: {found}")
        out = dict(batch)
        for name in self._affine:
            value = out.get(name)
            if isinstance(value, Tensor) and value.dtype == torch.uint8:
                value = value.float() / self._pixel_scales[name]
            if isinstance(value, Tensor) and value.is_floating_point():
                # What never changed in the data carries no news: divided by infinity it is 0.
                out[name] = self._map(name, value, lambda x, c, w: (x - c) / torch.where(w > 0, w, torch.inf))
        return out

    def unnormalize(self, name: str, value: Tensor) -> Tensor:
        """Return a normalised tensor in the data's units; what the statistics do not name stays as it is."""
        return self._map(name, value, lambda x, c, w: x * w + c) if name in self._affine else value

    def unnormalize_action(self, value: Tensor) -> Tensor:
        """Return normalised actions in the data's units."""
        return self.unnormalize("action", value)

    def _map(self, name: str, value: Tensor, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        kind = torch.promote_types(value.dtype, torch.float32)
        center, width = (part.to(value.device, kind) for part in self._affine[name])
        try:
            changed = change(value.to(kind), center, width).to(value.dtype)
        except RuntimeError as error:
            raise self._misfit(name, value) from error
        if changed.shape != value.shape:  # statistics larger than the data would grow it in silence
            raise self._misfit(name, value)
        return changed

    def _misfit(self, name: str, value: Tensor) -> DataError:
        center, _ = self._affine[name]
        return DataError(
            f"norm_stats of {name!r} have shape {tuple(center.shape)}, which does not fit {tuple(value.shape)}"
        )

    def differs_from(self, other: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Name the keys whose statistics are not the same in float32, in which they are used."""
        return [
            name
            for name in {**self.values, **other}
            if name not in other
            or name not in self.values
            or self.values[name].keys() != other[name].keys()
            or not all(torch.equal(value.float(), other[name][key].float()) for key, value in self.values[name].items())
        ]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the statistics as plain lists, which is what `dataset_stats.json` holds."""
        return {name: {key: value.tolist() for key, value in stats.items()} for name, stats in self.values.items()}


def _number(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"norm_stats of {name!r} are not numbers: {error}") from error


def center_and_width(name: str, stats: Mapping[str, Any], mode: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return what a feature is shifted and divided by, in float64; a constant dimension has the width 0."""
    needed = NEEDED[mode]
    if missing := [key for key in needed if key not in stats]:
        raise DataError(
            f"{name} has no {' and '.join(missing)} in its statistics, which normalization {mode!r} needs; "
            f"compute the dataset's statistics or set normalization: {{{name}: identity}}"
        )
    first, second = (torch.as_tensor(stats[key], dtype=torch.float64).reshape(tuple(shape)) for key in needed)
    if not (first.isfinite().all() and second.isfinite().all()):
        raise DataError(f"the statistics of {name} are not finite; look for NaN or infinity in the data")
    center, width = (first, second) if mode == "mean_std" else ((first + second) / 2, (second - first) / 2)
    if (width < 0).any():
        raise DataError(f"the statistics of {name} contradict themselves: {' and '.join(needed)} do not fit")
    return _widen_narrow(center, width, stats)


def _widen_narrow(center: Tensor, width: Tensor, stats: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Give constant dimensions the width 0, and those that move only now and then (a gripper) their whole range."""
    narrow = width <= WIDTH_FLOOR * center.abs().clamp(min=1.0)
    if "min" not in stats or "max" not in stats:
        return center, torch.where(narrow, 0.0, width)
    low, high = (torch.as_tensor(stats[key], dtype=torch.float64).reshape(center.shape) for key in ("min", "max"))
    moves = (high - low) / 2 > WIDTH_FLOOR * center.abs().clamp(min=1.0)
    center = torch.where(narrow, (low + high) / 2, center)
    return center, torch.where(narrow, torch.where(moves, (high - low) / 2, 0.0), width)
