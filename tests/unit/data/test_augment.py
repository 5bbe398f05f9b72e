"""Augment: pictures change by their own key, keep their shape, and colour means what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.data import Augment
from etude.data.order import Keys
from etude.errors import DataError
from etude.rng import fold, fold_array

ALL = {"crop": 3, "brightness": 0.3, "contrast": 0.3, "saturation": 0.5, "hue": 0.1, "degrees": 8, "translate": 0.05}


def keys_of(count: int, first: int = 0) -> Keys:
    return fold_array(fold(1), np.arange(first, first + count))


def pictures(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_each_sample_depends_on_its_own_key_alone() -> None:
    images, augment = pictures(6, 3, 20, 24), Augment(**ALL, scale=0.1)
    whole = augment(images, keys_of(6))
    parts = torch.cat([augment(images[:2], keys_of(2)), augment(images[2:], keys_of(4, 2))])
    assert whole.dtype == torch.uint8 and whole.shape == images.shape
    assert (whole.int() - parts.int()).abs().max() <= 1  # sums of floats may round either way
    assert torch.equal(whole, augment(images, keys_of(6)))
    assert not torch.equal(whole, augment(images, keys_of(6, 6)))
    assert not torch.equal(whole, augment(images, keys_of(6), 1))


def test_frames_of_a_history_are_changed_alike() -> None:
    still = pictures(2, 1, 3, 16, 16).expand(2, 4, 3, 16, 16)
    changed = Augment(**ALL)(still, keys_of(2))
    assert changed.shape == still.shape
    assert torch.equal(changed, changed[:, :1].expand_as(changed))
    assert not torch.equal(changed, still)


def test_nothing_asked_for_changes_nothing() -> None:
    images = pictures(2, 3, 8, 8)
    assert Augment()(images, keys_of(2)) is images
    assert torch.equal(Augment(brightness=0.5, degrees=10, probability=0.0)(images, keys_of(2)), images)


def test_a_crop_moves_by_whole_pixels_and_repeats_the_edge() -> None:
    images = pictures(64, 3, 12, 12)
    moved = Augment(crop=2)(images, keys_of(64))
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode="replicate").to(torch.uint8)
    offsets = set()
    for before, after in zip(padded, moved):
        found = [(y, x) for y in range(5) for x in range(5) if torch.equal(before[:, y : y + 12, x : x + 12], after)]
        assert len(found) == 1
        offsets.add(found[0])
    assert len(offsets) > 15


def test_colours_change_as_named() -> None:
    grey = torch.full((32, 3, 4, 4), 100, dtype=torch.uint8)
    bright = Augment(brightness=0.5)(grey, keys_of(32)).float().mean((1, 2, 3))
    assert bright.min() >= 50 and bright.max() <= 150 and bright.std() > 15
    for kind in ({"saturation": 1.0}, {"hue": 0.5}, {"contrast": 1.0}):
        assert (Augment(**kind)(grey, keys_of(32)).int() - 100).abs().max() <= 1
    red = torch.zeros(32, 3, 4, 4, dtype=torch.uint8)
    red[:, 0] = 200
    turned = Augment(hue=0.5)(red, keys_of(32)).float().mean((2, 3))
    luma = turned @ torch.tensor([0.299, 0.587, 0.114])
    assert turned[:, 0].min() < 60
    assert luma.std() < 25
    one_channel = Augment(brightness=0.5, contrast=0.5, hue=0.5)(grey[:, :1], keys_of(32))
    assert one_channel.shape == (32, 1, 4, 4)


def test_small_motions_keep_the_middle() -> None:
    images = torch.zeros(16, 3, 21, 31, dtype=torch.uint8)
    images[:, :, 8:13, 13:18] = 255
    moved = Augment(degrees=15, scale=0.2)(images, keys_of(16))
    assert (moved[:, :, 10, 15] > 250).all()
    assert (moved[:, :, 0, 0] == 0).all()
    shifted = Augment(translate=0.1)(images, keys_of(16))
    assert (shifted.float().sum((1, 2, 3)) / images.float().sum((1, 2, 3)) - 1).abs().max() < 0.05
    assert not torch.equal(shifted, images)


def test_wrong_strengths_are_refused() -> None:
    with pytest.raises(DataError, match=r"hue must lie between 0 and 0\.5, got 0\.7"):
        Augment(hue=0.7)
    with pytest.raises(DataError, match="crop must lie"):
        Augment(crop=-1)
    with pytest.raises(DataError, match="'cropp' is unknown; there are crop, brightness"):
        Augment.of({"cropp": 2})
