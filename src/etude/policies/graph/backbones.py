"""Image backbones of `transformers`: from their configuration, or with the weights of a folder. Nothing is downloaded.

Shape letters: N images, C channels, H height, W width, T tokens, D width.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from torch import Tensor, nn

from etude.errors import ConfigError, MissingExtraError, one_line
from etude.policies.vision import ImageEncoder, Norm

Pool = Literal["tokens", "cls", "mean"]


def resnet(
    channels: int = 3, backbone: str = "resnet18", weights: str | None = None, norm: Norm = "auto"
) -> ImageEncoder:
    """Turn normalised images into feature maps 32 times smaller, (N, C, H / 32, W / 32).

    Args:
        channels: Channels of the images.
        backbone: resnet18, resnet34, resnet50, resnet10, or resnet10_small for CPUs.
        weights: Folder of pretrained weights; null starts from scratch.
        norm: auto, group, frozen or batch: the normalisation layers.
    """
    return ImageEncoder(channels, backbone=backbone, weights=_folder(weights), norm=norm)


def vit(config: dict[str, Any] | None = None, weights: str | None = None, pool: Pool = "tokens") -> VisionTokens:
    """Turn normalised images into tokens with a ViT, (N, T, D).

    Args:
        config: Sizes, by the names of transformers' ViTConfig.
        weights: Folder of pretrained weights, which brings its own sizes.
        pool: tokens for all of them, cls for the first, mean for their mean.
    """
    return VisionTokens("ViTModel", "ViTConfig", config, weights, pool, {"add_pooling_layer": False})


def dinov2(config: dict[str, Any] | None = None, weights: str | None = None, pool: Pool = "tokens") -> VisionTokens:
    """Turn normalised images into tokens with a DINOv2, (N, T, D).

    Args:
        config: Sizes, by the names of transformers' Dinov2Config.
        weights: Folder of pretrained weights, which brings its own sizes.
        pool: tokens for all of them, cls for the first, mean for their mean.
    """
    return VisionTokens("Dinov2Model", "Dinov2Config", config, weights, pool, {})


def siglip(config: dict[str, Any] | None = None, weights: str | None = None, pool: Pool = "tokens") -> VisionTokens:
    """Turn normalised images into tokens with the vision half of SigLIP, (N, T, D); it has no class token.

    Args:
        config: Sizes, by the names of transformers' SiglipVisionConfig.
        weights: Folder of pretrained weights, which brings its own sizes.
        pool: tokens for all of them, or mean for their mean.
    """
    if pool == "cls":
        raise ConfigError("SigLIP has no class token; pool tokens or mean")
    return VisionTokens("SiglipVisionModel", "SiglipVisionConfig", config, weights, pool, {})


class VisionTokens(nn.Module):
    """A vision transformer of `transformers` that returns its tokens."""

    def __init__(
        self,
        model: str,
        configuration: str,
        config: dict[str, Any] | None,
        weights: str | None,
        pool: Pool,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        if (config is None) == (weights is None):
            raise ConfigError("give either config, to start from scratch, or weights, a folder that brings its own")
        if pool not in ("tokens", "cls", "mean"):
            raise ConfigError(f"pool must be tokens, cls or mean, got {pool!r}")
        self.net = _load(model, weights, options) if weights else _make(model, configuration, config or {}, options)
        self.out_features: int = self.net.config.hidden_size
        self.pool = pool

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return the tokens, (N, T, D), or one vector for each image, (N, D)."""
        tokens_NTD: Tensor = self.net(pixel_values=images_NCHW).last_hidden_state
        if self.pool == "tokens":
            return tokens_NTD
        return tokens_NTD[:, 0] if self.pool == "cls" else tokens_NTD.mean(1)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("image backbones need transformers; run: pip install 'etude[hf]'") from error
    return transformers


def _make(model: str, configuration: str, config: dict[str, Any], options: dict[str, Any]) -> Any:
    library = _transformers()
    kind = getattr(library, configuration)
    known = kind().to_dict()
    stray = next((key for key in config if key not in known), None)
    if stray is not None:
        from etude.reading.suggest import did_you_mean

        raise ConfigError(f"config: {configuration} has no {stray!r}{did_you_mean(stray, known)}")
    return getattr(library, model)(kind(**config), **options)


def _load(model: str, weights: str, options: dict[str, Any]) -> Any:
    library, folder = _transformers(), _folder(weights)
    try:
        return getattr(library, model).from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"weights: {folder!r} gives none for {model}: {one_line(error)}") from None


def _folder(weights: str | None) -> str | None:
    if weights is None:
        return None
    folder = os.path.expanduser(weights)
    if not os.path.isdir(folder):
        raise ConfigError(f"weights: there is no folder {folder!r}; nothing is downloaded")
    return folder
