"""Options that policies share, said once: how chunks are executed, what is normalised, and how images are read.

A policy takes them flat, among its own keywords: `ACT(chunk_size=16, latency_steps=1, image_size=[96, 96])`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from etude.policies.normalize import Scaling
from etude.policies.observation import ImageOptions
from etude.policies.vision import Norm
from etude.signatures.nested import NamedParametersOf, ParametersOf


@dataclass(frozen=True)
class SharedOptions:
    """How chunks are executed, what is normalised, and how images are read."""

    temporal_ensemble_coeff: float | None = None
    """Average overlapping chunks with weights exp(-m * i), oldest first; ACT's paper has 0.01, None does not."""
    latency_steps: int = 0
    """Control steps that computing a chunk takes."""
    normalization: dict[str, Scaling] | None = None
    """Mode by role (state, environment, image, action) or feature name: mean_std, min_max, quantiles, identity,
    imagenet, or {scale, center} in the data's units. For actions that are places also {scale, relative_to: finger_?}:
    they are then said from where these numbers are."""
    derived: Annotated[dict[str, Any] | None, NamedParametersOf("etude.policies.derived:DerivedFeature")] = None
    """Features computed from named numbers of the data, such as {object_from_hand: {difference: [object_?, hand_?],
    scale: 0.1}}."""
    observed: list[str] | None = None
    """Names of the features that the layers see, derived ones among them; None is all of them."""
    image_backbone: str = "resnet18"
    """resnet18, resnet34, resnet50, resnet10, or resnet10_small for CPUs."""
    image_weights: str | None = None
    """Directory or hub name of pretrained weights of the backbone."""
    image_norm: Norm = "auto"
    """auto, group, frozen or batch: the normalisation layers of the backbone."""
    image_size: list[int] | None = None
    """Height and width that every camera is scaled to; None leaves them."""
    image_crop: list[int] | None = None
    """Height and width cut out of images, at random in training."""

    @property
    def execution(self) -> dict[str, Any]:
        """What `PolicyModule` takes of them."""
        return {
            "temporal_ensemble_coeff": self.temporal_ensemble_coeff, "latency_steps": self.latency_steps,
            "normalization": self.normalization, "derived": self.derived, "observed": self.observed,
        }  # fmt: skip

    @property
    def images(self) -> ImageOptions:
        """How images are read."""
        return ImageOptions(self.image_backbone, self.image_weights, self.image_norm, self.image_size, self.image_crop)


SharedKeywords = Annotated[Any, ParametersOf("etude.policies.options:SharedOptions")]
"""Says that `**keywords` are fields of `SharedOptions`."""
