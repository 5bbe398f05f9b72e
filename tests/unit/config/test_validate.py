"""What a configuration may say: every unknown key, wrong type and misfit is told, with its place, all at once."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.config.load import Loaded, load
from etude.config.presets import presets
from etude.config.schema import ExperimentConfig
from etude.errors import ConfigError
from etude.registry import CALLBACK_REGISTRY, REGISTRIES

Config = Callable[..., Loaded]


@pytest.mark.parametrize(
    "text, message",
    [
        ("training: {lrr: 1}", "training.lrr: unknown key; did you mean 'lr'?"),
        ("zzz: 1", "zzz: unknown key; known: schema_version, plugins, policy"),
        ("training: {early_stopping: {patiense: 1}}", "early_stopping.patiense: unknown key; did you mean 'patience'?"),
        ("training: {optimizers: {a: {lrr: 1}}}", "training.optimizers.a.lrr: unknown key; did you mean 'lr'?"),
        ("callbacks: [{type: beep, param: {}}]", "callbacks.0.param: unknown key; did you mean 'params'?"),
        ("callbacks: [{type: beep, params: {time: 3}}]", "callbacks.0.params.time: unknown key; did you mean 'times'?"),
        ("callbacks: [{type: beep}, bep]", "callbacks.1.type: unknown callback 'bep'; did you mean 'beep'?"),
        ("training: {batch_size: many}", "training.batch_size: expected a whole number, got 'many'"),
        ("training: {batch_size: 1.5}", "training.batch_size: expected a whole number, got 1.5"),
        ("training: {batch_size: true}", "training.batch_size: expected a whole number, got true"),
        ("training: {batch_size: [1]}", "training.batch_size: expected a whole number, got [1]"),
        ("training: {lr: true}", "training.lr: expected a number, got true"),
        ("training: {ema_decay: false}", "training.ema_decay: expected a number, got false"),
        ("training: {lr: -1}", "training.lr: must be at least 0, got -1"),
        ("training: {lr: .inf}", "training.lr: expected a finite number, got inf"),
        ("training: {lr: 'nan'}", "training.lr: expected a finite number, got 'nan'"),
        ("training: {ema_decay: 1}", "training.ema_decay: must be less than 1, got 1"),
        ("training: {shuffle: 1}", "training.shuffle: expected true or false, got 1"),
        ("training: {shuffle: maybe}", "training.shuffle: expected true or false, got 'maybe'"),
        ("training: {precision: bf61}", "'fp16' or 'auto', got 'bf61'; did you mean 'bf16'?"),
        ("training: {duration: 3 eons}", "training.duration: cannot read '3 eons' as a duration"),
        ("training: {duration: true}", "training.duration: cannot read True as a duration"),
        ("training: {freeze: x}", "training.freeze: expected a list, got 'x'"),
        ("training: {freeze: [1]}", "training.freeze.0: expected text, got 1"),
        ("training: {optimizer: adm}", "training.optimizer: unknown optimizer 'adm'; did you mean 'adam'?"),
        ("training: {optimizer_params: {beta: 1}}", "optimizer_params.beta: unknown key; did you mean 'betas'?"),
        ("training: {optimizer_params: {betas: [0.9]}}", "training.optimizer_params.betas.1: required, and missing"),
        ("training: {optimizer_params: {lr: 1}}", "training.optimizer_params.lr: is passed by the framework"),
        ("training: {optimizer: plain_sgd, lr: 1, optimizer_params: {lr: 1}}", "optimizer_params.lr: is said twice"),
        ("training: {optimizer: plain_sgd, weight_decay: 1}", "would do nothing: optimizer 'plain_sgd' takes lr"),
        ("training: {optimizers: {a: {type: sgd, params: {momentm: 1}}}}", "params.momentm: unknown key; did you"),
        ("training: {optimizer: plain_sgd, optimizer_params: {betas: [1, 2]}}", "optimizer_params.betas: unknown key"),
        ("training: [1]", "training: expected a mapping, got [1]"),
        ("run: {root: ''}", "run.root: must not be empty"),
        ("run: {name: bad/../x}", "run.name: 'bad/../x' names no folder below run.root"),
        ("run: {name: /tmp/x}", "run.name: '/tmp/x' names no folder below run.root"),
        ("run: {name: 3}", "run.name: expected text, got 3"),
        ("schema_version: 2", "schema_version: version 2 is newer than this etude reads (1); upgrade etude"),
        ("schema_version: '1'", "schema_version: expected 1, got '1'"),
        ("eval_data: {params: {count: 1}}", "eval_data.type: required, and missing"),
        ("eval_data: {type: rows}", "eval_data.params.count: required, and missing"),
        ("eval_data: {type: rows, params: {count: 1, shift: [1, 2, 3]}}", "eval_data.params.shift"),
        ("eval_data: {type: rows, params: [1]}", "eval_data.params: expected a mapping, got [1]"),
        ("eval_data: {type: 3}", "eval_data.type: expected text, got 3"),
        ("eval_data: 3", "eval_data: expected a mapping, got 3"),
        ("algorithm: bx", "algorithm.type: unknown algorithm 'bx'"),
        ("trainer: {type: trainer, params: {policy: 3}}", "trainer.params.policy: is passed by the framework"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line_with_their_place(config: Config, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(text + "\n")
    assert message in str(caught.value)
    assert str(caught.value).startswith("x.yaml:6:")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "params, message",
    [
        ("{width: true}", "policy.params.width: expected a whole number, got true"),
        ("{width: wide}", "policy.params.width: expected a whole number, got 'wide'"),
        ("{depths: [1, x]}", "policy.params.depths.1: expected a whole number, got 'x'"),
        ("{depths: 3}", "policy.params.depths: expected a list, got 3"),
        ("{rate: fast}", "policy.params.rate: expected a number, got 'fast'"),
        ("{kind: gatd}", "policy.params.kind: expected 'plain' or 'gated', got 'gatd'; did you mean 'gated'?"),
        ("{gain: 0}", "policy.params.gain: must be more than 0, got 0"),
    ],
)
def test_parameters_are_checked_against_the_signature(config: Config, params: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.yaml:2") as caught:
        config(base=f"plugins: [components.py]\npolicy: {{type: net, params: {params}}}\n"
               "data: {type: rows, params: {count: 1}}\nengine: stub\n")  # fmt: skip
    assert message in str(caught.value)


def test_parameters_arrive_in_the_form_the_component_declares(config: Config) -> None:
    loaded = config("eval_data: {type: rows, params: {count: 1e1, folder: a/b, shift: [1, 2]}}\n")
    assert loaded.config.eval_data is not None
    params = loaded.config.eval_data.params
    assert params == {"count": 10, "folder": Path("a/b"), "shift": (1.0, 2.0)}
    assert type(params["count"]) is int


def test_all_mistakes_are_listed_in_the_order_of_the_file(config: Config) -> None:
    with pytest.raises(ConfigError) as caught:
        config(
            """\
            training:
              lrr: 1
              batch_size: many
            callbacks: [bep]
            """,
            "run.nam=3",
        )
    assert str(caught.value).splitlines() == [
        "x.yaml:7:3: training.lrr: unknown key; did you mean 'lr'?",
        "x.yaml:8:3: training.batch_size: expected a whole number, got 'many'",
        "x.yaml:9:13: callbacks.0.type: unknown callback 'bep'; did you mean 'beep'? "
        f"Known: {', '.join(CALLBACK_REGISTRY.keys())}",
        "override 'run.nam=3': run.nam: unknown key; did you mean 'name'?",
    ]


def test_sections_with_nothing_below_them_are_empty(config: Config) -> None:
    loaded = config("training:\nrun:\ncallbacks:\neval_data: {type: rows, params: {count: 1}}\n", "policy.params=null")
    assert loaded.config.training.batch_size == 32
    assert loaded.config.callbacks == []
    assert loaded.config.policy.params == {}


def test_whole_numbers_may_be_written_as_floats_and_words_as_truth_values(config: Config) -> None:
    loaded = config("training: {training_steps: 1e5, shuffle: no, compile: yes}\n")
    training = loaded.config.training
    assert (training.training_steps, training.shuffle, training.compile) == (100_000, False, True)


def test_nested_values_of_parameters_are_checked_too(config: Config, folder: Path) -> None:
    (folder / "nested.py").write_text(
        "from dataclasses import dataclass\n"
        "from pydantic import BaseModel\n"
        "from etude.types.duration import Duration\n"
        "from etude.registry import CALLBACK_REGISTRY\n"
        "@dataclass\nclass Inner:\n    size: int = 1\n"
        "class Loose(BaseModel):\n    inner: Inner = Inner()\n"
        "@CALLBACK_REGISTRY.register('deep')\n"
        "class Deep:\n"
        "    def __init__(self, loose: Loose | None = None, many: dict[str, Inner] = {},\n"
        "                 after: Duration = Duration(1)):\n"
        "        ...\n"
        "    def on_log(self): ...\n"
    )
    base = "plugins: [components.py, nested.py]\npolicy: net\ndata: {type: rows, params: {count: 1}}\nengine: stub\n"
    good = "callbacks: [{type: deep, params: {loose: {inner: {size: 3}}, many: {a: {size: 2}}, after: 2 epochs}}]\n"
    params = config(good, base=base).config.callbacks[0].params
    assert params["loose"].inner.size == 3
    assert str(params["after"]) == "2 epochs"
    bad = "callbacks: [{type: deep, params: {loose: {inner: {sise: 3}, x: 1}, many: {a: {size: true, z: 1}}}}]\n"
    with pytest.raises(ConfigError) as caught:
        config(bad, base=base)
    paths = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    inside = ["loose.inner.sise", "loose.x", "many.a.size", "many.a.z"]
    assert paths == [f"callbacks.0.params.{path}" for path in inside]


def test_a_plugin_that_cannot_be_loaded_is_named_with_its_place(config: Config, folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    base = "policy: net\ndata: {type: rows, params: {count: 1}}\nengine: stub\n"
    with pytest.raises(ConfigError) as caught:
        config("plugins:\n  - components.py\n  - broken.py\n  - gone.py\n  - no.such.module\n", base=base)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("x.yaml:6:5: plugins.1: plugin '")
    assert "broken.py' cannot be loaded: ZeroDivisionError: division by zero" in lines[0]
    assert "gone.py' cannot be loaded: FileNotFoundError: no such file" in lines[1]
    assert lines[2].startswith("x.yaml:8:5: plugins.3: plugin 'no.such.module' cannot be loaded: ModuleNotFoundError")
    assert len(lines) == 3


def test_the_schema_can_be_exported() -> None:
    schema = ExperimentConfig.model_json_schema()
    assert set(schema["required"]) == {"policy"}
    assert schema["additionalProperties"] is False
    texts, mapping = schema["$defs"]["Component"]["anyOf"]
    assert texts["type"] == "string"
    assert mapping["properties"]["type"]["description"].startswith("Key in the registry")


def test_a_loaded_configuration_cannot_be_changed(config: Config) -> None:
    loaded = config()
    with pytest.raises(ValueError, match="lr cannot be changed once it is set"):
        loaded.config.training.lr = 3.0


@pytest.mark.parametrize("path", sorted(presets().values()), ids=lambda path: path.name)
def test_every_ready_experiment_is_valid(path: Path) -> None:
    load(path)


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(
    "kind, key, params, message",
    [
        ("data", "episodic_dataset_factory", "chunk_sise: 3", "unknown key; did you mean 'chunk_size'?"),
        ("data", "lerobot_dataset_factory", "action_horizon: much", "expected a whole number, got 'much'"),
        (
            "optimizers",
            "adamw_warmup_cosine_decay",
            "total_steps: 3",
            "optimizer_params.peak_lr: required, and missing",
        ),
        ("optimizers", "schedule_free_radam", "lrr: 1", "optimizer_params.lrr: unknown key"),
    ],
)
def test_parts_in_the_box_are_checked_before_and_after_their_first_use(
    config: Config, kind: str, key: str, params: str, message: str, is_loaded: bool
) -> None:
    if is_loaded:
        REGISTRIES[kind].get(key)
    slot = f"eval_data: {{type: {key}, params: {{{params}}}}}"
    if kind == "optimizers":
        slot = f"training: {{optimizer: {key}, optimizer_params: {{{params}}}}}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(slot)
