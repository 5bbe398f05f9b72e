"""The Ray engine as users meet it: commands, scripts, signals, lost workers, robots and language models."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
import etude.engines.ray.engine
from etude import Trainer
from etude.engines.ray import RayEngine
from etude.errors import ConfigError, DataError, RankError
from etude.runs.checkpoint import CheckpointStore
from etude.runs.directory import Run
from tests.contract.subjects import SendSignal, Subject, train
from tests.crash.harness import compare
from tests.crash.workload import WeightedTrainer
from tests.processes import reap, spawn, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LIMIT_S = 240.0
OPTIMIZER = """\
@OPTIMIZER_BUILDER_REGISTRY.register("plain")
class Plain:
    def __init__(self, lr: float = 0.1, weight_decay: float = 0.0):
        self.lr = lr

    def build(self, params):
        return torch.optim.SGD(params, lr=self.lr)
"""
PLUGIN = """\
import torch
from etude import Trainer
from etude.registry import OPTIMIZER_BUILDER_REGISTRY, TRAINER_REGISTRY
from .words import WORD


@TRAINER_REGISTRY.register("loud")
class Loud(Trainer):
    def compute_loss(self, policy, batch):
        if self.progress.step == 3:
            print(WORD)
        return super().compute_loss(policy, batch)


"""
PLUGIN += OPTIMIZER
CONFIG = """\
plugins: [parts.py]
trainer: loud
policy: {type: mlp, params: {hidden: [8]}}
data: {type: digits, params: {noise: 0.05}}
training: {batch_size: 8, training_steps: 6, log_every: 2, optimizer: plain, lr: 0.01}
loggers: []
"""


def etude(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "etude", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=LIMIT_S)


def weights(run: Path) -> dict[str, Any]:
    found = CheckpointStore(run / "checkpoints").load("last").tree["policy"]
    assert isinstance(found, dict)
    return found


def same(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of processes that work in a folder, or belong to a cluster that does."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str(folder) in (entry / "environ").read_text(errors="replace"):
                found.append((entry / "cmdline").read_text(errors="replace").replace("\0", " "))
        except OSError:
            continue
    return [line for line in found if line]


def wait_until_gone(folder: Path, limit_s: float = 120.0) -> list[str]:
    deadline = time.monotonic() + limit_s
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


# -- commands on a cluster of their own --------------------------------------------------------------------------------


def test_one_command_trains_on_a_cluster_of_its_own_and_leaves_nothing_behind(
    tmp_path: Path, child_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(CONFIG)
    (tmp_path / "parts.py").write_text(PLUGIN)
    (tmp_path / "words.py").write_text('WORD = "a word from the worker"\n')
    done = etude("train", "x.yaml", "run.name=here", env=child_env)
    assert done.returncode == 0, done.stderr
    done = etude("train", "x.yaml", "run.name=there", "engine.type=ray", env=child_env)
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "runs/here", tmp_path / "runs/there"), "plugins too are found in the workers"
    assert "reached step 6" in done.stdout and done.stdout.count("a word from the worker") == 1
    shown = re.findall(r"^step (\d)/6 ", done.stderr, re.MULTILINE)
    assert shown == ["2", "4", "6"], "progress is shown once"
    noise = re.findall(r"pid=|raylet|RayTrainWorker|WARNING|INFO", done.stdout + done.stderr)
    assert noise == [], done.stderr
    assert not (tmp_path / "ray_results").exists() and not (tmp_path / ".ray").exists(), "HOME is left alone"
    assert wait_until_gone(tmp_path) == []


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.nightly)]
)
def test_a_driver_that_is_stopped_takes_its_cluster_along(
    number: int, code: int, tmp_path: Path, child_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(CONFIG)
    (tmp_path / "parts.py").write_text(PLUGIN)
    (tmp_path / "words.py").write_text('WORD = "a word from the worker"\n')
    words = ["training.training_steps=1000000", "training.save_every=5", "run.name=long", "engine.type=ray"]
    command = [sys.executable, "-m", "etude", "train", "x.yaml", *words]
    driver = subprocess.Popen(command, env=child_env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "runs/long/checkpoints", 5, LIMIT_S)
    driver.send_signal(number)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == code, said
    left = wait_until_gone(tmp_path, 60.0 if number == signal.SIGINT else 15.0)
    # Two agents of Ray's look for their parent only now and then; nothing that trains outlives the driver.
    assert [line for line in left if not line.startswith(("ray::DashboardAgent", "ray::RuntimeEnvAgent"))] == []
    if number == signal.SIGINT:
        assert "etude: SIGINT: saving after this step" in said and "etude: interrupted by SIGINT" in said
        status = Run(tmp_path / "runs/long").status()
        assert status["state"] == "interrupted"
        assert CheckpointStore(tmp_path / "runs/long/checkpoints").load("last").step == status["step"]


# -- scripts --------------------------------------------------------------------------------------------------------

SCRIPT = """\
import threading
import numpy as np
import ray
import torch
from etude import Trainer, TrainingConfiguration
from etude.data import Digits
from etude.engines.ray import RayEngine
from etude.errors import ConfigError
from etude.policies import MLP
from etude.registry import OPTIMIZER_BUILDER_REGISTRY


