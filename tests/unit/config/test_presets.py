"""Presets by name: found from anywhere, behind what lies here, and beside the nearest names where there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from etude.config.load import load
from etude.config.presets import describe_preset, locate, presets
from etude.errors import ConfigError

OWN = "policy: mlp\ndata: {type: digits, params: {split: train}}\ntraining: {training_steps: 7}\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_file_has_a_name_of_its_own_and_says_what_it_is(repository: Path) -> None:
    every = sorted((repository / "configs").rglob("*.yaml"))
    files = [path for path in every if "schema_version" not in path.read_text()]  # models of components
    assert sorted(presets().values()) == files
    assert all(10 < len(describe_preset(path)) < 130 for path in files)


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_bare_name_is_a_preset(name: str) -> None:
    assert load(name).config == load(presets()[name]).config


@pytest.mark.parametrize("name", [name for name, path in presets().items() if not path.with_suffix("").is_dir()])
def test_a_copy_of_a_preset_loads_anywhere(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    copy.write_text(presets()[name].read_text())
    assert load("mine.yaml").config == load(name).config


def test_a_file_builds_on_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [digits]\ntraining: {lr: 0.5}\n")
    mine = load("mine.yaml").config
    assert mine.training.lr == 0.5
    assert mine.policy == load("digits").config.policy


def test_a_file_of_that_name_wins_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "digits").write_text(OWN)
    with caplog.at_level(logging.WARNING, "etude"):
        assert load("digits").config.training.training_steps == 7
    assert "read the file digits, not the preset of that name" in caplog.text


def test_a_folder_of_that_name_wins_and_is_said(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    with pytest.raises(ConfigError, match=r"digits is a folder here; the preset of that name is .*digits\.yaml"):
        load("digits")


@pytest.mark.parametrize("path", ["digits.yaml", "./digits", "configs/digits.yaml", "digits.yml"])
def test_what_looks_like_a_file_is_never_a_preset(path: str) -> None:
    assert locate(path) == path
    with pytest.raises(ConfigError, match="no such file"):
        load(path)


def test_an_unknown_name_comes_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^no such file and no such preset: metaworld-atc; did you mean '.*-act'"):
        load("metaworld-atc")
    with pytest.raises(ConfigError, match=r"^no such file and no such preset: zzz; see: etude list presets$"):
        load("zzz")
    (tmp_path / "mine.yaml").write_text("defaults: [digit]\n")
    with pytest.raises(ConfigError, match=r"^mine.yaml:1:12: no such file and no such preset: digit; did you mean"):
        load("mine.yaml")


def test_a_misspelt_file_comes_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "config.yaml").write_text(OWN)
    with pytest.raises(ConfigError, match=r"^no such file: sub/confg.yaml; did you mean 'sub/config.yaml'\?$"):
        load("sub/confg.yaml")
    with pytest.raises(ConfigError, match=r"^no such file: configs/digits.yml; did you mean the preset 'digits'\?$"):
        load("configs/digits.yml")
    (tmp_path / "my-config.yaml").write_text(OWN)
    with pytest.raises(ConfigError, match=r"no such preset: my-config; did you mean 'my-config.yaml'\?"):
        load("my-config")
