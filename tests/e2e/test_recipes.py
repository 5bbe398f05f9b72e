"""Recipes run as the guide to custom trainers says, and give the numbers of every other way to write the same."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="peft is not installed (extra: llm)")

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from etude import Trainer, TrainingConfiguration
from etude.cli.main import app
from etude.cli.train import resume_run, train_config
from etude.config.build import build
from etude.config.load import load
from etude.runs.metrics import read_metrics
from tests.processes import reap, spawn

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "recipe"

# As the guide has them, with the model and the data in place of `# ... rest of config`.
REST = """
data: {type: digits, batch_size: 8, rollout_repeat_n: 2}
service: {inference_service: {model: tiny, max_tokens: 8}}
loggers: []
"""
MY_TASK = """\
# recipe/my_task/my_task.yaml
trainer:
  # Custom trainer registration
  custom_trainer_module_path: "recipe/my_task/my_trainer.py"
  custom_trainer_class_name: "MyCustomTrainer"

  # Standard trainer config
  total_train_steps: 100
  train_service:
    backend: "self-hosted"
    world_size: 8

  # Your custom algorithm config
  algorithm:
    my_param: 0.5
    use_custom_advantage: true
"""
MY_REMOTE_TASK = """\
# recipe/my_task/my_task.yaml
trainer:
  custom_trainer_module_path: "recipe/my_task/my_remote_trainer.py"
  custom_trainer_class_name: "MyRemoteTrainer"

  total_train_steps: 100
  train_service:
    backend: "tinker"
    url: "http://tinker-service:8000"
    config:
      loss_fn: "importance_sampling"
      learning_rate: 2e-6

  algorithm:
    advantage_weight: 1.0
"""
TEST_CONFIG = """\
# recipe/my_task/test_config.yaml
trainer:
  total_train_steps: 2  # Just 2 steps for testing
  custom_trainer_module_path: "recipe/my_task/my_trainer.py"
  custom_trainer_class_name: "MyCustomTrainer"
  # ... rest of config
"""


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipe" / "my_task"
    folder.mkdir(parents=True)
    for file in (SHIPPED / "my_task").glob("my_*.py"):
        shutil.copy(file, folder)
    for name, text in (("my_task", MY_TASK), ("my_remote_task", MY_REMOTE_TASK), ("test_config", TEST_CONFIG)):
        (folder / f"{name}.yaml").write_text(text + REST)
    return tmp_path


def etude(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def ran(*words: str) -> None:
    done = etude(*words)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"


def weights(run: str) -> dict[str, torch.Tensor]:
    return load_file(Path("runs") / run / "checkpoints" / "last" / "policy.safetensors")


def steps(run: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(Path("runs") / run / "metrics.jsonl") if "train/loss" in row]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- as the guide says ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_integration_test_of_the_guide_runs_in_a_process_of_its_own() -> None:
    command = "-m etude train -m self-hosted -c recipe/my_task/test_config.yaml --run-nexrl -t first"
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, check=False, timeout=110, cwd="."
    )
    assert done.returncode == 0, done.stderr
    assert "run: runs/first" in done.stdout
    rows = steps("first")
    assert [row["step"] for row in rows] == [1, 2]
    assert all("train/advantage_mean" in row for row in rows)


@pytest.mark.slow
def test_the_remote_recipe_of_the_guide_runs() -> None:
    recipe = "recipe/my_task/my_remote_task.yaml"
    ran("train", "-m", "training-service", "--config", recipe, "-r", "-t", "remote", "training.training_steps=2")
    assert all("train/custom/advantage_mean" in row for row in steps("remote"))
    assert len(steps("remote")) == 2


@pytest.mark.slow
def test_ranks_are_started_and_change_no_number() -> None:
    recipe, short = (
        "recipe/my_task/my_task.yaml",
        ("training.training_steps=2", "training.optimizer=sgd", "training.lr=0.1"),
    )
    ran("train", recipe, "-t", "one", *short, "trainer.train_service.world_size=1")
    ran("train", recipe, "-t", "two", *short, "trainer.train_service.world_size=2")
    one, two = weights("one"), weights("two")
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6
    assert [row["step"] for row in steps("two")] == [1, 2]


@pytest.mark.nightly
def test_the_recipe_of_the_guide_runs_on_eight_ranks() -> None:
    ran("train", "-m", "self-hosted", "-c", "recipe/my_task/my_task.yaml", "-r", "-t", "x", "training.training_steps=2")
    assert len(steps("x")) == 2


def test_a_mode_that_the_file_contradicts_is_an_error() -> None:
    done = etude("train", "-m", "training-service", "-c", "recipe/my_task/my_task.yaml")
    assert "'self-hosted' means self-hosted, which contradicts -m training-service" in str(done.exception)
    assert etude("train", "-m", "elsewhere", "-c", "recipe/my_task/my_task.yaml").exit_code == 2


def test_a_recipe_is_checked_with_its_own_lines() -> None:
    done = etude("check", "recipe/my_task/my_task.yaml")
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("training.training_steps ")]
    assert line.split() == ["training.training_steps", "100", "recipe/my_task/my_task.yaml:8:3"]


# -- the same numbers -------------------------------------------------------------------------------------------------

RECIPE = """\
trainer:
  type: self_hosted_grpo
  total_train_steps: 3
  save_freq: 1
  train_service: {backend: self-hosted, actor: {ppo_micro_batch_size: 32, optim: {lr: 3.0e-3}}}
