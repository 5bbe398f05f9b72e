"""Image encoders: residual networks of `transformers`, from scratch or from weights at hand.

Shape letters: N images, C channels, H height, W width, K keypoints.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.errors import ConfigError, MissingExtraError

Norm = Literal["auto", "group", "frozen", "batch"]
NORMS: tuple[Norm, ...] = ("auto", "group", "frozen", "batch")
GROUP_CHANNELS = 16

# Widths of the stem and the four stages, blocks per stage, kind of block.
BACKBONES: dict[str, tuple[int, list[int], list[int], str]] = {
    "resnet10_small": (32, [32, 64, 128, 256], [1, 1, 1, 1], "basic"),
    "resnet10": (64, [64, 128, 256, 512], [1, 1, 1, 1], "basic"),
    "resnet18": (64, [64, 128, 256, 512], [2, 2, 2, 2], "basic"),
    "resnet34": (64, [64, 128, 256, 512], [3, 4, 6, 3], "basic"),
    "resnet50": (64, [256, 512, 1024, 2048], [3, 4, 6, 3], "bottleneck"),
}


class ImageEncoder(nn.Module):
    """Turn normalised images into feature maps 32 times smaller.

    Args:
        channels: Channels of the images.
        backbone: resnet18, resnet34, resnet50, resnet10, or resnet10_small for CPUs.
        weights: Directory (or name on a hub that can be reached) of pretrained weights; None starts from scratch.
        norm: group (fit to learn from scratch in small batches), frozen (BatchNorm as it was pretrained) or batch;
            auto is frozen with weights and group without.
        crop: Height and width to cut out, at random in training and from the middle otherwise.
        fetch_weights: False leaves the weights to be loaded by the caller.
    """

    def __init__(
        self,
        channels: int = 3,
        *,
        backbone: str = "resnet18",
        weights: str | None = None,
        norm: Norm = "auto",
        crop: list[int] | None = None,
        fetch_weights: bool = True,
    ) -> None:
        super().__init__()
        if backbone not in BACKBONES or norm not in NORMS:
            raise ConfigError(
                f"image_backbone {backbone!r} with image_norm {norm!r} is unknown; backbones are "
                f"{', '.join(BACKBONES)}, norms {', '.join(NORMS)}"
            )
        if weights is not None and norm == "group":
            raise ConfigError("image_norm 'group' would spoil pretrained weights; use frozen or batch, or no weights")
        if norm == "auto":
            norm = "group" if weights is None else "frozen"
        self.crop = None if crop is None else (crop[0], crop[1])
        self.out_channels = BACKBONES[backbone][1][-1]
        self.net = _make_resnet(channels, backbone, weights if fetch_weights else None)
        if norm != "batch":
            _replace_norms(self.net, frozen=norm == "frozen")
        _replace_convolutions(self.net)
        for module in self.net.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = True
        # What the fast kernels want: a step of ACT with a camera took 0.87 to 0.94 of the time on a CPU.
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return the last feature map, (N, out_channels, H', W')."""
        if self.crop is not None:
            images_NCHW = crop_images(images_NCHW, self.crop, at_random=self.training)
        out: Tensor = self.net(images_NCHW).last_hidden_state
        return out


class SpatialSoftmax(nn.Module):
    """Reduce a feature map to the expected positions of some keypoints, as in Diffusion Policy.

    Args:
        channels: Channels of the feature map.
        keypoints: How many points to locate.
    """

    def __init__(self, channels: int, keypoints: int = 32) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, keypoints, kernel_size=1)
        self.out_dim = 2 * keypoints

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        """Return x and y of each keypoint in -1..1, (N, 2 K)."""
        heat_NKHW = self.project(maps_NCHW)
        height, width = heat_NKHW.shape[2:]
        shares_NKHW = heat_NKHW.flatten(2).softmax(-1).view_as(heat_NKHW)
        options: dict[str, Any] = {"device": heat_NKHW.device, "dtype": heat_NKHW.dtype}
        x_NK = shares_NKHW.sum(2) @ torch.linspace(-1, 1, width, **options)
        y_NK = shares_NKHW.sum(3) @ torch.linspace(-1, 1, height, **options)
        return torch.stack([x_NK, y_NK], dim=-1).flatten(1)


class KeypointHead(nn.Sequential):
    """Reduce a feature map to keypoints, and these to features if a width is given.

    Args:
        channels: Channels of the feature map.
        keypoints: How many points to locate.
        width: Width of a linear layer with ReLU over the points; None leaves the points as they are.
    """

    def __init__(self, channels: int, keypoints: int = 32, width: int | None = None) -> None:
        points = SpatialSoftmax(channels, keypoints)
        super().__init__(points, *([] if width is None else [nn.Linear(points.out_dim, width), nn.ReLU()]))
        self.out_dim = points.out_dim if width is None else width


