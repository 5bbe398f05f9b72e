"""From observations to features: what policies share in reading states, cameras, tasks and text.

Shape letters: B batch, T observation steps, F features, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from etude.errors import DataError
from etude.policies.spec import condense
from etude.policies.vision import ImageEncoder, KeypointHead, Norm, resize_images
from etude.types import DataSpec


@dataclass(frozen=True)
class ImageOptions:
    """How images are read; see the parameters of the policies."""

    backbone: str = "resnet18"
    weights: str | None = None
    norm: Norm = "auto"
    size: list[int] | None = None
    """Height and width that every camera is scaled to; None leaves them."""
    crop: list[int] | None = None
    fetch_weights: bool = True
    """False where the weights will come with the policy's own."""


class Inputs:
    """Which features of a spec are observed, by role, and how a batch holds them.

    Args:
        spec: The features of the data.
        n_obs_steps: Observations in a row that batches hold.
    """

    def __init__(self, spec: DataSpec, n_obs_steps: int = 1) -> None:
        self.spec, self.n_obs_steps = condense(spec), n_obs_steps
        self.states = sorted(self.spec.with_role("state"))
        self.environments = sorted(self.spec.with_role("environment"))
        self.images = sorted(self.spec.with_role("image"))
        self.texts = sorted(self.spec.with_role("text"))
        # A single task tells nothing.
        tasks = {name: f.classes for name, f in self.spec.with_role("task").items() if f.classes and f.classes > 1}
        self.task: str | None = min(tasks, default=None)
        self.num_tasks = tasks[self.task] if self.task is not None else 0
        if not (self.states or self.environments or self.images):
            raise DataError(f"there is nothing to observe: the data has no state and no image among {sorted(spec)}")

    def width(self, names: list[str]) -> int:
        """Return how many numbers these features have together, in one step."""
        return sum(math.prod(self.spec[name].shape) for name in names)

    def vectors(self, batch: Mapping[str, Any], names: list[str]) -> Tensor:
        """Return these features side by side, (B, T, F)."""
        parts = [self._steps(batch, name).flatten(2) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def pictures(self, batch: Mapping[str, Any], size: list[int] | None = None) -> list[Tensor]:
        """Return the images of each camera, (B * T, C, H, W)."""
        cameras = [self._steps(batch, name).flatten(0, 1) for name in self.images]
        return cameras if size is None else [resize_images(camera, (size[0], size[1])) for camera in cameras]

    def task_index(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the task of each sample, (B,)."""
        value: Tensor = batch[self.task or ""]
        return value.reshape(value.shape[0], -1)[:, -1].long()

    def text(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the text embeddings side by side, (B, F)."""
        parts = [self._last(batch[name], len(self.spec[name].shape)).flatten(1) for name in self.texts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _steps(self, batch: Mapping[str, Any], name: str) -> Tensor:
        value: Tensor = batch[name]
        shape, steps = self.spec[name].shape, self.n_obs_steps
        # A camera may be of another size than the one recorded, a state may not.
        inner = value.shape[value.dim() - len(shape) :]
        is_image = name in self.images
        if steps == 1 and value.dim() == 1 + len(shape):
            value = value.unsqueeze(1)
        fits = inner[0] == shape[0] if is_image else inner == shape
        if value.dim() != 2 + len(shape) or value.shape[1] != steps or not fits:
            wanted = ", ".join(map(str, ["batch", *([steps] if steps > 1 else []), *shape]))
            raise DataError(f"{name} comes as {tuple(batch[name].shape)}, the policy was made for ({wanted})")
        return value

    @staticmethod
    def _last(value: Tensor, inner_dims: int) -> Tensor:
        return value[:, -1] if value.dim() > 1 + inner_dims else value


class ObservationEncoder(nn.Module):
    """Turn normalised observations into one vector per sample, (B, out_dim).

    States are taken as they are, images as keypoints (`SpatialSoftmax`), a task as a learned embedding.

    Args:
        spec: The features of the data.
        n_obs_steps: Observations in a row.
        images: How cameras are read.
        keypoints: Points located in each image.
        image_dim: Width of a layer over the keypoints of an image, as Diffusion Policy has it; None leaves it out.
        task_dim: Width of the embedding of a task.
    """

    def __init__(
        self,
        spec: DataSpec,
        n_obs_steps: int = 1,
        *,
        images: ImageOptions | None = None,
        keypoints: int = 32,
        image_dim: int | None = None,
        task_dim: int = 32,
    ) -> None:
        super().__init__()
        images = images or ImageOptions()
        self.inputs = inputs = Inputs(spec, n_obs_steps)
        self.image_size = images.size
        self._vectors = [*inputs.states, *inputs.environments]
        self.step_dim = inputs.width(self._vectors)
        """Features of one observation."""
        if inputs.images:
            self.image_encoder = make_image_encoder(inputs, images)
            self.keypoints = KeypointHead(self.image_encoder.out_channels, keypoints, image_dim)
            self.image_dim = self.keypoints.out_dim
            self.step_dim += len(inputs.images) * self.image_dim
        self.context_dim = inputs.width(inputs.texts)
        """Features that hold for all observations: task and text."""
        if inputs.task is not None:
            self.task_embedding = nn.Embedding(inputs.num_tasks, task_dim)
            self.context_dim += task_dim
        self.out_dim = n_obs_steps * self.step_dim + self.context_dim

    def steps(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the features of each observation, (B, T, step_dim)."""
        parts = [self.inputs.vectors(batch, self._vectors)] if self._vectors else []
        if self.inputs.images:
            cameras = self.inputs.pictures(batch, self.image_size)
            points = encode_cameras(cameras, lambda images: self.keypoints(self.image_encoder(images)))
            parts += [features.view(-1, self.inputs.n_obs_steps, self.image_dim) for features in points]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def context(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return what holds for all observations, (B, context_dim); None where there is nothing."""
        parts = [self.inputs.text(batch)] if self.inputs.texts else []
        if self.inputs.task is not None:
            parts.append(self.task_embedding(self.inputs.task_index(batch)))
        return torch.cat(parts, dim=1) if parts else None

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return everything side by side, (B, out_dim)."""
        features = self.steps(batch).flatten(1)
        context = self.context(batch)
        return features if context is None else torch.cat([features, context], dim=1)


def make_image_encoder(inputs: Inputs, images: ImageOptions) -> ImageEncoder:
    """Return one encoder for all cameras of a spec."""
    channels = {inputs.spec[name].shape[0] for name in inputs.images}
    if len(channels) > 1:
        raise DataError(f"the cameras {', '.join(inputs.images)} have {sorted(channels)} channels; make them alike")
    return ImageEncoder(
        channels.pop(), backbone=images.backbone, weights=images.weights, norm=images.norm, crop=images.crop,
        fetch_weights=images.fetch_weights,
    )  # fmt: skip


def encode_cameras(cameras: list[Tensor], encode: Any) -> list[Tensor]:
    """Encode the images of all cameras, in one pass where they are of one size."""
    if len({camera.shape for camera in cameras}) == 1:
        encoded: list[Tensor] = list(encode(torch.cat(cameras) if len(cameras) > 1 else cameras[0]).chunk(len(cameras)))
        return encoded
    return [encode(camera) for camera in cameras]


def to_batch(observation: Mapping[str, Any], spec: DataSpec) -> dict[str, Tensor]:
    """Return what one robot or simulator sees as a batch of one; arrays become tensors, images become (C, H, W)."""
    batch: dict[str, Tensor] = {}
    for name, feature in condense(spec).features.items():
        if name not in observation or feature.role == "action":
            continue
        given = observation[name]
        value = torch.as_tensor(np.ascontiguousarray(given) if isinstance(given, np.ndarray) else given)
        if feature.role == "image" and value.shape[0] != feature.shape[0] and value.shape[-1] == feature.shape[0]:
            value = value.permute(2, 0, 1)
        batch[name] = value.unsqueeze(0)
    return batch
