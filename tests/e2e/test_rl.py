"""The configurations for language models train as their comments say, at small size."""

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
@pytest.mark.parametrize("name", ["digits-grpo", "digits-rloo", "digits-ppo", "sft", "dpo", "ipo"])
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
