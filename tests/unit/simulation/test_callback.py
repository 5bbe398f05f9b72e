"""Success in simulation as a metric of training, and as what ranks checkpoints."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from etude import Callback, Trainer, TrainingConfiguration
from etude.data.windows import Windows
from etude.errors import ConfigError, EtudeError
from etude.policies.mlp import MLP
from etude.runs.metrics import read_metrics
from etude.simulation.callback import EvaluateInSimulation
from etude.simulation.evaluate import evaluate_policy

pytest.importorskip("gymnasium")
OPTIONS: dict[str, Any] = {"render": False, "success_return": 25.0, "max_steps": 40}


def make_trainer(tmp_path: Path, *callbacks: Any, **settings: Any) -> Trainer:
    """Teach to balance a pole from random states labelled by a rule."""
    states = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)) * 0.2
    actions = (states[:, 2] + 0.3 * states[:, 3] > 0).long()

    class Poles(Windows):
        @property
        def spec(self) -> Any:  # type: ignore[override]
            from etude.types import DataSpec, Feature

            found = super().spec
            return DataSpec({**found.features, "action": Feature((), "int64", "action", classes=2)}, 50.0)

    data = Poles({"observation.state": states, "action": actions}, [400])
    training = TrainingConfiguration(
        **{"training_steps": 40, "lr": 1e-2, "log_every": 20, "best_metric": "eval/success", "best_mode": "max"}
        | settings
    )
    return Trainer(
        MLP(hidden=[16]), data, config=training, run=tmp_path / "run", callbacks=list(callbacks), loggers=[],
        show_progress=False,
    )  # fmt: skip


def test_success_is_logged_and_ranks_checkpoints(tmp_path: Path) -> None:
    simulation = EvaluateInSimulation("gym:CartPole-v1", every=15, episodes=4, options=OPTIONS)
    result = make_trainer(tmp_path, simulation).fit()
    rows = {
        row["step"]: row["eval/success"]
        for row in read_metrics(tmp_path / "run/metrics.jsonl")
        if "eval/success" in row
    }
    assert list(rows) == [15, 30, 40]
    assert rows[40] == result.metrics["eval/success"] == 1.0
    assert result.best is not None
    best = min(step for step, success in rows.items() if success == max(rows.values()))
    assert int(result.best.name.split("-")[1]) == best
    kept = json.loads((tmp_path / "run/evaluation/step-00000040.json").read_text())
    assert (kept["split"], kept["successes"]) == ("validation", 4)


def test_simulating_changes_nothing_about_training(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path / "a", best_metric="eval/loss", best_mode="min")
    plain.fit()
    watched = make_trainer(
        tmp_path / "b", EvaluateInSimulation("gym:CartPole-v1", every=7, episodes=2, options=OPTIONS)
    )
    watched.fit()
    for one, other in zip(plain.policy.parameters(), watched.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_metric_is_what_evaluate_policy_finds(tmp_path: Path) -> None:
    simulation = EvaluateInSimulation("gym:CartPole-v1", every=40, episodes=6, options=OPTIONS)
    trainer = make_trainer(tmp_path, simulation)
    found = trainer.fit().metrics
    alone = evaluate_policy(trainer.policy, "gym:CartPole-v1", episodes=6, split="validation", options=OPTIONS)
    assert (alone.success, alone.total.mean_steps) == (found["eval/success"], found["eval/steps"])


def test_a_resumed_run_simulates_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def steps_of(folder: str) -> list[int]:
        rows = read_metrics(tmp_path / folder / "run/metrics.jsonl")
        return [row["step"] for row in rows if "eval/success" in row]

    callback = lambda: EvaluateInSimulation("gym:CartPole-v1", every=10, episodes=2, options=OPTIONS)  # noqa: E731
    make_trainer(tmp_path / "whole", callback()).fit()
    make_trainer(tmp_path / "parts", callback(), training_steps=20).fit()
    make_trainer(tmp_path / "parts", callback()).fit()
    assert steps_of("parts") == steps_of("whole") == [10, 20, 30, 40]


@pytest.mark.parametrize(
    "env, message",
    [
        (
            "gym:Pendulum-v1",
            r"observation.state \[4\].*, but .* has observation.state \[3\].*: observation.state differs",
        ),
        ("gym:FrozenLake-v1", r"FrozenLake"),
        ("gym:Nope-v0", r"Nope"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused_before_the_first_step(
    tmp_path: Path, env: str, message: str
) -> None:
    steps: list[int] = []

    class Count(Callback):
        def on_step_end(self, trainer: Any, metrics: Any) -> None:
            steps.append(trainer.progress.step)

    trainer = make_trainer(tmp_path, EvaluateInSimulation(env, options={"render": False}), Count())
    with pytest.raises(EtudeError, match=message) as caught:
        trainer.fit()
    assert not steps and "\n" not in str(caught.value)


def test_simulating_counts_for_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(EvaluateInSimulation):
        def evaluate(self, trainer: Any) -> Any:
            time.sleep(0.6)
            return {"success": 1.0}

    trainer = make_trainer(tmp_path, Slow("gym:CartPole-v1", every=10, options=OPTIONS), log_every=10)
    trainer.show_progress = True
    trainer.fit()
    rows = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    laps = [row["time/step_ms"] for row in rows if "time/step_ms" in row]
    assert len(laps) == 4 and max(laps[1:]) < 60.0  # 60 ms would be the pause, spread over ten steps
    assert all(row["time/evaluate_s"] >= 0.6 for row in rows if "eval/success" in row)
    rates = [float(rate) for rate in re.findall(r"([\d.e+]+) steps/s", capsys.readouterr().err)]
    assert rates[-1] > 40 / 2.4  # four pauses alone would take 2.4 s


@pytest.mark.slow
def test_films_are_made_while_training(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    simulation = EvaluateInSimulation(
        "gym:CartPole-v1", every=20, episodes=2, options={"max_steps": 5}, video_dir="films", videos=1
    )
    make_trainer(tmp_path, simulation).fit()
    folders = sorted((tmp_path / "run/films").iterdir())
    assert [folder.name for folder in folders] == ["step-00000020", "step-00000040"]
    assert all(len(list(folder.glob("*.mp4"))) == 1 for folder in folders)


def test_a_metric_that_nobody_measures_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, best_metric="eval/sucess", evaluate_every=10)
    trainer.eval_data = trainer.data.dataset  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="eval/sucess"):
        trainer.fit()


def test_it_can_be_named_in_a_configuration() -> None:
    from etude.registry import CALLBACK_REGISTRY

    made = CALLBACK_REGISTRY.get("evaluate_in_simulation")(env="metaworld/reach", every="5 min", episodes=3)
    assert str(made.every) == "300 seconds"