def crop_images(images_NCHW: Tensor, size: tuple[int, int], *, at_random: bool) -> Tensor:
    """Cut a window out of each image: from the middle, or at a place of its own."""
    height, width = size
    spare_y, spare_x = images_NCHW.shape[2] - height, images_NCHW.shape[3] - width
    if spare_y < 0 or spare_x < 0:
        raise ConfigError(f"image_crop {list(size)} is larger than images of {list(images_NCHW.shape[2:])}")
    if not at_random:
        top, left = spare_y // 2, spare_x // 2
        return images_NCHW[:, :, top : top + height, left : left + width]
    count, channels, device = images_NCHW.shape[0], images_NCHW.shape[1], images_NCHW.device
    top_N = torch.randint(spare_y + 1, (count,)).to(device)
    left_N = torch.randint(spare_x + 1, (count,)).to(device)
    rows_NH = top_N[:, None] + torch.arange(height, device=device)
    columns_NW = left_N[:, None] + torch.arange(width, device=device)
    which_N, which_C = torch.arange(count, device=device), torch.arange(channels, device=device)
    return images_NCHW[which_N[:, None, None, None], which_C[:, None, None], rows_NH[:, None, :, None],
                       columns_NW[:, None, None, :]]  # fmt: skip


class FrozenBatchNorm(nn.Module):
    """BatchNorm with the statistics and weights it was pretrained with; none of them learns."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps = norm.eps
        for name in ("running_mean", "running_var", "weight", "bias"):
            self.register_buffer(name, getattr(norm, name).detach().clone())

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        """Return the scaled and shifted feature map."""
        mean, var, weight, bias = (self.get_buffer(name) for name in ("running_mean", "running_var", "weight", "bias"))
        return functional.batch_norm(maps_NCHW, mean, var, weight, bias, training=False, eps=self.eps)


class MapConv(nn.Module):
    """A convolution without bias, which a CPU trains as one matrix product where maps are small.

    A product over windows saved 26 to 58 % of the time of the last, widest layers there and back (32 to 8 images of 96
    pixels), most of it in the gradient of the weights. On larger maps copying the windows costs more than it saves.

    Args:
        layer: The convolution, whose weights it takes over.
    """

    PLACES = 16
    """Output channels for each place of the output map, from which on the product is the faster."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight = layer.weight
        self.size, self.stride = layer.kernel_size[0], layer.stride[0]

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        """Return the convolved maps; outside of a map there are zeros."""
        height, width = (math.ceil(length / self.stride) for length in maps_NCHW.shape[2:])
        small = self.PLACES * height * width <= self.weight.shape[0]
        on_cpu = maps_NCHW.device.type == "cpu" and not torch.compiler.is_compiling()
        if not (on_cpu and small and torch.is_grad_enabled()):
            return functional.conv2d(maps_NCHW, self.weight, None, self.stride, self.size // 2)
        return self._multiply(maps_NCHW)

    def _multiply(self, maps_NCHW: Tensor) -> Tensor:
        height, width = maps_NCHW.shape[2:]
        around, stride = self.size // 2, self.stride
        padded_NHWC = functional.pad(maps_NCHW.permute(0, 2, 3, 1), (0, 0, *[around] * 4))
        windows = [
            padded_NHWC[:, y : y + height : stride, x : x + width : stride]
            for y in range(self.size)
            for x in range(self.size)
        ]
        # The channels lie last in memory: the matrix is a view of the weights, and its gradient one of theirs.
        matrix = self.weight.permute(0, 2, 3, 1).flatten(1)
        return functional.linear(torch.cat(windows, dim=3), matrix).permute(0, 3, 1, 2)


def _make_resnet(channels: int, backbone: str, weights: str | None) -> nn.Module:
    try:
        from transformers import ResNetConfig, ResNetModel
    except ImportError as error:
        raise MissingExtraError("image encoders need transformers; run: pip install 'etude[hf]'") from error
    stem, widths, depths, kind = BACKBONES[backbone]
    config = ResNetConfig(
        num_channels=channels, embedding_size=stem, hidden_sizes=widths, depths=depths, layer_type=kind,
    )  # fmt: skip
    if weights is None:
        made: nn.Module = ResNetModel(config)  # type: ignore[no-untyped-call]
        return made
    try:
        loaded: nn.Module = ResNetModel.from_pretrained(weights, config=config)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"image_weights: {weights!r} gives no weights for {backbone}: {reason}") from None
    return loaded


def _replace_norms(module: nn.Module, *, frozen: bool) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            groups = max(1, child.num_features // GROUP_CHANNELS)
            norm: nn.Module = FrozenBatchNorm(child) if frozen else nn.GroupNorm(groups, child.num_features)
            setattr(module, name, norm)
        else:
            _replace_norms(child, frozen=frozen)


def _replace_convolutions(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            setattr(module, name, MapConv(child))
        else:
            _replace_convolutions(child)


def resize_images(images_NCHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale images to a height and width, smoothed where they shrink."""
    if images_NCHW.shape[2:] == size:
        return images_NCHW
    return functional.interpolate(images_NCHW, size, mode="bilinear", antialias=True)
