"""`etude quickstart`: all stages, each done once, whatever interrupts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.cli.quickstart import POLICIES, StageLog, read_recipe, run_quickstart
from etude.config.load import load
from etude.config.restore import load_policy
from etude.errors import ConfigError
from etude.reading import yaml12
from etude.runs.directory import Run

needs_sim = pytest.mark.skipif(find_spec("metaworld") is None, reason="needs etude[sim]")
SMALL: dict[str, Any] = {"episodes": 3, "eval_episodes": 2, "steps": 20, "noise": 0.0, "seed": 0}
ARGUMENTS = [
    "--task",
    "reach",
    "--policy",
    "mlp",
    "--episodes",
    "3",
    "--eval-episodes",
    "2",
    "--steps",
    "20",
    "--dir",
    "q",
]


def test_a_stage_is_done_once_and_its_time_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def work() -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return {"text": "well done"}

    with pytest.raises(KeyboardInterrupt):
        StageLog(tmp_path, {"x": 1}).run("record", work)
    interrupted = json.loads((tmp_path / "quickstart.json").read_text())["stages"]["record"]
    assert not interrupted["done"]
    log = StageLog(tmp_path, {"x": 1})
    assert log.run("record", work) == {"text": "well done"}
    assert log.seconds >= interrupted["seconds"]
    assert StageLog(tmp_path, {"x": 1}).run("record", work) == {"text": "well done"}
    assert len(calls) == 2
    assert "record: well done (done before" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="was begun with x=1, not 2"):
        StageLog(tmp_path, {"x": 2})
    (tmp_path / "quickstart.json").write_text("{")
    with pytest.raises(ConfigError, match="delete"):
        StageLog(tmp_path, {"x": 1})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recipe_is_the_shipped_presets_with_ones_own_data_seed_and_length(policy: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(yaml12.write(read_recipe(f"metaworld-{policy}", "d", seed=3, steps=7)))
    found, preset = load(tmp_path / "x.yaml").config, load(f"metaworld-{policy}").config
    assert (found.policy, found.data.params) == (preset.policy, {"root": "d"})
    measured = {name: getattr(preset.training, name) for name in ("evaluate_every", "best_metric", "best_mode")}
    assert found.training.model_copy(update=measured) == preset.training.model_copy(
        update={"seed": 3, "training_steps": found.training.training_steps}
    )
    assert read_recipe(f"metaworld-{policy}", "d")["training"]["training_steps"] > 7


def test_unknown_tasks_and_policies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'pick-place'"):
        run_quickstart("pick-plac", "act", tmp_path, **SMALL)
    with pytest.raises(ConfigError, match=r"no task 'bad/\.\./reach'"):
        run_quickstart("bad/../reach", "act", None, **SMALL)
    with pytest.raises(ConfigError, match="act, mlp, diffusion, flow"):
        run_quickstart("reach", "pixie", tmp_path, **SMALL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickstart that was left alone, in the folder `q` of this one."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_quickstart("reach", "mlp", Path("q"), **SMALL)
    return folder


@needs_sim
@pytest.mark.slow
def test_everything_is_left_in_one_folder(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole)
    page = Path("q/report.html").read_text()
    for text in ("Success in simulation", "metaworld/reach", "data:video/mp4;base64,"):
        assert text in page
    stages = json.loads(Path("q/quickstart.json").read_text())["stages"]
    assert list(stages) == ["record", "train", "evaluate", "report"]
    assert all(stage["done"] and stage["seconds"] > 0 for stage in stages.values())
    assert stages["record"]["facts"]["episodes"] == 3
    assert stages["train"]["facts"]["steps"] == 20
    assert Run(Path("q")).state() == "finished"
    assert Path("q/evaluation/metaworld-reach-test.csv").exists()
    kept = {
        name: Path("q", name).stat().st_mtime_ns for name in ("metrics.jsonl", "evaluation/metaworld-reach-test.csv")
    }
    run_quickstart("reach", "mlp", Path("q"), **SMALL)
    assert kept == {name: Path("q", name).stat().st_mtime_ns for name in kept}


@needs_sim
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupted_anywhere_it_goes_on_to_the_same_end(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "etude", "quickstart", *ARGUMENTS]
    for sign in ("[1/4] record ...", "[2/4] train ...", "[3/4] evaluate ..."):
        _kill_after(sign, command)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("report: q/report.html")
    for name in ("evaluation/metaworld-reach-test.csv", "demonstrations/etude_recording.json"):
        assert Path("q", name).read_text() == (whole / "q" / name).read_text()
    facts = [json.loads(Path(name, "quickstart.json").read_text())["stages"] for name in ("q", whole / "q")]
    for stage in ("record", "train", "evaluate"):
        assert facts[0][stage]["facts"] == facts[1][stage]["facts"]
    weights = [load_policy(Path(name)).state_dict() for name in ("q", whole / "q")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def _kill_after(sign: str, command: list[str]) -> None:
    """Start a command and kill it, with its children, a little after it has printed a line."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(sign):
                time.sleep(0.3)  # somewhere in the middle of it
                os.killpg(child.pid, signal.SIGKILL)
