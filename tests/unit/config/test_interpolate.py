"""`${...}`: values that refer to values, values from the environment, and secrets that nobody sees."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.dump import to_yaml
from etude.config.load import Loaded
from etude.errors import ConfigError
from etude.reading.interpolate import escape, interpolate

Config = Callable[..., Loaded]
CANARY = "canary-5f2a91c7"


def test_references_keep_their_type(config: Config) -> None:
    loaded = config(
        """\
        training: {lr: 1e-3, weight_decay: "${training.lr}", batch_size: 4, warmup_steps: "${.batch_size}"}
        eval_data: ${data}
        run: {name: "run-${training.batch_size}-${policy.type}"}
        """
    )
    training = loaded.config.training
    assert (training.weight_decay, training.warmup_steps) == (1e-3, 4)
    assert loaded.config.eval_data == loaded.config.data
    assert loaded.config.run.name == "run-4-net"
    assert loaded.raw["training"]["weight_decay"] == 1e-3
    assert str(loaded.origin("eval_data.params.count")) == "x.yaml:7:1"


def test_the_environment_fills_in_values_of_any_type(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_LR", "1e-4")
    monkeypatch.setenv("ETUDE_SIZE", "16")
    monkeypatch.delenv("ETUDE_GONE", raising=False)
    loaded = config(
        """\
        training:
          lr: ${env:ETUDE_LR}
          batch_size: ${env:ETUDE_SIZE}
          weight_decay: ${env:ETUDE_GONE,1e-2}
          clip_norm: ${env:ETUDE_GONE,null}
          device: ${env:ETUDE_GONE, cpu }
        callbacks: [{type: beep, params: {note: "${env:ETUDE_GONE,}"}}]
        """
    )
    training = loaded.config.training
    assert (training.lr, training.batch_size, training.weight_decay, training.clip_norm) == (1e-4, 16, 1e-2, None)
    assert (training.device, loaded.config.callbacks[0].params) == ("cpu", {"note": ""})
    # What came from the environment is stored as its name, what came from a default as its value.
    assert loaded.stored()["training"]["lr"] == "${env:ETUDE_LR}"
    assert loaded.stored()["training"]["weight_decay"] == 1e-2


@pytest.mark.parametrize(
    "text, message",
    [
        ("run: {name: '${training.nope}'}", "x.yaml:6:7: run.name: ${training.nope} names no key of the configuration"),
        ("run: {name: '${env:ETUDE_GONE}'}", "run.name: the environment variable ETUDE_GONE is not set; export it"),
        ("run: {name: '${run.root}', root: '${run.name}'}", "refers to itself: run.name -> run.root -> run.name"),
        ("run: {name: '${run}'}", "${run} refers to something that contains it"),
        ("run: {name: '${.....x}'}", "points outside"),
        ("run: {name: '${'}", "cannot read '${'; write ${a.b}"),
        ("run: {name: '${a b}'}", "cannot read"),
        ("run: {name: '${oc.env:HOME}'}", "cannot read '${oc.env:HOME}'"),
        ("run: {name: '${${x}:HOME}'}", "cannot read"),
        ("run: {name: '${env:A,b,c}'}", "the default has a comma"),
        ("run: {name: '${policy.type.x}'}", "names no key"),
        ("run: {name: '${plugins[3]}'}", "names no key"),
    ],
)
def test_what_cannot_be_resolved_is_told_with_its_place(
    config: Config, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.delenv("ETUDE_GONE", raising=False)
    with pytest.raises(ConfigError) as caught:
        config(text + "\n")
    assert message in str(caught.value)
    assert str(caught.value).startswith("x.yaml:6:")


def test_every_bad_reference_is_listed(config: Config) -> None:
    with pytest.raises(ConfigError) as caught:
        config("run: {name: '${a}', root: '${b}'}\n")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("seed", ["x" * 10, ["x"]])
def test_references_cannot_explode(seed: object) -> None:
    tree: dict[str, object] = {"k0": seed}
    for level in range(1, 30):
        one = f"${{k{level - 1}}}"
        tree[f"k{level}"] = [one] * 10 if isinstance(seed, list) else one * 10
    (problem, *_) = interpolate(tree).problems
    assert "grows too large" in problem.message


def test_escaped_dollars_stay() -> None:
    tree = {"a": r"\${b}", "b": 1, "c": r"\\${b}", "d": r"cost \${env:X} ${b}", "e": "???", "f": "${e}"}
    values = interpolate(tree).values
    assert values == {"a": "${b}", "b": 1, "c": r"\1", "d": "cost ${env:X} 1", "e": "???", "f": "???"}


@given(st.text(st.sampled_from("${}\\:,.'ab ?"), max_size=12))
def test_escaped_text_interpolates_to_itself(text: str) -> None:
    tree = {"a": escape(text), "b": 1, "c": "${b}"}
    found = interpolate(tree)
    assert found.problems == []
    assert found.values["a"] == text


# ---- secrets ---------------------------------------------------------------------------------------------------------

SECRET_CONFIG = """\
loggers:
  - {type: sink, params: {project: "p-${env:ETUDE_CANARY}", api_key: "${env:ETUDE_CANARY}"}}
  - {type: sink, params: {api_key: "${loggers[0].params.api_key}", tags: {x: "${env:ETUDE_CANARY}"}}}
  - ${loggers[0]}