"""
SCRIPT += OPTIMIZER
SCRIPT += """


class Mine(Trainer):
    def compute_loss(self, policy, batch):
        if self.config.seed == 13 and self.progress.step == 2:
            raise LookupError("no such thing")
        self.scratch += 1  # an array that the worker may write to
        return super().compute_loss(policy, batch)


def fit(engine, seed=0, **parts):
    config = TrainingConfiguration(training_steps=4, batch_size=8, optimizer="plain", lr=0.01, seed=seed, device="cpu")
    policy = MLP(hidden=[8])
    trainer = Mine(policy, Digits(), config=config, engine=engine, run=False, show_progress=False)
    vars(trainer).update(scratch=np.zeros(100_000), **parts)
    return policy, trainer.fit()


if __name__ == "__main__":
    here, expected = fit("torch")
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    there, result = fit(RayEngine())
    assert ray.is_initialized(), "a connection of the user's stays"
    assert result.steps == 4 and result.run_dir is None and result.stopped == "finished"
    assert result.metrics["train/loss"] == expected.metrics["train/loss"]
    assert all(torch.equal(one, other) for one, other in zip(here.state_dict().values(), there.state_dict().values()))
    try:
        fit(RayEngine(), seed=13)
    except LookupError as error:
        assert str(error) == "'no such thing'" or str(error) == "no such thing"
        assert "in compute_loss" in error.__notes__[0]
    try:
        fit(RayEngine(), guard=threading.Lock())
    except ConfigError as error:
        assert str(error).startswith("trainer.guard (lock) cannot be sent to the Ray workers: cannot pickle"), error
        print("done")
