"""Parameters that hold further parameters: what training refuses inside, a check refuses, without importing torch."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from etude.config.load import Loaded
from etude.errors import ConfigError

Config = Callable[..., Loaded]
POLICY = "policy: mlp\nengine: torch\nloggers: []\n"


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "data: {type: lerobot, params: {root: x, augment: {brigthness: 0.1}}}",
            "augment.brigthness: unknown key; did",
        ),
        ("data: {type: lerobot, params: {root: x, augment: {crop: big}}}", "augment.crop: expected a whole number"),
        (
            "data: {type: rollouts, params: {tasks: addtion}}",
            "data.params.tasks: unknown source of tasks 'addtion'",
        ),
        ("data: {type: rollouts, params: {tasks: {type: adition}}}", "tasks.type: unknown source of tasks 'adition'"),
        (
            "data: {type: rollouts, params: {tasks: {type: addition, parms: {}}}}",
            "tasks.parms: unknown key; did you",
        ),
        (
            "data: {type: rollouts, params: {tasks: {type: addition, params: {sise: 2}}}}",
            "data.params.tasks.params.sise: unknown key; did you mean 'size'?",
        ),
        (
            "data: {type: environment_rollouts, params: {env: 'gym:CartPole-v1', options: {max_step: 9}}}",
            "data.params.options.max_step: unknown key; did you mean 'max_steps'?",
        ),
        (
            "data: text\ncallbacks: [{type: evaluate_in_simulation, params: {env: [metaworld/reach], "
            "options: {camras: []}}}]",
            "callbacks.0.params.options.camras: unknown key; did you mean 'cameras'?",
        ),
        (
            "data: text\ncallbacks: [{type: evaluate_rewards, params: {tasks: {type: addition, params: {x: 1}}}}]",
            "callbacks.0.params.tasks.params.x: unknown key",
        ),
        (
            "data: digits\npolicy: {type: mlp, params: {derived: {gap: {diference: [a, b], scale: 1}}}}",
            "policy.params.derived.gap.diference: unknown key; did you mean 'difference'?",
        ),
        ("data: digits\npolicy: {type: mlp, params: {derived: {gap: {numbers: a}}}}", "derived.gap"),
        (
            "data: digits\npolicy: {type: mlp, params: {derived: {gap: {numbers: a, scale: wide}}}}",
            "policy.params.derived.gap.scale: expected a",
        ),
        ("data: digits\npolicy: {type: language, params: {path: x, lora: {rnk: 4}}}", "lora.rnk: unknown key; did you"),
        ("data: digits\npolicy: {type: language, params: {tiny: {layer: 4}}}", "tiny.layer: unknown key; did you"),
    ],
)
def test_what_is_wrong_inside_a_parameter_is_told_with_its_place(config: Config, text: str, message: str) -> None:
    base = POLICY if "policy:" not in text else POLICY.partition("\n")[2]
    with pytest.raises(ConfigError) as caught:
        config(text + "\n", base=base)
    assert message in str(caught.value)
    assert str(caught.value).startswith("x.yaml:")


@pytest.mark.parametrize(
    "text",
    [
        "data: {type: lerobot, params: {root: x, augment: {crop: 4, hue: 0.1}}}",
        "data: {type: rollouts, params: {tasks: addition}}",
        "data: {type: rollouts, params: {tasks: {type: addition, params: {size: 2}}}}",
        "data: {type: rollouts, params: {tasks: {type: addition, params: null}}}",
        "data: {type: rollouts, params: {tasks: [how, why]}}",
        "data: {type: rollouts, params: {tasks: [{prompt: how, answer: so}]}}",
        "data: {type: environment_rollouts, params: {env: 'gym:CartPole-v1', options: {max_steps: 9}}}",
        "data: {type: environment_rollouts, params: {env: 'gym:CartPole-v1', options: null}}",
    ],
)
def test_what_is_right_inside_a_parameter_passes(config: Config, text: str) -> None:
    config(text + "\n", base=POLICY)


PROGRAM = """
import json, sys
from etude.registry import REGISTRIES
for kind, key in json.loads(sys.argv[1]):
    REGISTRIES[kind].signature(key)
assert not {"torch", "numpy"} & set(sys.modules)
"""


def test_looking_inside_imports_nothing_heavy(child_env: dict[str, str]) -> None:
    keys = [("data", "lerobot"), ("data", "rollouts"), ("data", "environment_rollouts"), ("tasks", "addition")]
    command = [sys.executable, "-c", PROGRAM, json.dumps([*keys, ("environments", "gym"), ("policies", "language")])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=child_env)
    assert done.returncode == 0, done.stderr
