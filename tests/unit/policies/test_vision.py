"""Image encoders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from etude import Trainer, TrainingConfiguration
from etude.data.stream import StreamData
from etude.errors import ConfigError, DataError
from etude.policies import ACT
from etude.policies.observation import ImageOptions, Inputs, ObservationEncoder, make_image_encoder
from etude.policies.vision import (
    FrozenBatchNorm,
    ImageEncoder,
    KeypointHead,
    MapConv,
    SpatialSoftmax,
    crop_images,
    resize_images,
)
from etude.types import DataSpec, Feature
from tests.unit.policies.samples import make_batch, make_spec, now, parameters

pytestmark = pytest.mark.slow  # transformers takes seconds to import


def conv(width_in: int, width_out: int, kernel: int) -> int:
    return width_in * width_out * kernel * kernel + 2 * width_out  # a normalisation follows each


def test_resnet18_has_the_parameters_of_resnet18() -> None:
    blocks = 4 * conv(64, 64, 3)
    for width in (128, 256, 512):
        blocks += (
            conv(width // 2, width, 3) + conv(width, width, 3) + conv(width // 2, width, 1) + 2 * conv(width, width, 3)
        )
    assert parameters(ImageEncoder()) == conv(3, 64, 7) + blocks == 11_176_512
    assert parameters(ImageEncoder(norm="frozen")) == 11_176_512 - 9_600
    assert parameters(ImageEncoder(norm="batch")) == 11_176_512


@pytest.mark.parametrize("backbone, channels", [("resnet10_small", 256), ("resnet10", 512), ("resnet50", 2048)])
@pytest.mark.parametrize("height, width", [(64, 64), (96, 70)])
def test_maps_are_thirty_two_times_smaller(backbone: str, channels: int, height: int, width: int) -> None:
    encoder = ImageEncoder(backbone=backbone)
    with torch.no_grad():
        maps = encoder(torch.zeros(1, 3, height, width))
    assert encoder.out_channels == channels
    assert maps.shape == (1, channels, math.ceil(height / 32), math.ceil(width / 32))


def test_group_norm_makes_a_sample_independent_of_its_batch() -> None:
    encoder = ImageEncoder(backbone="resnet10_small").train()
    images = torch.rand(3, 3, 64, 64)
    torch.testing.assert_close(encoder(images)[:1], encoder(images[:1]), atol=1e-5, rtol=1e-4)


def test_frozen_normalisation_is_that_of_evaluation() -> None:
    norm = nn.BatchNorm2d(4)
    for _ in range(3):
        norm(torch.randn(8, 4, 5, 5) * 3 + 1)
    frozen = FrozenBatchNorm(norm).train()
    images = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(frozen(images), norm.eval()(images))
    assert list(frozen.parameters()) == []


def test_weights_come_from_a_directory(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = ImageEncoder(backbone="resnet10_small", norm="batch")
    source.net.save_pretrained(tmp_path)
    loaded = ImageEncoder(backbone="resnet10_small", weights=str(tmp_path))
    assert any(isinstance(module, FrozenBatchNorm) for module in loaded.modules())
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(loaded(images), source.eval()(images), atol=1e-5, rtol=1e-4)


def test_a_saved_policy_does_not_need_the_weights_it_started_from(tmp_path: Path) -> None:
    ImageEncoder(backbone="resnet10_small", norm="batch").net.save_pretrained(tmp_path / "weights")
    sizes: dict[str, Any] = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "chunk_size": 2}
    policy = ACT(image_backbone="resnet10_small", image_weights=str(tmp_path / "weights"), **sizes)
    spec = make_spec(cameras=("top",))
    policy.build(spec)
    policy.save_pretrained(tmp_path / "policy")
    for path in (tmp_path / "weights").iterdir():
        path.unlink()
    observation = now(make_batch(spec, size=1))
    loaded = ACT.from_pretrained(tmp_path / "policy")
    assert torch.equal(loaded.predict_action_chunk(observation), policy.predict_action_chunk(observation))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backbone": "resnet19"}, "'resnet19'.*is unknown; backbones are"),
        ({"norm": "layer"}, "norms auto"),
        ({"weights": "somewhere", "norm": "group"}, "would spoil pretrained weights"),
        ({"weights": "/nonexistent/resnet"}, "image_weights: '/nonexistent/resnet' gives no weights for resnet18"),
    ],
)
def test_choices_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImageEncoder(**options)


def test_cameras_with_different_channels_are_refused() -> None:
    images = {f"observation.images.{c}": Feature((c, 8, 8), "uint8", "image") for c in (1, 3)}
    with pytest.raises(DataError, match=r"\[1, 3\] channels; make them alike"):
        make_image_encoder(Inputs(DataSpec(images)), ImageOptions())


# ---- crops and sizes -------------------------------------------------------------------------------------------------


def test_crops_come_from_the_middle_or_from_a_place_of_their_own() -> None:
    rows, columns = torch.meshgrid(torch.arange(10.0), torch.arange(12.0), indexing="ij")
    images = torch.stack([rows, columns]).expand(64, -1, -1, -1)
    middle = crop_images(images, (6, 8), at_random=False)
    assert torch.equal(middle, images[:, :, 2:8, 2:10])
    torch.manual_seed(0)
    cut = crop_images(images, (6, 8), at_random=True)
    tops, lefts = cut[:, 0, 0, 0], cut[:, 1, 0, 0]
    assert set(tops.tolist()) == set(range(5)) and set(lefts.tolist()) == set(range(5))
    assert torch.equal(cut[:, 0] - tops[:, None, None], rows[:6, :8].expand(64, -1, -1))
    assert torch.equal(cut[:, 1] - lefts[:, None, None], columns[:6, :8].expand(64, -1, -1))
    with pytest.raises(ConfigError, match="larger than images"):
        crop_images(images, (11, 8), at_random=False)


def test_crops_are_random_in_training_only() -> None:
    encoder = ImageEncoder(backbone="resnet10_small", crop=[56, 56])
    images = torch.rand(2, 3, 64, 64)
    encoder.eval()
    assert torch.equal(encoder(images), encoder(images))
    encoder.train()
    assert not torch.equal(encoder(images), encoder(images))


def test_images_are_scaled_to_one_size() -> None:
    spec = make_spec(cameras=("top",), size=80)
    encoder = ObservationEncoder(spec, images=ImageOptions("resnet10_small", size=[64, 64]))
    batch = {name: value.float() for name, value in now(make_batch(spec)).items()}
    assert encoder(batch).shape == (4, encoder.out_dim)
    assert resize_images(torch.rand(1, 3, 80, 80), (64, 64)).shape == (1, 3, 64, 64)


# ---- keypoints -------------------------------------------------------------------------------------------------------


def test_a_keypoint_is_where_the_map_is_hot() -> None:
    softmax = SpatialSoftmax(1, 1)
    nn.init.ones_(softmax.project.weight)
    nn.init.zeros_(softmax.project.bias)
    maps = torch.zeros(2, 1, 5, 9)
    maps[0, 0, 0, 8] = 100.0
    maps[1, 0, 4, 4] = 100.0
    torch.testing.assert_close(softmax(maps), torch.tensor([[1.0, -1.0], [0.0, 1.0]]))


def test_features_are_laid_out_by_step() -> None:
    spec = make_spec(environment=2, cameras=("left", "right"), tasks=3, text=7)
    encoder = ObservationEncoder(
        spec, 2, images=ImageOptions("resnet10_small"), keypoints=4, image_dim=10, task_dim=6
    ).eval()
    assert encoder.step_dim == 5 + 2 + 2 * 10 and encoder.context_dim == 7 + 6
    assert encoder.out_dim == 2 * encoder.step_dim + 13
    batch = {name: value.float() if "image" in name else value for name, value in make_batch(spec, history=2).items()}
    features = encoder(batch)
    assert features.shape == (4, encoder.out_dim)
    assert torch.equal(features[:, :5], batch["observation.state"][:, 0])
    assert torch.equal(features[:, encoder.step_dim : encoder.step_dim + 5], batch["observation.state"][:, 1])
    # Each camera and step is encoded alike, wherever it stands.
    swapped = {**batch, "observation.images.left": batch["observation.images.right"].flip(1)}
    steps, other = encoder.steps(batch), encoder.steps(swapped)
    torch.testing.assert_close(other[:, 0, 7:17], steps[:, 1, 17:27], atol=1e-5, rtol=1e-4)


def test_a_head_may_have_a_layer_over_its_keypoints() -> None:
    assert parameters(KeypointHead(512, 32, 64)) == 512 * 32 + 32 + 64 * 64 + 64
    assert KeypointHead(512, 32).out_dim == 64


@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (1, 2)])
@pytest.mark.parametrize("height, width", [(3, 2), (4, 3), (40, 40)])
def test_a_convolution_of_maps_is_a_convolution_with_and_without_gradient(
    kernel: int, stride: int, height: int, width: int
) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 128, kernel, stride, kernel // 2, bias=False).double()
    layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ours = MapConv(layer)
    maps = torch.randn(2, 8, height, width, dtype=torch.float64).requires_grad_()
    out = ours(maps)
    asked = torch.randn_like(out)
    found = torch.autograd.grad(out, [maps, ours.weight], asked)
    expected = torch.autograd.grad(layer(maps), [maps, layer.weight], asked)
    torch.testing.assert_close(out, layer(maps))
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(ours(maps), out)


def test_small_maps_are_trained_by_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    multiply = MapConv._multiply
    monkeypatch.setattr(MapConv, "_multiply", lambda layer, maps: seen.append(maps.shape) or multiply(layer, maps))
    encoder, images = ImageEncoder(backbone="resnet10"), torch.rand(2, 3, 96, 96)
    encoder(images)
    assert seen == [(2, 256, 6, 6), (2, 512, 3, 3), (2, 256, 6, 6)]
    with torch.no_grad():
        encoder(images)
    assert len(seen) == 3


def test_training_with_a_camera_resumes_bit_for_bit(tmp_path: Path) -> None:
    spec = make_spec(cameras=("wrist",))
    batches = [make_batch(spec, 4, 6, seed=number) for number in range(3)]

    def train(run: Path, steps: int) -> ACT:
        sizes = {"dim_model": 32, "n_heads": 4, "dim_feedforward": 64, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
        policy = ACT(chunk_size=6, image_backbone="resnet10_small", **sizes)
        config = TrainingConfiguration(training_steps=steps, batch_size=4, lr=1e-3, save_every=2, num_threads=1)
        data = StreamData(batches, batched=True, spec=spec)
        Trainer(policy, data, config=config, run=run, loggers=[], show_progress=False).fit()
        return policy

    whole = train(tmp_path / "whole", 4).state_dict()
    train(tmp_path / "parts", 2)
    resumed = train(tmp_path / "parts", 4).state_dict()
    assert [name for name, value in whole.items() if not torch.equal(value, resumed[name])] == []
