"""`Digits`: scikit-learn's handwritten digits, a real task that needs no download."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.data.noise import normals
from etude.data.order import Indices, Keys
from etude.data.windows import statistics
from etude.errors import DataError, MissingExtraError
from etude.rng import fold, fold_array
from etude.types import DataSpec, Feature

_SPLIT_KEY = fold(0xD161)  # fixed: the split must not depend on the seed of a run


class Digits:
    """Handwritten digits, 8 x 8 pixels: an image as `observation.state` (64 numbers in 0..1), the digit as `action`.

    Args:
        split: Which part to serve: train or validation.
        validation_fraction: Share of the 1797 digits set aside for validation.
        noise: Standard deviation of the noise added to the pixels of training digits, anew each epoch.
    """

    def __init__(
        self,
        split: Literal["train", "validation"] = "train",
        validation_fraction: float = 0.2,
        noise: float = 0.0,
    ) -> None:
        if split not in ("train", "validation"):
            raise DataError(f"split must be 'train' or 'validation', got {split!r}")
        if not 0.0 < validation_fraction < 1.0:
            raise DataError(f"validation_fraction must lie between 0 and 1, got {validation_fraction}")
        if not noise >= 0.0:
            raise DataError(f"noise must not be negative, got {noise}")
        pixels, labels = _load()
        order = np.argsort(fold_array(_SPLIT_KEY, np.arange(len(labels))))
        held_out = min(max(1, round(validation_fraction * len(labels))), len(labels) - 1)
        train = order[held_out:]
        chosen = train if split == "train" else order[:held_out]
        self._noise = noise if split == "train" else 0.0
        self._states = torch.from_numpy(pixels[chosen])
        self._labels = torch.from_numpy(labels[chosen])
        # Validation data too is described by the statistics of the training digits.
        state = Feature((64,), "float32", "state", stats=statistics(torch.from_numpy(pixels[train])))
        self.spec = DataSpec({"observation.state": state, "action": Feature((), "int64", "action", classes=10)})

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = self._noise * torch.randn(64) if self._noise else 0.0
        return {"observation.state": self._states[index] + noise, "action": self._labels[index]}

    def gather(self, indices: Indices, keys: Keys) -> dict[str, Tensor]:
        """Return the digits at `indices` as one batch, with noise drawn from the keys."""
        rows = torch.from_numpy(indices)
        states = self._states[rows]
        if self._noise:
            states += torch.from_numpy((self._noise * normals(keys, (64,))).astype(np.float32))
        return {"observation.state": states, "action": self._labels[rows]}


@cache
def _load() -> tuple[NDArray[np.float32], NDArray[Any]]:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("the digits dataset needs scikit-learn; run: pip install scikit-learn") from error
    digits = load_digits()
    return (digits.data / 16.0).astype(np.float32), digits.target.astype(np.int64)
