"""The section `online`: read, checked and stored like all others, and built into data that plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.config.build import build
from etude.config.load import load
from etude.errors import ConfigError
from etude.reading import yaml12
from etude.registry import DATASET_BUILDER_REGISTRY, ENVIRONMENT_REGISTRY
from etude.rollouts.online import OnlineData
from tests.unit.rollouts.test_online import GuidedPoint, demonstrations
from tests.unit.simulation.point_reach import PointReach


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "point_reach", PointReach)
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "guided_point", GuidedPoint)
    monkeypatch.setitem(DATASET_BUILDER_REGISTRY._entries, "points", points)


def points() -> Any:
    """Return a few demonstrations."""
    return demonstrations()


def write(**online: Any) -> Path:
    section = {"env": "guided_point", "label": "expert", "episodes_per_round": 2, "updates_per_round": 3, **online}
    values: dict[str, Any] = {
        "policy": {"type": "mlp", "params": {"hidden": [8]}}, "data": "points", "algorithm": "bc",
        "online": {key: value for key, value in section.items() if value is not ...},
        "training": {"batch_size": 8, "training_steps": 4}, "loggers": [], "run": {"root": "runs", "name": "a"},
    }  # fmt: skip
    Path("a.yaml").write_text(yaml12.write(values))
    return Path("a.yaml")


def test_a_file_with_the_section_trains_and_its_stored_form_is_the_same() -> None:
    loaded = load(write(buffer={"max_frames": 500}, share=0.25, noise=0.1))
    trainer = build(loaded)
    data: Any = trainer.data
    assert isinstance(data, OnlineData) and data.share == 0.25 and data.buffer.max_frames == 500
    assert data.settings.noise == 0.1 and data.settings.warmup_episodes == 20
    trainer.show_progress = False
    result = trainer.fit()
    assert result.steps == 4 and data.source.played == 4
    stored = load(Path("runs/a/config.yaml")).config
    assert stored == loaded.config


def test_a_file_without_the_section_stays_as_it_was() -> None:
    loaded = load(write(), ["online=null"])
    assert loaded.config.online is None and "online" not in loaded.config.model_dump()
    assert not isinstance(build(loaded).data, OnlineData)
    Path("b.yaml").write_text("policy: mlp\ndata: points\n")
    assert "online" not in load("b.yaml").stored()


@pytest.mark.parametrize(
    "section, message",
    [
        ({"shaer": 0.5}, r"online.shaer: unknown key; did you mean 'share'"),
        ({"buffer": {"max_frame": 5}}, r"online.buffer.max_frame: unknown key; did you mean 'max_frames'"),
        ({"share": 0}, r"online.share: .*0"),
        ({"share": 1.0}, r"online.share: .*1"),
        ({"share": True}, r"online.share: expected a number"),
        ({"label": "mine"}, r"online.label: .*own.*expert"),
        ({"env": ...}, r"online.env: required, and missing"),
        ({"options": {"max_step": 3}}, r"online.options.max_step: unknown key; did you mean 'max_steps'"),
        ({"episodes_per_round": 0}, r"online.episodes_per_round: "),
        ({"noise": -1}, r"online.noise: "),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^a.yaml:\d+:\d+: {message}") as raised:
        load(write(**section))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "section, overrides, message",
    [
        ({"env": "point_reach"}, [], "point_reach comes without one; use label: own"),
        ({"buffer": {"max_frames": 3}}, [], "max_frames is 3, less than the 4 rows of a batch"),
        ({"share": 0.3}, [], "share 0.3 of a batch of 8 is 2.4 rows"),
        ({"share": 0.5}, ["data=null"], "a share beside demonstrations, and there are none"),
        ({"label": "own"}, ["data=null"], "no success to keep"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_built(section: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(load(write(**section), overrides))
    assert not Path("runs").exists()


def test_demonstrations_that_do_not_fit_are_refused_before_anything_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.data import Windows

    def wide() -> Any:
        rows = {"observation.state": np.zeros((9, 7), np.float32), "action": np.zeros((9, 2), np.float32)}
        return Windows(rows, [9], {"action": [0]})

    monkeypatch.setitem(DATASET_BUILDER_REGISTRY._entries, "points", wide)
    monkeypatch.setattr(GuidedPoint, "reset", None)
    with pytest.raises(ConfigError, match=r"the demonstrations have observation.state \[7\].*observation.state \[4\]"):
        build(load(write()))  # before there is a run directory


def test_data_is_asked_for_where_nothing_is_played() -> None:
    with pytest.raises(ConfigError, match=r"data: required, and missing"):
        load(write(), ["online=null", "data=null"])
