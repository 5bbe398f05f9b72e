"""Presets: valid, and the same as the files in configs/robot."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.config.load import load
from etude.reading import yaml12
from etude.simulation.presets import FAMILIES, PRESETS, Family, make_config

FILES: dict[str, tuple[str, Family]] = {
    **{f"metaworld-{policy}": (policy, "") for policy in PRESETS},
    **{f"pusht-{policy}": (policy, "pusht") for policy in ("act", "diffusion", "mlp")},
    "metaworld-images-act": ("act", "images"),
    "metaworld-10-tasks": ("act", "multitask"),
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_preset_is_a_valid_configuration_and_has_a_file(name: str, repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml12.write(make_config(FILES[name][0], "x", family=FILES[name][1])))
    preset = load(path).config
    file = load(repository / "configs/robot" / f"{name}.yaml").config
    measured = {field: getattr(file.training, field) for field in ("evaluate_every", "best_metric", "best_mode")}
    assert file.policy == preset.policy
    assert file.training == preset.training.model_copy(update=measured)


def test_every_file_is_a_preset(repository: Path) -> None:
    assert {path.stem for path in (repository / "configs/robot").glob("*.yaml")} == set(FILES)


def test_seed_and_length_can_be_chosen() -> None:
    training = make_config("act", "x", seed=3, steps=7)["training"]
    assert (training["seed"], training["training_steps"]) == (3, 7)
    assert PRESETS["act"]["training"]["training_steps"] != 7


def test_a_family_changes_what_it_names_and_nothing_else() -> None:
    plain, images = make_config("act", "x"), make_config("act", "x", family="images")
    change = FAMILIES["images"]["*"]
    assert images["policy"]["params"] == {**plain["policy"]["params"], **change["params"]}
    assert images["training"] == {**plain["training"], **change["training"]}
    assert make_config("act", "x") == plain
