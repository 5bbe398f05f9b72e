from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.errors import ConfigError
from etude.policies.unet1d import (
    ConditionalUnet1D,
    ConvBlock,
    ResidualBlock,
    SinusoidalEmbedding,
    TimeConv,
    TimeGrow,
    mish,
)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def kernel(conv: TimeConv, width: int) -> Tensor:
    """The weight of a TimeConv as conv1d wants it, (out, in, width)."""
    return conv.linear.weight.unflatten(1, (width, -1)).transpose(1, 2)


def test_mish_is_mish_with_and_without_gradient() -> None:
    x = torch.linspace(-40, 40, 2001, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(mish(x).sum(), x)
    (theirs,) = torch.autograd.grad(functional.mish(x).sum(), x)
    torch.testing.assert_close(mish(x), functional.mish(x))
    torch.testing.assert_close(ours, theirs)
    single = torch.linspace(-100, 100, 201, requires_grad=True)
    torch.testing.assert_close(mish(single), functional.mish(single), atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(mish(x), functional.mish(x))


@pytest.mark.parametrize("width, stride", [(1, 1), (3, 1), (5, 1), (3, 2)])
def test_a_time_convolution_is_a_convolution(width: int, stride: int) -> None:
    torch.manual_seed(0)
    conv, x = TimeConv(3, 4, width, stride), torch.randn(2, 8, 3)
    expected = functional.conv1d(x.transpose(1, 2), kernel(conv, width), conv.linear.bias, stride, width // 2)
    torch.testing.assert_close(conv(x), expected.transpose(1, 2))


def test_growing_is_a_transposed_convolution() -> None:
    torch.manual_seed(0)
    grow, x = TimeGrow(3), torch.randn(2, 5, 3)
    even, odd = grow.weight.unflatten(1, (2, 3))  # even steps: taps 1 and 3; odd steps: taps 2 and 0
    weight = torch.stack([odd[1], even[0], odd[0], even[1]], dim=2)
    expected = functional.conv_transpose1d(x.transpose(1, 2), weight, grow.bias, stride=2, padding=1)
    torch.testing.assert_close(grow(x), expected.transpose(1, 2))


def test_initial_weights_spread_like_those_of_torch_layers() -> None:
    torch.manual_seed(0)
    pairs = [
        (TimeConv(64, 64, 5).linear.weight, nn.Conv1d(64, 64, 5).weight),
        (TimeConv(64, 64, 5).linear.bias, nn.Conv1d(64, 64, 5).bias),
        (TimeGrow(64).weight, nn.ConvTranspose1d(64, 64, 4, 2, 1).weight),
        (TimeGrow(64).bias, nn.ConvTranspose1d(64, 64, 4, 2, 1).bias),
    ]
    for ours, theirs in pairs:
        assert theirs is not None
        assert ours.numel() == theirs.numel()
        assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.1)


def test_the_embedding_is_that_of_the_transformer_paper() -> None:
    embedded = SinusoidalEmbedding(8)(torch.tensor([0, 3, 99]))
    assert embedded.shape == (3, 8)
    frequencies = torch.tensor([1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3), 1e-4])
    torch.testing.assert_close(embedded[1], torch.cat([(3 * frequencies).sin(), (3 * frequencies).cos()]))
    with pytest.raises(ConfigError, match="even and at least 4"):
        SinusoidalEmbedding(7)


def published_block(block: ConvBlock, x_BCH: Tensor, width: int) -> Tensor:
    out = functional.conv1d(x_BCH, kernel(block.conv, width), block.conv.linear.bias, padding=width // 2)
    return functional.mish(functional.group_norm(out, block.norm.num_groups, block.norm.weight, block.norm.bias))


def published_unet(unet: ConditionalUnet1D, noisy: Tensor, time_B: Tensor, condition: Tensor, width: int) -> Tensor:
    """The published forward pass, channels first and layer by layer, with the weights of ours."""
    encoded = torch.cat([unet.step_encoder(unet.embed(time_B)), condition], dim=1)
    rows = iter(zip(unet.film.weight.split(unet.film_widths), unet.film.bias.split(unet.film_widths)))

    def residual(block: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(block, ResidualBlock)
        film = functional.linear(functional.mish(encoded), *next(rows)).unsqueeze(2)
        out = published_block(block.first, x, width)
        out = (
            film[:, : block.channels] * out + film[:, block.channels :]
            if film.shape[1] > block.channels
            else out + film
        )
        shortcut = block.shortcut
        if isinstance(shortcut, TimeConv):
            x = functional.conv1d(x, kernel(shortcut, 1), shortcut.linear.bias)
        return published_block(block.second, out, width) + x

    x, skips, levels = noisy.transpose(1, 2), [], len(unet.down) // 2
    for level in range(levels):
        x = residual(unet.down[2 * level + 1], residual(unet.down[2 * level], x))
        skips.append(x)
        if level < levels - 1:
            shrink = unet.shrink[level]
            assert isinstance(shrink, TimeConv)
            x = functional.conv1d(x, kernel(shrink, 3), shrink.linear.bias, stride=2, padding=1)
    x = residual(unet.middle[1], residual(unet.middle[0], x))
    for level in range(levels - 1):
        x = residual(unet.up[2 * level], torch.cat([x, skips.pop()], dim=1))
        x = unet.grow[level](residual(unet.up[2 * level + 1], x).transpose(1, 2)).transpose(1, 2)
    x = functional.conv1d(published_block(unet.last, x, width), unet.head.weight.unsqueeze(2), unet.head.bias)
    return x.transpose(1, 2)


@pytest.mark.parametrize("film_scale", [True, False])
@pytest.mark.parametrize("dims, width", [((16, 32, 64), 5), ((8, 16), 3), ((8,), 5)])
def test_the_forward_pass_is_the_published_one(dims: tuple[int, ...], width: int, film_scale: bool) -> None:
    torch.manual_seed(0)
    unet = ConditionalUnet1D(3, 6, down_dims=dims, kernel_size=width, step_embed_dim=16, film_scale=film_scale)
    noisy, time_B, condition = torch.randn(4, 8, 3), torch.randint(0, 100, (4,)), torch.randn(4, 6)
    expected = published_unet(unet, noisy, time_B, condition, width)
    torch.testing.assert_close(unet(noisy, time_B, condition), expected, atol=2e-5, rtol=1e-4)


def arithmetic(action: int, condition: int, dims: tuple[int, ...], width: int, embed: int, scale: int = 2) -> int:
    """The parameters of the published architecture, layer by layer."""
    film_in = embed + condition

    def residual(at: int, to: int) -> int:
        convolutions = at * to * width + to + to * to * width + to
        norms = 2 * 2 * to
        film = film_in * scale * to + scale * to
        return convolutions + norms + film + (at * to + to if at != to else 0)

    levels = list(pairwise([action, *dims]))
    total = embed * 4 * embed + 4 * embed + 4 * embed * embed + embed
    total += sum(residual(at, to) + residual(to, to) for at, to in levels)
    total += 2 * residual(dims[-1], dims[-1])
    total += sum(residual(2 * to, at) + residual(at, at) for at, to in levels[1:])
    total += sum(3 * c * c + c for c in dims[:-1])  # halving: kernel 3
    total += sum(4 * c * c + c for c in dims[:-1])  # doubling: kernel 4
    total += dims[0] * dims[0] * width + dims[0] + 2 * dims[0] + dims[0] * action + action
    return total


@pytest.mark.parametrize(
    "action, condition, dims, embed, published",
    [
        # Diffusion Policy, PushT from keypoints: 2 observations of 20 numbers. Its code, run, has as many.
        (2, 40, (256, 512, 1024), 256, 65_783_298),
        # LeRobot's default on PushT images: 2 x (64 keypoint coordinates + 2); with its ResNet-18 (11,176,512), the
        # projection to 32 keypoints (512 x 32 + 32) and a layer on them (64 x 64 + 64) that is 262,709,026.
        (2, 132, (512, 1024, 2048), 128, 251_511_938),
    ],
)
def test_parameter_counts_are_the_published_ones(
    action: int, condition: int, dims: tuple[int, ...], embed: int, published: int
) -> None:
    with torch.device("meta"):
        unet = ConditionalUnet1D(action, condition, down_dims=dims, step_embed_dim=embed)
    assert count(unet) == arithmetic(action, condition, dims, 5, embed) == published


def test_the_whole_published_policy_has_as_many_parameters_as_lerobots() -> None:
    assert 251_511_938 + 11_176_512 + (512 * 32 + 32) + (64 * 64 + 64) == 262_709_026


@pytest.mark.parametrize("horizon, near", [(15, "12 or 16"), (18, "16 or 20"), (3, "4")])
def test_horizons_that_cannot_be_halved_are_refused(horizon: int, near: str) -> None:
    unet = ConditionalUnet1D(2, 0, down_dims=(8, 8, 8), step_embed_dim=8)
    with pytest.raises(
        ConfigError, match=f"horizon {horizon} must be a multiple of 4 for a UNet of 3 levels; try {near}$"
    ):
        unet(torch.zeros(1, horizon, 2), torch.zeros(1))


@pytest.mark.parametrize("horizon", [4, 8, 12, 16, 20])
def test_multiples_of_four_are_enough_for_three_levels(horizon: int) -> None:
    unet = ConditionalUnet1D(2, 3, down_dims=(8, 8, 16), step_embed_dim=8)
    assert unet(torch.randn(2, horizon, 2), torch.zeros(2), torch.randn(2, 3)).shape == (2, horizon, 2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"down_dims": (8, 12)}, "multiples of the 8 groups"),
        ({"down_dims": ()}, "multiples of the 8 groups"),
        ({"kernel_size": 4}, "must be odd"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConditionalUnet1D(2, 3, **{"down_dims": (8, 16), **options})  # type: ignore[arg-type]


def test_every_parameter_learns() -> None:
    torch.manual_seed(0)
    unet = ConditionalUnet1D(2, 3, down_dims=(8, 16), step_embed_dim=8)
    unet(torch.randn(4, 8, 2), torch.arange(4), torch.randn(4, 3)).square().sum().backward()
    silent = [name for name, p in unet.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []
