"""Files that build on files, and overrides on top: what wins, where it came from, and what is refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.config.load import Loaded, load
from etude.errors import ConfigError

Config = Callable[..., Loaded]


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_defaults_merge_left_to_right_then_the_file_itself(folder: Path) -> None:
    _write(
        folder,
        sub__a="plugins: [../components.py]\npolicy: {type: net, params: {width: 1, depths: [1, 2]}}\n"
        "training: {lr: 0.1, seed: 1}\n",
        sub__b="data: rows\ntraining: {lr: 0.2, batch_size: 2}\n",
        top="defaults:\n  - sub/a.yaml\n  - other: sub/b.yaml\nengine: stub\n"
        "data: {params: {count: 3}}\npolicy: {params: {depths: [7]}}\ntraining: {batch_size: 4}\n",
    )
    loaded = load("top.yaml")
    training = loaded.config.training
    assert (training.lr, training.seed, training.batch_size) == (0.2, 1, 4)
    assert loaded.config.policy.params == {"width": 1, "depths": [7]}
    assert loaded.config.data.params == {"count": 3}
    assert str(loaded.origin("training.lr")) == "sub/b.yaml:2:12"
    assert str(loaded.origin("training.seed")) == "sub/a.yaml:3:21"
    assert str(loaded.origin("training.batch_size")) == "top.yaml:7:12"
    assert str(loaded.origin("training.ema_decay")) == "default"


def test_a_mapping_may_replace_a_list_and_the_reverse(folder: Path) -> None:
    _write(folder, a="callbacks: []\ntraining: {freeze: [x]}\nloggers: {x: 1}\n")
    _write(folder, x="defaults: [a.yaml]\ncallbacks: {x: 1}\nloggers: []\npolicy: net\ndata: rows\n")
    with pytest.raises(ConfigError, match=r"x.yaml:2:1: callbacks: expected a list"):
        load("x.yaml")


def test_a_file_that_many_build_on_is_read_once(folder: Path) -> None:
    # Two includes per level would be 2**40 readings.
    _write(folder, f0="plugins: [components.py]\npolicy: net\ndata: {type: rows, params: {count: 1}}\nengine: stub\n")
    for level in range(1, 41):
        _write(folder, **{f"f{level}": f"defaults: [f{level - 1}.yaml, f{level - 1}.yaml]\n"})
    assert load("f40.yaml").config.data.params == {"count": 1}


@pytest.mark.parametrize(
    "files, message",
    [
        ({"x": "defaults: [x.yaml]"}, "x.yaml:1:12: defaults go round in a circle: x.yaml -> x.yaml"),
        ({"x": "defaults: [y.yaml]", "y": "a: 1\ndefaults:\n- l: ./x.yaml"}, "y.yaml:3:3: defaults go round"),
        ({"x": "defaults:\n  - gone.yaml"}, "x.yaml:2:5: no such file: gone.yaml"),
        ({"x": "defaults:\n  - sub"}, "x.yaml:1:1: cannot read"),
        ({"x": "defaults: y.yaml"}, "x.yaml:1:1: defaults: must be a list of file names"),
        ({"x": "defaults: [3]"}, "x.yaml:1:12: defaults: must be a list"),
        ({"x": "defaults: [{a: y.yaml, b: z.yaml}]"}, "x.yaml:1:12: defaults: must be a list"),
        ({"x": "defaults: ['${env:BASE}']"}, "x.yaml:1:12: defaults: ${...} is not available here"),
        ({"x": "defaults: [y.yaml]", "y": "- 1\n"}, "y.yaml:1:1: a configuration is a mapping"),
        ({"x": "just text"}, "x.yaml:1:1: a configuration is a mapping"),
        ({"x": "a: [1"}, "x.yaml:2:1: not valid YAML"),
        ({"x": "a: 1\na: 2"}, "x.yaml:2:1: the key 'a' appears twice"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_composed(folder: Path, files: dict[str, str], message: str) -> None:
    _write(folder, **files)
    (folder / "sub").mkdir()
    with pytest.raises(ConfigError) as caught:
        load("x.yaml")
    assert message.replace("x.yaml:1:1: cannot", "cannot") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_itself_must_be_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^no such file: gone.yaml$"):
        load("gone.yaml")
    with pytest.raises(ConfigError, match=r"^cannot read .: Is a directory$"):
        load(".")
    (folder / "noise.yaml").write_bytes(os.urandom(64) + b"\xff")
    with pytest.raises(ConfigError, match=r"noise.yaml:\d+:\d+: not UTF-8 text"):
        load("noise.yaml")


def test_an_empty_file_lacks_everything(folder: Path) -> None:
    _write(folder, x="")
    with pytest.raises(ConfigError) as caught:
        load("x.yaml")
    assert str(caught.value).splitlines() == [
        "x.yaml:1:1: data: required, and missing",
        "x.yaml:1:1: policy: required, and missing",
    ]


# ---- overrides -------------------------------------------------------------------------------------------------------


def test_override_values_are_yaml(config: Config) -> None:
    loaded = config(
        "",
        "training.lr=1e-4", "training.shuffle=false", "training.freeze=[a, 'b.*']", "training.clip_norm=null",
        "training.duration=2 epochs", "policy.params={width: 3}", "policy.params.depths=[4]", "run.name='12'",
        "training.early_stopping.patience=3", "engine.params.strategy=x",
    )  # fmt: skip
    training = loaded.config.training
    assert (training.lr, training.shuffle, training.freeze, training.clip_norm) == (1e-4, False, ["a", "b.*"], None)
    assert str(training.duration) == "2 epochs"
    assert loaded.config.policy.params == {"width": 3, "depths": [4]}
    assert loaded.config.run.name == "12"
    assert training.early_stopping is not None
    assert training.early_stopping.patience == 3
    assert str(loaded.origin("training.lr")) == "override 'training.lr=1e-4'"
    assert str(loaded.origin("policy.params.width")) == "override 'policy.params={width: 3}'"
    assert str(loaded.origin("engine.type")) == "x.yaml:4:1"


def test_overrides_reach_into_lists_and_defaults(config: Config) -> None:
    loaded = config("callbacks: [beep]\n", "callbacks.0.params.times=3", "callbacks[0].params.loud=true")
    assert loaded.config.callbacks[0].params == {"times": 3, "loud": True}
    base = "plugins: [components.py]\npolicy: net\ndata: {type: rows, params: {count: 1}}\n"
    loaded = config("", "loggers.0=sink", "loggers.0.params.project=q", "engine=stub", base=base)
    assert [logger.params for logger in loaded.config.loggers] == [{"project": "q"}]
    assert loaded.config.engine.type == "stub"


@pytest.mark.parametrize(
    "override, message",
    [
        ("training.lrr=3", "override 'training.lrr=3': training.lrr: unknown key; did you mean 'lr'?"),
        ("traning.lr=3", "override 'traning.lr=3': traning: unknown key; did you mean 'training'?"),
        ("policy.params.widht=3", "policy.params.widht: unknown key; did you mean 'width'?"),
        ("training.lr", "override 'training.lr': write key=value"),
        ("=3", "override '=3': write key=value"),
        ("training..lr=3", "write key=value"),
        ("+training.x=3", "there is no '+'"),
        ("~training.lr=3", "there is no '~'"),
        ("training.lr=[1", "override 'training.lr=[1': not valid YAML"),
        ("run.name=*x", "override 'run.name=*x': the alias *x is not defined"),
        ("run.name=@x", "quote text that has a meaning in YAML"),
        ("callbacks.0=beep", "callbacks is a list of 0 entries; '0' is none of them"),
        ("plugins.x=y", "plugins is a list of 1 entry; 'x' is none of them"),
        ("data.type.x=y", "data.type is text, it has no 'x'"),
        ("defaults=[a]", "defaults belong in the file"),
        ("training=3", "override 'training=3': training: expected a mapping, got 3"),
        ("training.lr=null", "override 'training.lr=null': training.lr: expected a number, got null"),
        ("training.lr=.nan", "NaN"),
    ],
)
def test_wrong_overrides_are_refused_by_their_own_text(config: Config, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config("", override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plugin_files_are_found_beside_the_file_that_lists_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lib").mkdir()
    (folder / "components.py").rename(folder / "lib" / "components.py")
    _write(folder, lib__base="plugins: [components.py]\nengine: stub\n")
    _write(folder, x="defaults: [lib/base.yaml]\npolicy: net\ndata: {type: rows, params: {count: 1}}\n")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    loaded = load("../x.yaml")
    assert loaded.config.plugins == [str(folder / "lib" / "components.py")]
    again = load("../x.yaml", ["plugins=[../lib/components.py]"])
    assert again.config.plugins == loaded.config.plugins
