"""The configurations for learning from rewards and text train as their comments say, at small size."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("peft", reason="peft is not installed (extra: llm)")

from typer.testing import CliRunner

from etude.cli.main import app
from etude.runs.metrics import read_metrics

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "rl"
SMALL = ["run.root=runs", "training.training_steps=2", "training.log_every=1", "training.save_every=1", "loggers=[]"]


def etude(*words: str) -> None:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["digits-grpo", "digits-rloo", "digits-ppo", "sft", "dpo", "ipo", "kto", "simpo", "reward_model"]
)
def test_tiny_models_train_from_every_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    etude("train", str(CONFIGS / f"{name}.yaml"), f"run.name={name}", *SMALL)
    rows = read_metrics(Path("runs") / name / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    assert name[:6] != "digits" or "train/reward" in rows[0]


@pytest.mark.slow
def test_a_student_follows_a_teacher_that_was_trained_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    etude("train", str(CONFIGS / "digits-grpo.yaml"), "run.name=teacher", *SMALL)
    etude("export", "runs/teacher", "--format", "pretrained", "--output", "runs/teacher-policy")
    etude("train", str(CONFIGS / "digits-distillation.yaml"), "run.name=student", *SMALL)
    rows = read_metrics(Path("runs/student/metrics.jsonl"))
    assert "train/teacher_kl" in rows[0]
    etude(
        "train", str(CONFIGS / "digits-distillation.yaml"), "run.name=full", "algorithm.params.kind=full", *SMALL
    )  # fmt: skip
    assert read_metrics(Path("runs/full/metrics.jsonl"))[0]["train/teacher_kl"] > 0


@pytest.mark.slow
def test_a_controller_learns_from_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra: sim)")
    monkeypatch.chdir(tmp_path)
    etude(
        "train", str(CONFIGS / "ppo_control.yaml"), "run.name=pole", "training.training_steps=9", *SMALL[:1], *SMALL[2:]
    )
    rows = [row for row in read_metrics(Path("runs/pole/metrics.jsonl")) if "train/reward" in row]
    assert rows[0]["train/reward"] < 40 and rows[-1]["train/reward"] > 3 * rows[0]["train/reward"]
    assert any("eval/reward" in row for row in read_metrics(Path("runs/pole/metrics.jsonl")))