data: {type: digits, batch_size: 4, rollout_repeat_n: 8}
service: {inference_service: {model: tiny, max_tokens: 16}}
loggers: []
"""


@pytest.mark.slow
def test_a_recipe_a_configuration_and_python_give_the_same_weights() -> None:
    from etude.algorithms.grpo import GRPO
    from etude.policies.language.build import language_model
    from etude.rollouts.text import TextRollouts

    Path("x.yaml").write_text(RECIPE)
    ran("train", "x.yaml", "-t", "recipe")
    preset = REPOSITORY / "configs" / "rl" / "digits-grpo.yaml"
    short = ("training.training_steps=3", "training.save_every=1", "training.log_every=1", "loggers=[]")
    ran("train", str(preset), "run.name=preset", *short)
    assert same(weights("recipe"), weights("preset"))
    assert [row["train/loss"] for row in steps("recipe")] == [row["train/loss"] for row in steps("preset")]
    data = TextRollouts("digits", prompts_per_step=4, group_size=8, max_new_tokens=16)
    training = TrainingConfiguration(training_steps=3, batch_size=32, lr=3e-3, log_every=1)
    policy = language_model(tiny=True)
    policy.load_state_dict(build(load("x.yaml")).policy.state_dict())  # drawn from the seed of the configuration
    trainer = Trainer(policy, data, GRPO(), config=training, run="runs/python", loggers=[])
    trainer.fit()
    assert same(weights("recipe"), weights("python"))


KEEPER = """\
import os
import signal

from etude.service import SelfHostedTrainer


class Keeper(SelfHostedTrainer):
    def __init__(self, config):
        super().__init__(config)
        self.baseline = 0.0

    def _prepare_batch(self, batch):
        rewards = batch.metadata["rewards"]
        if self._train_step == 3 and os.path.exists("kill"):
            os.remove("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        batch.metadata["advantages"] = (rewards - self.baseline).tolist()
        self.baseline = 0.9 * self.baseline + 0.1 * float(rewards.mean())
        return batch, {"baseline": self.baseline}
"""


@pytest.mark.slow
def test_a_killed_recipe_goes_on_exactly_with_what_its_trainer_kept(workspace: Path) -> None:
    (workspace / "keeper.py").write_text(KEEPER)
    custom = "custom_trainer_module_path: keeper.py\n  custom_trainer_class_name: Keeper"
    (workspace / "x.yaml").write_text(RECIPE.replace("type: self_hosted_grpo", custom).replace("steps: 3", "steps: 5"))

    def train(name: str) -> None:
        train_config(Path("x.yaml"), [f"run.name={name}"], "auto")

    train("whole")
    (workspace / "kill").touch()
    assert reap(spawn(lambda: train("killed"))) == [-signal.SIGKILL]
    assert len(steps("killed")) < 5
    (workspace / "x.yaml").unlink()  # the run has what it needs, in our words
    resume_run("killed", [])
    assert same(weights("whole"), weights("killed"))
    assert steps("whole")[-1]["train/baseline"] == steps("killed")[-1]["train/baseline"]


# -- the recipes that come along --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my_task", "math", "agent"])
def test_each_recipe_has_a_configuration_of_two_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    ran("train", f"recipe/{name}/test_config.yaml", f"run.root={tmp_path / 'runs'}", "-t", name, "loggers=[]")
    monkeypatch.chdir(tmp_path)
    assert [row["step"] for row in steps(name)] == [1, 2]
    evaluated = [row for row in read_metrics(tmp_path / "runs" / name / "metrics.jsonl") if "eval/reward" in row]
    assert bool(evaluated) is (name == "math")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_that_come_along_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    if path.stem != "common":
        load(path)


@pytest.mark.nightly
def test_a_tiny_model_learns_to_ask_before_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    ran("train", "recipe/agent/agent.yaml", f"run.root={tmp_path / 'runs'}", "-t", "agent", "loggers=[]")
    monkeypatch.chdir(tmp_path)
    found = [row["train/reward"] for row in steps("agent")]
    assert sum(found[:5]) / 5 < 0.2
    assert sum(found[-10:]) / 10 > 0.9
