"""Recipes and configurations: the same run in this process and on a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.callbacks import Callback, describe_start
from etude.config.build import build
from etude.config.load import load
from etude.service import ServiceTrainer
from tests.served import Served
from tests.unit.engines.remote.apart import adapted, difference, digits, quick, rows_of, weights_in, weights_on

pytest.importorskip("tinker")
pytest.importorskip("peft")
pytestmark = pytest.mark.timeout(300)  # the first waits for what the service imports when it makes its first model


def recipe(run: Path, url: str | None, **training: Any) -> ServiceTrainer:
    # A larger eps than usual: where gradients are nothing but rounding, Adam would make whole steps of it.
    service: dict[str, Any] = {"backend": "tinker", "config": {"learning_rate": 3e-3, "eps": 1e-4}}
    service |= {} if url is None else {"url": url}
    return ServiceTrainer(
        adapted(), digits(), class_name="remote_api_grpo", settings={"train_service": service}, run=run,
        config=quick(training_steps=3, **training), loggers=[], show_progress=False,
    )  # fmt: skip


class _Begun(Callback):
    def on_fit_start(self, trainer: Any) -> None:
        self.said = describe_start(trainer)


def test_a_grpo_recipe_gives_the_same_in_process_and_through_the_client(served: Served, tmp_path: Path) -> None:
    begun = _Begun()
    here, there = recipe(tmp_path / "here", None), recipe(tmp_path / "there", served.url)
    there.callbacks.append(begun)
    here.fit()
    there.fit()
    assert begun.said == f"training at {served.url}, into {tmp_path / 'there'}"  # and not "1 parameters"
    one, other = rows_of(tmp_path / "here"), rows_of(tmp_path / "there")
    assert [row["train/reward"] for row in one] == [row["train/reward"] for row in other]
    assert len(one) == 3
    assert difference(weights_in(here.policy), weights_on(served, tmp_path / "there")) < 1e-5
    assert difference(weights_in(here.policy), weights_in(adapted())) > 1e-3


CONFIG = """
policy: {{type: language, params: {{tiny: true, seed: 0}}}}
data:
  type: rollouts
  params: {{tasks: digits, prompts_per_step: 4, group_size: 4, max_new_tokens: 8}}
algorithm: {{type: grpo, params: {{epochs: 2, minibatches: 2}}}}
engine: {engine}
training:
  {{lr: 0.003, batch_size: 8, training_steps: 4, log_every: 1, clip_norm: 1.0, seed: 5, device: cpu,
    optimizer_params: {{eps: 1.0e-4}}}}
run: {{root: {root}, name: {name}}}
loggers: []
"""


def test_a_grpo_configuration_gives_the_same_on_this_machine_and_on_a_service(served: Served, tmp_path: Path) -> None:
    """All weights are trained, from those of seed 0, which the service has too; only the line of the engine differs."""
    engines = {"here": "torch", "there": f'{{type: remote, params: {{url: "{served.url}", timeout_s: 60}}}}'}
    trained = {}
    for name, engine in engines.items():
        (tmp_path / f"{name}.yaml").write_text(CONFIG.format(engine=engine, root=tmp_path, name=name))
        trained[name] = build(load(tmp_path / f"{name}.yaml"))
        trained[name].fit()
    one, other = rows_of(tmp_path / "here"), rows_of(tmp_path / "there")
    rewards = [row["train/reward"] for row in one]
    assert rewards == [row["train/reward"] for row in other]
    assert len(set(rewards)) > 1 and len(rewards) == 4
    here, there = weights_in(trained["here"].policy), weights_on(served, tmp_path / "there")
    assert difference(here, there) < 1e-5
    assert difference(here, weights_in(trained["there"].policy)) > 1e-3  # the policy of the second is as it was
