"""`etude redteam` and the example, with tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from etude.cli.auditing import is_auditing, read_config
from etude.cli.main import app
from etude.errors import ConfigError
from etude.redteam.config import RedTeamConfig
from etude.redteam.prompts import NEUTRAL_DEV_PROMPTS, NEUTRAL_PROMPTS, read_prompts
from tests.processes import run_example
from tests.unit.redteam.tiny_models import tiny


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("auditor", 0), ("target", 1)):
        tiny(seed).save_pretrained(tmp_path / name)
    (tmp_path / "prompts.txt").write_text("a bad cafe\n\ni hide\n")
    return tmp_path


def invoke(*arguments: Any) -> str:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


SMALL = ("--set", "training.log_every=1", "--set", "auditor_sampling={max_new_tokens: 3}", "--set", "tree_depth=1",
         "--set", "target_sampling={max_new_tokens: 3}", "--set", "lora=2")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dpo", "ppo"])
def test_train_then_evaluate(models: Path, algorithm: str) -> None:
    said = invoke(
        "redteam", "train", "--auditor", "auditor", "--target", "target", "--prompts", "prompts.txt", "--steps", 2,
        "--scorer", "vader-signed", "--algorithm", algorithm, "--run", "mine", "--output", "found", *SMALL,
    )  # fmt: skip
    assert "reached step 2" in said and "etude redteam evaluate found/best" in said
    kept = yaml.safe_load((models / "found" / "redteam.yaml").read_text())
    assert (kept["target"], kept["algorithm"], kept["tree_depth"]) == ("target", algorithm, 1)
    assert RedTeamConfig.model_validate(kept).training.training_steps == 2
    assert (models / "runs" / "mine" / "metrics.jsonl").is_file()
    said = invoke("redteam", "evaluate", "found/best", "--rollouts", 4)
    assert "response_score" in said and "attack success: 0/4" in said
    found = json.loads((models / "found" / "best-evaluation" / "redteam.json").read_text())
    assert found["auditor"]["rollouts"] == found["baseline"]["rollouts"] == 4
    assert "Baseline" in (models / "found" / "best-evaluation" / "redteam.html").read_text()
    shown = invoke("redteam", "evaluate", "found/best", "--rollouts", 2, "--json", "--output", "elsewhere")
    assert json.loads(shown)["measure"] == "response_score"


@pytest.mark.slow
def test_resume_goes_on_with_a_run_of_redteam_train(models: Path) -> None:
    given = ("redteam", "train", "--auditor", "auditor", "--target", "target", "--prompts", "prompts.txt", *SMALL)
    invoke(*given, "--steps", 4, "--run", "whole", "--output", "all-in-one")
    invoke(*given, "--steps", 2, "--run", "parts", "--output", "in-two")
    said = invoke("resume", "parts", "training.training_steps=4")
    assert "reached step 4" in said and "auditor: in-two/best, in-two/last" in said
    assert not [run for run in (models / "runs").iterdir() if run.name not in ("whole", "parts")]
    weights = [(models / name / "last" / "model.safetensors").read_bytes() for name in ("all-in-one", "in-two")]
    assert weights[0] == weights[1]
    with pytest.raises(ConfigError, match="targte: unknown key; did you mean 'target'"):
        CliRunner().invoke(app, ["resume", "parts", "targte=x"], catch_exceptions=False)


@pytest.mark.parametrize(
    "text, expected",
    [("redteam: {target: x}\n", True), ("redteam: {}\npolicy: x\n", False), ("policy: x\n", False), ("a: [\n", False)],
)
def test_runs_of_redteam_train_are_told_by_their_configuration(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert is_auditing(tmp_path / "config.yaml") is expected


def test_a_file_and_options_over_it(tmp_path: Path) -> None:
    path = tmp_path / "redteam.yaml"
    path.write_text("target: my-model\nscorer: vader\ntraining: {training_steps: 7, lr: 1e-4}\n")
    config = read_config(path, {"scorer": "profanity", "auditor": None}, ["training.seed=3", "params.beta=0.2"]).config
    assert (config.target, config.scorer, config.auditor) == ("my-model", "profanity", "smollm2")
    assert (config.training.training_steps, config.training.lr, config.training.seed) == (7, 1e-4, 3)
    assert config.params == {"beta": 0.2}


@pytest.mark.parametrize(
    "text, settings, message",
    [
        ("targte: x\n", [], "targte: unknown key; did you mean 'target'"),
        ("tree_width: 0\n", [], "tree_width: "),
        ("- a\n", [], "mapping"),
        ("", ["tree_width"], "write key=value"),
        ("", ["target.x.y=1"], "target is text, it has no 'x'|target"),
        ("training: {lr: fast}\n", [], r"training\.lr"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, settings: list[str], message: str) -> None:
    path = tmp_path / "redteam.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(path, {}, settings)


def test_wrong_parameters_of_the_algorithm_are_named(models: Path) -> None:
    config = RedTeamConfig(auditor="auditor", target="target", params={"betta": 1})
    with pytest.raises(ConfigError, match=r"params: .*betta"):
        config.build()


def test_the_packaged_prompts_are_short_distinct_and_apart() -> None:
    assert len(NEUTRAL_PROMPTS) == len(set(NEUTRAL_PROMPTS)) == 40
    assert not set(NEUTRAL_PROMPTS) & set(NEUTRAL_DEV_PROMPTS)
    from etude.redteam.scorers import ProfanityScorer, VaderScorer

    every = [*NEUTRAL_PROMPTS, *NEUTRAL_DEV_PROMPTS]
    assert max(ProfanityScorer().score(every)) < 0.5
    assert max(VaderScorer().score(every)) < 0.5
    assert max(map(len, every)) < 50


def test_prompts_are_read_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one \n\n two\n")
    assert read_prompts(tmp_path / "prompts.txt") == ["one ", " two"]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(tmp_path / "empty.txt")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "ipo"])
def test_the_example_runs(tmp_path: Path, repository: Path, child_env: dict[str, str], algorithm: str) -> None:
    example = repository / "examples" / "redteam_smollm.py"
    assert len(example.read_text().splitlines()) <= 120
    options = ["--tiny", "--steps", "2", "--algorithm", algorithm, "--dir", str(tmp_path / "run")]
    done = run_example(example, options, cwd=tmp_path, env=child_env)
    assert done.returncode == 0, done.stderr
    assert "diversity of probes" in done.stdout
    assert (tmp_path / "run" / "redteam.html").is_file() and (tmp_path / "run" / "auditor" / "best").is_dir()
