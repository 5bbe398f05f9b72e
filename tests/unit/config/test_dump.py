"""The stored configuration: complete, free of secrets, and equal when it is loaded again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from etude.config.dump import to_yaml
from etude.config.load import Loaded, load

Config = Callable[..., Loaded]

RICH = """\
eval_data: ${data}
training:
  lr: 1e-4
  duration: 3 epochs
  log_every: 10
  best_metric: '1e-4'
  freeze: ["a.*", 'on', '2024-01-01']
  early_stopping: {patience: 3}
  optimizers: {net: {type: sgd, params: {momentum: 0.9}}, rest: {match: [b]}}
run: {name: 'costs \\${HOME} and ${training.lr}'}
callbacks: [beep, {type: beep, params: {times: 3}}]
"""


def test_a_dump_loads_back_to_the_same_configuration(
    config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_KEY", "s3cret-value")
    sink = "loggers: [{type: sink, params: {api_key: '${env:ETUDE_KEY}', tags: {a: '${loggers[0].params.api_key}'}}}]\n"
    base = "plugins: [components.py]\npolicy: net\ndata: {type: rows, params: {count: 1}}\nengine: stub\n" + sink
    loaded = config(RICH, "training.batch_size=7", base=base)
    assert loaded.config.run.name == "costs ${HOME} and 0.0001"
    (folder / "elsewhere").mkdir()
    copy = folder / "elsewhere" / "config.yaml"
    copy.write_text(to_yaml(loaded))
    monkeypatch.chdir(folder / "elsewhere")
    again = load("config.yaml")
    assert again.config == loaded.config
    assert again.stored() == loaded.stored()
    assert to_yaml(again) == to_yaml(loaded)
    assert "s3cret-value" not in to_yaml(loaded)


def test_a_dump_says_everything(config: Config) -> None:
    stored = config().stored()
    assert stored["training"]["batch_size"] == 32
    assert stored["training"]["log_every"] == "50 steps"
    assert stored["policy"] == {"type": "net"}
    assert list(stored)[:4] == ["schema_version", "plugins", "policy", "data"]
    assert Path(stored["plugins"][0]).is_absolute()


def test_what_only_a_sampler_needs_is_not_listed_until_it_is_set_and_stored_ones_load(config: Config) -> None:
    name = "num_episodes_per_experience"
    assert name not in config().stored()["training"]
    assert f"training.{name}" not in {path for path, _, _ in config().explain()}
    for episodes in (1, 3):
        loaded = config(f"training: {{{name}: {episodes}}}")
        assert loaded.config.training.num_episodes_per_experience == episodes
        assert loaded.stored()["training"][name] == episodes


def test_explain_gives_value_and_origin_of_everything(config: Config) -> None:
    rows = {path: (value, origin) for path, value, origin in config("", "training.lr=3e-4").explain()}
    assert rows["policy.type"] == ("net", "x.yaml:2:10")
    assert rows["policy.params.width"] == ("8", "default")
    assert rows["policy.params.kind"] == ("plain", "default")
    assert rows["policy.params.depths"] == ("[1, 2]", "default")
    assert rows["data.params.count"] == ("10", "x.yaml:3:29")
    assert rows["training.lr"] == ("0.0003", "override 'training.lr=3e-4'")
    assert rows["training.shuffle"] == ("true", "default")
    assert rows["training.ema_decay"] == ("null", "default")
    assert rows["loggers"] == ("[]", "x.yaml:5:1")
    assert rows["engine.params.strategy"] == ("auto", "default")


def test_explain_knows_the_defaults_of_the_schema_from_what_was_given(folder: Path) -> None:
    (folder / "x.yaml").write_text("plugins: [components.py]\npolicy: net\ndata: {type: rows, params: {count: 1}}\n")
    rows = {path: origin for path, _, origin in load("x.yaml").explain()}
    assert rows["engine.type"] == rows["loggers.0.type"] == "default"
    assert rows["policy.type"] == "x.yaml:2:1"