"""


def test_secrets_arrive_and_appear_nowhere(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_CANARY", CANARY)
    base = "plugins: [components.py]\npolicy: net\ndata: {type: rows, params: {count: 1}}\nengine: stub\n"
    loaded = config(SECRET_CONFIG, "run.name=x-${env:ETUDE_CANARY}", base=base)
    first, second, third = loaded.config.loggers
    assert first.params["api_key"].get_secret_value() == CANARY
    assert first.params["project"] == f"p-{CANARY}"
    assert second.params["api_key"].get_secret_value() == CANARY
    assert second.params["tags"] == {"x": CANARY}
    assert third == first
    assert loaded.config.run.name == f"x-{CANARY}"
    shown = [to_yaml(loaded), repr(loaded), repr(loaded.config), str(loaded.config), json.dumps(loaded.raw)]
    shown += [repr(loaded.explain()), repr(loaded.origins), json.dumps(loaded.stored()), repr(loaded.config.run)]
    assert not any(CANARY in text for text in shown)
    assert "${env:ETUDE_CANARY}" in to_yaml(loaded)
    assert ("loggers.0.params.project", "p-${env:ETUDE_CANARY}", "x.yaml:6:27") in loaded.explain()


@pytest.mark.parametrize(
    "text",
    [
        "training: {lr: '${env:ETUDE_CANARY}'}",
        "training: {duration: '${env:ETUDE_CANARY}'}",
        "training: {precision: '${env:ETUDE_CANARY}'}",
        "training: {early_stopping: '${env:ETUDE_CANARY}'}",
        "training: {optimizer: '${env:ETUDE_CANARY}'}",
        "training: {optimizer_params: {eps: '${env:ETUDE_CANARY}'}}",
        "training: {freeze: '${env:ETUDE_CANARY}'}",
        "callbacks: ['${env:ETUDE_CANARY}']",
        "callbacks: [{type: beep, params: {times: '${env:ETUDE_CANARY}'}}]",
        "callbacks: [{type: beep, params: '${env:ETUDE_CANARY}'}]",
        "algorithm: ${env:ETUDE_CANARY}",
        "eval_data: {type: rows, params: {count: 'x${env:ETUDE_CANARY}', shift: ['${env:ETUDE_CANARY}', 1]}}",
        "trainer: {type: 'a${env:ETUDE_CANARY}'}",
        "run: ${env:ETUDE_CANARY}",
        "schema_version: ${env:ETUDE_CANARY}",
        "run: {name: '${env:ETUDE_CANARY}', nome: '${env:ETUDE_CANARY}'}",
    ],
)
@pytest.mark.parametrize("value", [CANARY, "q7%", "-9 . 5"])
def test_errors_do_not_quote_the_environment(
    config: Config, monkeypatch: pytest.MonkeyPatch, text: str, value: str
) -> None:
    monkeypatch.setenv("ETUDE_CANARY", value)
    with pytest.raises(ConfigError) as caught:
        config(text + "\n")
    assert value not in str(caught.value)
    assert "x.yaml:6:" in str(caught.value)


def test_a_secret_is_not_written_into_the_file(config: Config) -> None:
    base = "plugins: [components.py]\npolicy: net\ndata: {type: rows, params: {count: 1}}\nengine: stub\n"
    with pytest.raises(ConfigError, match=r"api_key: is a secret; take it from the environment with \$\{env:NAME\}"):
        config("loggers: [{type: sink, params: {api_key: hunter2}}]\n", base=base)
