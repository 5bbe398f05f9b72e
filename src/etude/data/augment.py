"""Change samples in training, each by its own key: crops, colours and motions of pictures, turns or mirrors of numbers.

Shape letters: B batch, T time, C channels, H height, W width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from etude.data.noise import uniforms
from etude.data.order import Keys
from etude.data.symmetry import require_mirror, require_pairs
from etude.errors import DataError
from etude.rng import fold_array

_GREY = (0.299, 0.587, 0.114)
_TO_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


class Augment:
    """Random crops, colours and motions, turns and mirrors of numbers; frames of one sample's history change alike.

    A draw is a function of the sample's key, so it depends on seed, epoch and sample, not on workers or the batch.

    Args:
        crop: Most pixels by which a picture is moved up, down, left or right; its edge fills the gap.
        brightness: Brightness is scaled by 1 - x to 1 + x.
        contrast: Contrast is scaled by 1 - x to 1 + x.
        saturation: Saturation is scaled by 1 - x to 1 + x.
        hue: Hue is turned by -x to x full turns (0.5 reaches the opposite colour).
        degrees: Most degrees by which a picture is turned.
        translate: Most share of width and height by which it is moved, with interpolation.
        scale: Size is scaled by 1 - x to 1 + x.
        probability: Share of samples that colour and motion are applied to; the crop always is.
        turn: Pairs of numbers by name, such as [[hand_x, hand_y], [dx, dy]], that are turned by one angle, drawn from
            all around: for tasks that look the same from all sides. Everything that has a direction must be named.
        mirror: A line and points by name, such as {line: [[0, 0], [0, 1]], points: [[hand_x, hand_y]]}: every other
            sample is mirrored at the line, for tasks that look the same in that mirror. Four names are two points that
            are each other's image, such as a left and a right corner. Every point must be named.
    """

    def __init__(
        self,
        crop: int = 0,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        hue: float = 0.0,
        degrees: float = 0.0,
        translate: float = 0.0,
        scale: float = 0.0,
        probability: float = 1.0,
        turn: list[list[str]] | None = None,
        mirror: dict[str, list[Any]] | None = None,
    ) -> None:
        limits = {
            "crop": (crop, math.inf), "brightness": (brightness, 1.0), "contrast": (contrast, 1.0),
            "saturation": (saturation, 1.0), "hue": (hue, 0.5), "degrees": (degrees, 180.0),
            "translate": (translate, 1.0), "scale": (scale, 0.9), "probability": (probability, 1.0),
        }  # fmt: skip
        for name, (value, most) in limits.items():
            if not 0 <= value <= most:
                raise DataError(f"augmentation {name} must lie between 0 and {most:g}, got {value}")
        self.crop = crop
        self.brightness, self.contrast, self.saturation, self.hue = brightness, contrast, saturation, hue
        self.degrees, self.translate, self.scale = degrees, translate, scale
        self.probability = probability
        self.turn = None if turn is None else require_pairs(turn)
        self.mirror = None if mirror is None else require_mirror(mirror)

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Augment:
        """Make one of parameters by name; refuse a name that means nothing."""
        known = list(inspect.signature(cls).parameters)
        if unknown := [name for name in parameters if name not in known]:
            raise DataError(f"augmentation {unknown[0]!r} is unknown; there are {', '.join(known)}")
        return cls(**parameters)

    def __call__(self, images: Tensor, keys: Keys, camera: int = 0) -> Tensor:
        """Return changed pictures uint8 (B, C, H, W) or (B, T, C, H, W); cameras draw from streams of their own."""
        draws_BN = torch.from_numpy(uniforms(fold_array(keys, np.array(camera)), (11,))).float() * 2 - 1
        if self.probability < 1:
            draws_BN[:, 2:10] *= (draws_BN[:, 10:] * 0.5 + 0.5) < self.probability
        if self.crop:
            images = _shift(images, (draws_BN[:, :2] * (self.crop + 0.5)).round().long().clamp(-self.crop, self.crop))
        moves = self.degrees or self.translate or self.scale
        colours = self.brightness or self.contrast or self.saturation or self.hue
        if not (moves or colours):
            return images
        values = images.float()
        if moves:
            values = self._move(values, draws_BN[:, 2:6])
        if colours:
            values = self._colour(values, draws_BN[:, 6:10])
        return values.round_().clamp_(0, 255).to(torch.uint8)

    def _move(self, images: Tensor, draws_B4: Tensor) -> Tensor:
        flat = images.flatten(1, -3)
        height, width = flat.shape[-2:]
        angle = torch.deg2rad(draws_B4[:, 0] * self.degrees)
        zoom = 1 / (1 + draws_B4[:, 1] * self.scale)
        cos, sin = torch.cos(angle) * zoom, torch.sin(angle) * zoom
        shift = 2 * self.translate * draws_B4[:, 2:4]
        # Grid coordinates run from -1 to 1 on both axes, so turning a picture that is not square needs its aspect.
        rows = [cos, -sin * height / width, shift[:, 0], sin * width / height, cos, shift[:, 1]]
        theta = torch.stack(rows, 1).reshape(-1, 2, 3)
        grid = functional.affine_grid(theta, list(flat.shape), align_corners=False)
        moved = functional.grid_sample(flat, grid, mode="bilinear", padding_mode="border", align_corners=False)
        return moved.reshape(images.shape)

    def _colour(self, images: Tensor, draws_B4: Tensor) -> Tensor:
        shape, channels = images.shape, images.shape[-3]
        batch = len(images)
        # (B, C, T * H * W): all colour changes but contrast are one matrix per sample.
        pixels = images.reshape(batch, -1, channels, shape[-2] * shape[-1]).transpose(1, 2).flatten(2)
        bright = 1 + draws_B4[:, 0, None, None] * self.brightness
        if channels == 3:
            matrices = self._turn(draws_B4[:, 3]) @ self._saturate(draws_B4[:, 2])
            pixels = (matrices * bright) @ pixels
            grey = (torch.tensor(_GREY) @ pixels).mean(1)[:, None, None]
        else:
            pixels = pixels * bright
            grey = pixels.mean((1, 2), keepdim=True)
        pixels = torch.lerp(grey, pixels, 1 + draws_B4[:, 1, None, None] * self.contrast)
        changed: Tensor = pixels.reshape(batch, channels, -1, shape[-2] * shape[-1]).transpose(1, 2).reshape(shape)
        return changed

    def _saturate(self, draws_B: Tensor) -> Tensor:
        kept = (1 + draws_B * self.saturation)[:, None, None]
        return kept * torch.eye(3) + (1 - kept) * torch.tensor(_GREY).expand(3, 3)

    def _turn(self, draws_B: Tensor) -> Tensor:
        angle = draws_B * self.hue * 2 * math.pi
        turn = torch.zeros(len(angle), 3, 3)
        turn[:, 0, 0] = 1
        turn[:, 1, 1] = turn[:, 2, 2] = torch.cos(angle)
        turn[:, 1, 2], turn[:, 2, 1] = -torch.sin(angle), torch.sin(angle)
        forth = torch.tensor(_TO_YIQ)
        back: Tensor = torch.linalg.inv(forth)
        return back @ turn @ forth


def _shift(images: Tensor, offsets_B2: Tensor) -> Tensor:
    """Move each picture by whole pixels; the pixels of its edge are repeated."""
    height, width = images.shape[-2:]
    rows_BH = (torch.arange(height) + offsets_B2[:, :1]).clamp(0, height - 1)
    columns_BW = (torch.arange(width) + offsets_B2[:, 1:]).clamp(0, width - 1)
    flat = images.flatten(1, -3)
    samples = torch.arange(len(flat))[:, None, None]
    moved = flat[samples, :, rows_BH[:, :, None], columns_BW[:, None, :]]
    return moved.permute(0, 3, 1, 2).reshape(images.shape)
