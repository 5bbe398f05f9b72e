"""One reader, several kinds of files: a new kind says its schema and its words, and errors keep the user's lines."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from etude.errors import ConfigError
from etude.reading.dialect import Dialect
from etude.reading.interpolate import Interpolated
from etude.reading.load import load
from etude.reading.origins import Layer
from etude.reading.translate import Translation
from etude.redteam.config import REDTEAM


class Loop(BaseModel):
    model_config = ConfigDict(extra="forbid")

    duration: str = "1 epochs"
    seed: int = Field(default=0, ge=0)
    options: dict[str, int] = {}


class Recipe(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    loop: Loop = Loop()
    token: str = ""


PLAIN = Dialect(Recipe)


def _epochs(value: Any) -> str:
    if not isinstance(value, int):
        raise ValueError(f"expected a whole number, got {value!r}")
    return f"{value} epochs"


class TheirWords(Dialect[Recipe]):
    """Files that say `train.epoch` where ours say `loop.duration`."""

    def translate(self, layer: Layer, tree: Interpolated) -> tuple[Layer, Interpolated]:
        words = Translation(layer, tree)
        words.move("project", "name")
        words.move("train.epoch", "loop.duration", _epochs)
        words.move("train.seed", "loop.seed")
        words.move("train.params", "loop.options")
        words.move("key", "token")
        return words.finish()


THEIRS = TheirWords(Recipe)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "x.yaml") -> str:
        Path(name).write_text(text)
        return name

    return write_file


def test_a_schema_is_enough_for_a_kind_of_file(write: Any) -> None:
    write("loop: {seed: 1, options: {a: 1}}\n", "base.yaml")
    loaded = load(write("defaults: [base.yaml]\nname: x${loop.seed}\n"), ["loop.options.b=2"], PLAIN)
    assert loaded.config == Recipe(name="x1", loop=Loop(seed=1, options={"a": 1, "b": 2}))
    assert str(loaded.origin("loop.seed")) == "base.yaml:1:8"
    assert str(loaded.origin("loop.options.b")) == "override 'loop.options.b=2'"
    assert load(None, ["name=y"], PLAIN).config == Recipe(name="y")


def test_mistakes_of_any_kind_of_file_have_their_line(write: Any) -> None:
    path = write("name: x\nloop:\n  sede: 1\n  seed: true\n")
    with pytest.raises(ConfigError) as caught:
        load(path, [], PLAIN)
    assert str(caught.value).splitlines() == [
        "x.yaml:3:3: loop.sede: unknown key; did you mean 'seed'?",
        "x.yaml:4:3: loop.seed: expected a whole number, got true",
    ]
    with pytest.raises(ConfigError, match=r"no such file: y\.yaml; did you mean 'x\.yaml'"):
        load("y.yaml", [], PLAIN)


def test_a_translated_file_gives_our_configuration_and_stores_it(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "very-secret-value")
    text = "project: p\nkey: ${env:THEIR_KEY}\ntrain: {epoch: 3, seed: 7, params: {a: 1}}\n"
    loaded = load(write(text), ["train.params.b=${train.seed}"], THEIRS)
    assert loaded.config.loop == Loop(duration="3 epochs", seed=7, options={"a": 1, "b": 7})
    assert loaded.config.token == "very-secret-value"
    assert str(loaded.origin("loop.seed")) == "x.yaml:3:19"
    assert loaded.stored() == {
        "name": "p",
        "loop": {"duration": "3 epochs", "seed": 7, "options": {"a": 1, "b": 7}},
        "token": "${env:THEIR_KEY}",
    }


@pytest.mark.parametrize(
    "text, message",
    [
        ("project: p\ntrain:\n  seed: -1\n", "x.yaml:3:3: train.seed: must be at least 0, got -1"),
        ("project: p\ntrain:\n  epoch: x\n", "x.yaml:3:3: train.epoch: expected a whole number, got 'x'"),
        ("project: p\ntrain: {params: {a: b}}\n", "x.yaml:2:18: train.params.a: expected a whole number, got 'b'"),
        ("project: p\ntrain:\n  sead: 1\n", "x.yaml:3:3: train.sead: unknown key; did you mean 'seed'?"),
        ("projct: p\n", "x.yaml:1:1: projct: unknown key; did you mean 'project'?"),
        ("project: p\ntrain: 3\n", "x.yaml:2:1: train: expected a mapping"),
        (
            "project: p\ntrain: {epoch: '${env:HOME}'}\n",
            "x.yaml:2:9: train.epoch: cannot come from the environment; write it out",
        ),
    ],
)
def test_mistakes_in_a_translated_file_are_told_in_its_own_words(write: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(text), [], THEIRS)
    assert str(caught.value) == message


def test_a_red_team_file_builds_on_others_and_names_its_lines(write: Any) -> None:
    write("scorer: vader\ntraining: {lr: 1e-4}\n", "base.yaml")
    loaded = load(write("defaults: [base.yaml]\ntarget: my-model\n"), ["training.seed=3"], REDTEAM)
    assert (loaded.config.scorer, loaded.config.target, loaded.config.training.seed) == ("vader", "my-model", 3)
    with pytest.raises(ConfigError, match=r"x\.yaml:2:12: training\.lr: expected a number, got 'fast'"):
        load(write("target: x\ntraining: {lr: fast}\n"), [], REDTEAM)


def test_what_a_run_keeps_of_a_red_team_file_loads_back(write: Any) -> None:
    first = load(write("target: t\nprompts: ['What is \\${HOME}?']\ntraining: {log_every: 5}\n"), [], REDTEAM)
    assert first.config.prompts == ["What is ${HOME}?"]
    from etude.reading import yaml12

    again = load(write(yaml12.write({"redteam": first.stored()}), "config.yaml"), [], REDTEAM)
    assert again.config == first.config
    with pytest.raises(ConfigError, match=r"bad\.yaml:2:3: targte: unknown key"):
        load(write("redteam:\n  targte: x\n", "bad.yaml"), [], REDTEAM)
