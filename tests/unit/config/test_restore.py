"""Trained policies come back from runs, checkpoints and saved policies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from etude import Trainer, TrainingConfiguration
from etude.config.build import build
from etude.config.load import load
from etude.config.restore import load_policy
from etude.data.windows import Windows
from etude.errors import CheckpointError
from etude.policies.mlp import MLP
from etude.policies.origin import PolicyOrigin, origin_of

CONFIG = """\
policy: {type: mlp, params: {hidden: [8]}}
data: digits
training: {training_steps: 4, log_every: 2, save_every: 2, ema_decay: 0.5, keep_last: 3}
run: {name: tiny}
loggers: []
"""
STATE = {"observation.state": torch.linspace(0, 1, 64).reshape(1, 64)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    pytest.importorskip("sklearn")
    (tmp_path / "x.yaml").write_text(CONFIG)
    trainer = build(load(tmp_path / "x.yaml", [f"run.root={tmp_path / 'runs'}"]))
    trainer.show_progress = False
    trainer.fit()
    return tmp_path / "runs/tiny"


def predict(policy: Any) -> torch.Tensor:
    out: torch.Tensor = policy.predict_action_chunk(STATE)
    return out


def test_a_run_gives_its_averaged_weights(run: Path) -> None:
    policy = load_policy(run)
    assert not policy.training
    from etude.runs.directory import Run

    tree = Run(run).checkpoints().load("last").tree
    for name, value in policy.named_parameters():
        assert torch.equal(value, tree["ema"][name])
        assert not torch.equal(value, tree["policy"][name])


def test_the_best_is_taken_unless_another_is_asked_for(run: Path) -> None:
    weights = {which: next(load_policy(run, which).parameters()) for which in ("auto", "last", "2", "4")}
    assert torch.equal(weights["auto"], weights["4"])  # without evaluation there is no best
    assert torch.equal(weights["last"], weights["4"])
    assert not torch.equal(weights["2"], weights["4"])
    assert str(origin_of(load_policy(run))) == "last checkpoint, step 4"
    assert str(origin_of(load_policy(run, "2"))) == "step 2"
    assert origin_of(load_policy(run / "checkpoints/last")) == PolicyOrigin(run.resolve(), 4)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        load_policy(run, "3")


def test_a_checkpoint_is_enough(run: Path) -> None:
    for checkpoint in (run / "checkpoints/last", run / "checkpoints/step-00000004"):
        assert torch.equal(predict(load_policy(checkpoint)), predict(load_policy(run)))


def test_a_saved_policy_is_loaded(run: Path, tmp_path: Path) -> None:
    policy = load_policy(run)
    policy.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    assert torch.equal(predict(load_policy(tmp_path / "saved")), predict(policy))


def test_the_data_may_be_gone(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = {"observation.state": torch.randn(20, 64, generator=generator), "action": torch.randn(20, 2)}
    trainer = Trainer(
        MLP(hidden=[8], chunk_size=3), Windows(columns, [20], {"action": [0, 1, 2]}), run=tmp_path / "run", loggers=[],
        show_progress=False,
        config=TrainingConfiguration(training_steps=2),
    )  # fmt: skip
    trainer.fit()
    (tmp_path / "run/config.yaml").unlink(missing_ok=True)
    assert torch.equal(predict(load_policy(tmp_path / "run")), predict(trainer.policy))


def test_what_is_no_policy_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run with checkpoints, nor a checkpoint, nor a saved policy"):
        load_policy(tmp_path)
    shutil.rmtree(run / "checkpoints/step-00000004")
    assert torch.equal(next(load_policy(run).parameters()), next(load_policy(run, "2").parameters()))


def test_an_export_is_called_an_export(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": "etude-export", "schema_version": 1, "kind": "onnx"}')
    with pytest.raises(CheckpointError, match=r"is an export, .*`etude serve-policy`.* run or checkpoint"):
        load_policy(tmp_path)
