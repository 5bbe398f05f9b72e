"""Every example runs as it stands, at a small size, with warnings as errors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import run_example

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OTHERS = ("huggingface_trainer.py", "lightning_trainer.py", "ray_workers.py", "redteam_smollm.py")
"""Examples that need a peer, and have tests beside the engine they show."""
PEERS = {"huggingface": "transformers", "lightning": "lightning"}
needs_sim = pytest.mark.skipif(find_spec("metaworld") is None, reason="needs etude[sim]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def run(name: str, arguments: list[str], cwd: Path, env: dict[str, str], fork: bool = True) -> str:
    """Run an example in a fork of this process, which has imported torch, or in a Python of its own.

    The latter once with what is always there, once with a peer, and once with the simulators.
    """
    if fork:
        done = run_example(EXAMPLES / name, arguments, cwd=cwd, env=env, timeout_s=220)
    else:
        command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_short_and_run_by_a_test() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 120, path.name
        assert path.name in OTHERS or f'run("{path.name}"' in here, f"{path.name} is not run"


def test_a_loss_of_ones_own(tmp_path: Path, child_env: dict[str, str]) -> None:
    out = run("custom_loss.py", ["--steps", "60"], tmp_path, child_env, fork=False)
    assert float(out.splitlines()[-1]) > 0.5


def test_three_ways_to_a_trainer_of_ones_own_on_every_engine(tmp_path: Path, child_env: dict[str, str]) -> None:
    engines = ["torch", *(name for name, needs in PEERS.items() if find_spec(needs) is not None)]
    printed = [run("custom_trainers.py", [one], tmp_path, child_env, fork=one != engines[-1]) for one in engines]
    shares = [re.findall(r"^\w+: ([\d.]+)$", out, re.MULTILINE) for out in printed]
    assert all(found == shares[0] for found in shares), "the numbers do not depend on the engine"
    assert len(shares[0]) == 3 and min(map(float, shares[0])) > 0.8


def test_a_red_team_trainer_with_a_loop_of_its_own(tmp_path: Path, child_env: dict[str, str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")
    out = run("redteam_own_loop.py", ["--steps", "10", "--dir", "out"], tmp_path, child_env)
    before, best = (float(re.findall(rf"^{word}: ([\d.]+)$", out, re.MULTILINE)[0]) for word in ("before", "best"))
    assert best > before + 0.2
    assert (tmp_path / "out" / "auditor" / "best" / "model.safetensors").is_file()


def test_a_simulator_of_ones_own_is_stressed(tmp_path: Path, child_env: dict[str, str]) -> None:
    pytest.importorskip("av", reason="av is not installed (extra: sim)")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: sim)")
    out = run("stress_policy.py", ["--episodes", "100", "--dir", "out"], tmp_path, child_env)
    found, by_chance = (
        int(re.findall(rf"^{word}: .* (\d+) distinct$", out, re.MULTILINE)[0]) for word in ("cross_entropy", "random")
    )
    assert found > 2 * by_chance > 0
    assert (tmp_path / "out" / "stress.html").is_file() and "the expert succeeds in" in out


def test_a_flat_script_gives_the_numbers_of_the_trainer_bit_for_bit(tmp_path: Path, child_env: dict[str, str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")
    out = run("grpo_flat.py", ["--steps", "6", "--compare"], tmp_path, child_env)
    (last,) = re.findall(r"^step 6: reward ([\d.]+)", out, re.MULTILINE)
    assert out.splitlines()[-1] == f"GRPOTrainer: reward {last}, the same weights"


def test_changing_the_loss_takes_at_most_fifteen_lines_on_every_engine() -> None:
    """Counted over the class that a user writes for each engine; comments and empty lines are not code."""
    classes = {
        "custom_loss.py": "Focal", "custom_trainers.py": "Smooth", "huggingface_trainer.py": "SmoothTrainer",
        "lightning_trainer.py": "Huber",
    }  # fmt: skip
    for name, wanted in classes.items():
        source = (EXAMPLES / name).read_text(encoding="utf-8")
        (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == wanted)
        lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
        code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
        assert len(code) <= 15, f"{name}: {len(code)} lines"
        assert any("def compute_loss" in line for line in code), name


@needs_sim
def test_arrays_become_a_dataset_and_a_policy(tmp_path: Path, child_env: dict[str, str]) -> None:
    arguments = ["--dir", "out", "--episodes", "8", "--steps", "120"]
    out = run("own_dataset.py", arguments, tmp_path, child_env, fork=False)
    assert "8 episodes, 240 frames, tasks ['reach the target']" in out
    found = re.search(r"mean distance from the target: ([\d.]+)", out)
    assert found is not None
    assert float(found.group(1)) < 0.7
    again = run("own_dataset.py", arguments, tmp_path, child_env)  # everything is there: nothing is done twice
    assert found.group(0) in again


@needs_sim
def test_a_policy_of_ones_own(tmp_path: Path, child_env: dict[str, str]) -> None:
    sizes = ["--demos", "2", "--steps", "20", "--episodes", "1"]
    out = run("own_policy.py", sizes, tmp_path, child_env)
    assert re.search(r"^[01]/1 = ", out, re.MULTILINE)
    assert (tmp_path / "runs/own-policy/policy/model.safetensors").is_file()


@needs_sim
def test_one_policy_for_several_tasks(tmp_path: Path, child_env: dict[str, str]) -> None:
    sizes = ["--demos", "2", "--steps", "20", "--episodes", "1"]
    out = run("multi_task.py", sizes, tmp_path, child_env)
    assert "{0: 'Reach a goal position', 1: 'Press a button from the top'}" in out
    assert re.search(r"^metaworld/button-press-topdown: [01]/1", out, re.MULTILINE)
    assert len((tmp_path / "runs/multi-task/evaluation.csv").read_text().splitlines()) == 3


@needs_sim
@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_a_failing_policy_is_looked_into(kind: str, tmp_path: Path, child_env: dict[str, str]) -> None:
    from etude import Trainer, TrainingConfiguration
    from etude.data import LeRobotDataModule
    from etude.policies import MLP, FlowMatching
    from etude.simulation.record import record

    policy = MLP(chunk_size=4) if kind == "mlp" else FlowMatching(down_dims=[8, 16], num_inference_steps=1)
    data = record("metaworld/reach", tmp_path / "data", episodes=2).root
    config = TrainingConfiguration(training_steps=2, batch_size=8)
    Trainer(policy, LeRobotDataModule(root=data).train_data(), config=config, run=False, show_progress=False).fit()
    policy.save_pretrained(tmp_path / "policy")
    arguments = ["policy", "--env", "metaworld/reach", "--data", "data", "--episodes", "1", "--samples", "16"]
    out = run("debug_policy.py", arguments, tmp_path, child_env)
    assert "step   0 of the chunk" in out
    assert "dimensions never varied" in out
    assert "FAILURE" in out
