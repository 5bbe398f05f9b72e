"""A run that goes on, or had finished, with other settings, code or data than before says which."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from etude import Result, Trainer, TrainingConfiguration
from etude.cli.main import app
from etude.data.coerce import as_data
from etude.data.fingerprint import describe_change, fingerprint
from etude.errors import ConfigError
from tests.unit.cli.test_train import CONFIG, runner

SCRIPT = """
import torch
from torch import nn
from etude import Trainer

class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.zeros(3))

class Fitting(Trainer):
    def compute_loss(self, policy, batch):
        return (batch["x"] - policy.at).square().mean()
"""


def module_of(path: Path, text: str) -> Any:
    """Import a script as it is now."""
    path.write_text(text)
    sys.dont_write_bytecode = True
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def rows(samples: int = 24) -> Tensor:
    return torch.arange(3.0 * samples).view(samples, 3)


def fit(tmp_path: Path, steps: int = 4, text: str = SCRIPT, x: Any = None, **options: Any) -> Result:
    module = module_of(tmp_path / "script.py", text)
    config = TrainingConfiguration(training_steps=steps, batch_size=4, **options)
    data = {"x": rows() if x is None else x}
    return module.Fitting(
        module.Mean(), data, config=config, run=tmp_path / "run", loggers=[], show_progress=False
    ).fit()


def test_a_finished_run_that_is_started_again_says_so_and_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path)
    assert "finished" not in caplog.text
    again = fit(tmp_path)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"{tmp_path / 'run'} had finished before (step 4: reached its 4 steps) and was not trained;")
    assert 'resume="never"' in said
    assert (again.first_step, again.steps, again.changes) == (4, 4, ())


CHANGED = {
    "the code of the trainer (Fitting)": {"text": SCRIPT.replace(".square()", ".abs()")},
    "the code of the policy (Mean)": {"text": SCRIPT.replace("torch.zeros(3)", "torch.ones(3)")},
    "training.lr: 0.001 -> 0.5": {"lr": 0.5},
    "the data has 23 samples instead of 24": {"x": rows(23)},
    "the data has other content, or another order": {"x": rows().flip(0)},
}


@pytest.mark.parametrize("said", CHANGED)
def test_what_changed_since_a_run_had_finished_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    fit(tmp_path, lr=0.001)
    result = fit(tmp_path, **{"lr": 0.001, **CHANGED[said]})
    assert result.changes == (said,)
    assert f"since then ({said}); ask for more steps" in caplog.text
    before = (tmp_path / "run" / "config.yaml").read_text()
    assert "lr: 0.001" in before  # what it was trained with, not what was asked for
    assert fit(tmp_path, **{"lr": 0.001, **CHANGED[said]}).changes == (said,)  # not forgotten the second time


@pytest.mark.parametrize("said", CHANGED)
def test_what_changed_when_a_run_goes_on_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str) -> None:
    fit(tmp_path, lr=0.001)
    with caplog.at_level(logging.INFO, "etude"):
        assert fit(tmp_path, **{"steps": 6, "lr": 0.001, **CHANGED[said]}).first_step == 4
    assert f"resuming from {tmp_path / 'run' / 'checkpoints' / 'step-00000004'} at step 4" in caplog.text
    assert f"changed since the last session: {said}" in caplog.text


def test_those_who_have_not_set_up_logging_see_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = module_of(tmp_path / "script.py", SCRIPT)
    for steps in (4, 6):
        config = TrainingConfiguration(training_steps=steps, batch_size=4)
        module.Fitting(module.Mean(), {"x": rows()}, config=config, run=tmp_path / "run", loggers=[]).fit()
    shown = capsys.readouterr().err
    assert "etude: resuming from" in shown
    assert "etude: changed since the last session: training.training_steps: 4 -> 6" in shown


def test_code_without_source_and_checkpoints_without_notes_are_passed_over(tmp_path: Path) -> None:
    for _ in range(2):
        scope: dict[str, Any] = {}
        exec(SCRIPT, scope)  # noqa: S102 - a class whose source nobody can find
        config = TrainingConfiguration(training_steps=4, batch_size=4)
        trainer: Trainer = scope["Fitting"](
            scope["Mean"](), {"x": rows()}, config=config, run=tmp_path / "run", loggers=[], show_progress=False
        )
        assert trainer.fit().changes == ()


class Table(Dataset[Tensor]):
    """A dataset that holds a table, and must not be asked for samples."""

    def __init__(self, x: Tensor) -> None:
        self.x, self._cache = x, torch.rand(3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("asked for a sample")


class Named(Table):
    fingerprint = "version 1"


@pytest.mark.parametrize("wrap", [Table, TensorDataset, lambda x: {"x": x}, list, lambda x: x.numpy()])
def test_tables_are_told_apart_by_a_few_rows_and_nothing_else(wrap: Any) -> None:
    first = fingerprint(as_data(wrap(rows(1000))))
    assert first is not None
    assert first == fingerprint(as_data(wrap(rows(1000))))
    other = rows(1000)
    other[-1, 0] = -1
    for changed in (other, rows(1000).flip(0), rows(1000).double(), rows(999)):
        assert describe_change(first, fingerprint(as_data(wrap(changed))))


def test_datasets_on_disk_are_told_apart_by_their_files_and_episodes(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from etude.data import LeRobotDataset
    from tests.unit.data.lerobot.recordings import record

    def marked(root: Path, **options: Any) -> Any:
        return fingerprint(as_data(LeRobotDataset(root, cache_dir=tmp_path / "cache", **options)))

    first = marked(record(tmp_path / "a"))
    assert first == marked(record(tmp_path / "b"))  # a copy elsewhere is the same data
    assert describe_change(first, marked(tmp_path / "a", episodes=[1, 2, 0]))
    assert (
        describe_change(first, marked(record(tmp_path / "c", (6, 7, 5))))
        == "the data has other content, or another order"
    )


def test_streams_have_no_fingerprint_and_datasets_may_bring_their_own() -> None:
    assert fingerprint(as_data(iter([rows()]))) is None
    assert fingerprint(as_data(Named(rows()))) == fingerprint(as_data(Named(rows().flip(0))))
    assert describe_change(None, {"length": 1}) is None


def test_the_command_does_not_end_as_if_it_had_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("etude.cli.train.show_log", lambda: None)  # would outlive this test
    (tmp_path / "x.yaml").write_text(CONFIG)
    assert runner.invoke(app, ["train", "x.yaml"]).stdout.startswith("reached step 6")
    same = runner.invoke(app, ["train", "x.yaml", "training.log_every=3"])
    assert (same.exception, same.stdout) == (None, "run: runs/tiny\n")
    assert "runs/tiny had finished before (step 6: reached its 6 steps) and was not trained" in caplog.text
    other = runner.invoke(app, ["train", "x.yaml", "training.lr=0.5"])
    assert isinstance(other.exception, ConfigError)
    assert "was not trained, but now differs: training.lr: " in str(other.exception)
    assert other.stdout == ""
