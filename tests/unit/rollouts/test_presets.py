"""Presets: valid, and the same as the files in configs/metaworld."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.config import yaml12
from etude.config.load import load
from etude.rollouts.presets import PRESETS, make_config


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_every_preset_is_a_valid_configuration_and_has_a_file(policy: str, repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml12.write(make_config(policy, "data/metaworld-pick-place")))
    preset = load(path).config
    file = load(repository / "configs/metaworld" / f"{policy}.yaml").config
    assert (file.policy, file.data, file.training) == (preset.policy, preset.data, preset.training)


def test_seed_and_length_can_be_chosen() -> None:
    training = make_config("act", "x", seed=3, steps=7)["training"]
    assert (training["seed"], training["training_steps"]) == (3, 7)
    assert PRESETS["act"]["training"]["training_steps"] != 7