"""


def test_a_script_with_classes_of_its_own_needs_no_directory_and_gets_its_errors_back(
    tmp_path: Path, child_env: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_env, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["script.py"]


@pytest.mark.nightly
def test_the_example_loses_a_worker_and_gets_there(
    tmp_path: Path, child_env: dict[str, str], ray_variables: dict[str, str]
) -> None:
    command = [sys.executable, "-W", "error", str(CONFIGS.parent / "examples/ray_workers.py"), "--steps", "20"]
    env = {**child_env, **ray_variables}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/ray-workers/killed").exists() and done.stdout.startswith("step 20, loss ")


class LonelyFault(WeightedTrainer):
    """One rank cannot read its data, the other can."""

    def prepare_batch(self, batch: Any) -> Any:
        if self.rank == 1 and self.progress.step == 6:
            raise DataError("shard 1 is damaged")
        return batch


def in_driver(subject: Subject, run: Path, options: dict[str, Any]) -> None:
    sys.stdout = sys.stderr = run.with_suffix(".said").open("a", buffering=1)
    train(subject, run, **options)


def drive(subject: Subject, run: Path, **options: Any) -> int:
    (code,) = reap(spawn(lambda: in_driver(subject, run, options)), LIMIT_S)
    return code


def test_a_lost_worker_is_a_rank_error_and_the_next_run_goes_on(tmp_path: Path, on_ray_cluster: None) -> None:
    run, kills = tmp_path / "run", [SendSignal(23, signal.SIGKILL)]
    assert drive(Subject("ray", 2), run, callbacks=kills) == RankError.exit_code
    said = run.with_suffix(".said").read_text()
    # Both kill themselves, and Ray tells of whom it has missed by then.
    assert re.search(r"RankError: rank [01].*; engine\.params\.max_failures lets Ray start the group again", said), said
    assert drive(Subject("torch"), run) == 0, "a checkpoint of two workers is one of one process"
    assert CheckpointStore(run / "checkpoints").load("last").step == 50


@pytest.mark.nightly
def test_an_error_of_one_rank_ends_the_group_and_is_not_tried_again(tmp_path: Path, on_ray_cluster: None) -> None:
    run = tmp_path / "run"
    code = drive(Subject("ray", 2), run, kind=LonelyFault, engine={"max_failures": 3})
    assert code == DataError.exit_code
    assert "DataError: shard 1 is damaged" in run.with_suffix(".said").read_text()


def too_large() -> None:
    trainer = Trainer(torch.nn.Linear(1, 1), {"x": torch.zeros(4, 1)}, engine=RayEngine(num_workers=99), run=False)
    trainer.fit()


def test_workers_that_can_never_be_placed_are_refused(
    tmp_path: Path, on_ray_cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert reap(spawn(too_large), LIMIT_S) == [ConfigError.exit_code]
    assert "room for 4 of 99 workers: each needs 1 CPU, and its 1 node has 4 CPU" in capfd.readouterr().err


# -- what is trained ---------------------------------------------------------------------------------------------------


def build_and_fit(path: str, overrides: list[str], run: Path) -> None:
    from etude.config.build import build
    from etude.config.load import load

    sys.stdout = sys.stderr = run.with_suffix(".said").open("a", buffering=1)
    trainer = build(load(path, overrides), run=run)
    result = trainer.fit()
    assert result.run_dir == run and result.last is not None and result.last.is_relative_to(run)
    held = trainer.policy.state_dict()
    saved = weights(run)
    assert held.keys() == saved.keys() and all(torch.equal(held[name], saved[name]) for name in held)


def fit_config(path: str, overrides: list[str], run: Path, ranks: int = 1) -> None:
    codes = reap(spawn(lambda: build_and_fit(path, overrides, run), ranks), LIMIT_S)
    assert codes == [0] * ranks, run.with_suffix(".said").read_text()


@pytest.mark.skipif(find_spec("peft") is None, reason="needs etude[llm]")
def test_a_language_model_learns_from_rewards_as_on_the_torch_engine(tmp_path: Path, on_ray_cluster: None) -> None:
    workers = 2
    config = str(CONFIGS / "rl/digits-grpo.yaml")
    small = ["training.training_steps=3", "training.log_every=1", "training.ema_decay=0.9", "loggers=[]"]
    small.append(f"training.batch_size={32 // workers}")
    fit_config(config, small, tmp_path / "torch", ranks=workers)
    ray = ["engine.type=ray", f"engine.params.num_workers={workers}"]
    fit_config(config, [*small, *ray], tmp_path / "ray")
    assert compare(tmp_path / "ray", tmp_path / "torch") is None


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs etude[sim]")
def test_a_robot_policy_is_trained_as_on_the_torch_engine(
    tmp_path: Path, on_ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.e2e.test_configs import commands, write_data

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    path = CONFIGS / "robot/metaworld-mlp.yaml"
    write_data(Path("data/metaworld-pick-place"), commands(path)[0])
    small = ["training.training_steps=4", "training.batch_size=2", "training.evaluate_every=2", "callbacks=[]"]
    small += ["training.best_metric=eval/loss", "training.best_mode=min", "data.params.val_fraction=0.5", "loggers=[]"]
    fit_config(str(path), small, tmp_path / "torch")
    fit_config(str(path), [*small, "engine.type=ray"], tmp_path / "ray")
    assert compare(tmp_path / "ray", tmp_path / "torch") is None
