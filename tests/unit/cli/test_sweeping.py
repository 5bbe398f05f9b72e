"""`etude sweep` and `etude train --seeds`: what is refused, what is left behind, and how they go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.cli.main import app
from etude.config.load import load
from etude.errors import ConfigError, EtudeError
from etude.runs.directory import Run
from etude.runs.metrics import read_metrics
from etude.sweep.objective import choose_objective
from etude.sweep.processes import OUTPUT
from tests.unit.runs.strict_page import Page

runner = CliRunner()
STAND_IN = Path(__file__).parents[1] / "sweep" / "stand_in.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
CONFIG = """\
policy: mlp
data: digits
eval_data: digits
training: {batch_size: 8, training_steps: 40, log_every: 10, evaluate_every: 20}
loggers: []
"""
RATES = "training.lr=log(1e-4,1e-2)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.sweep.processes.LAUNCHER", (str(STAND_IN),))
    monkeypatch.setattr("etude.sweep.processes.LOOK_EVERY_S", 0.01)


def run(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.mark.parametrize(
    "arguments, says",
    [
        (
            ["training.lrr=log(1e-5,1e-2)"],
            r"override 'training.lrr=1e-05': training.lrr: unknown key; did you mean 'lr'",
        ),
        ([RATES, "policy.params.hiden=[4],[8]"], "policy.params.hiden: unknown key; did you mean 'hidden'"),
        (["training.batch_size=8,0"], "override 'training.batch_size=0': training.batch_size: must be at least 1"),
        (["training.batch_size=uniform(1,8)"], "training.batch_size: .*whole number|training.batch_size: .*integer"),
        (["training.lr=3"], "there is nothing to search"),
        ([RATES, "run.name=a"], "name the sweep with --name"),
        (["run.root=a,b"], "nothing to search"),
        ([RATES, "--metric", "foo"], "--mode max or --mode min"),
        ([RATES, "--sampler", "grid"], "a grid has no end"),
        ([RATES, "--timeout", "5 steps"], "--timeout is a time"),
        ([RATES, "--name", "../x"], "cannot name a folder"),
        (["policy=mlp,act"], "policy.type is mlp or act: trials would minimise different losses.*--metric"),
        (["policy.params.loss=l1,mse"], "policy.params.loss is l1 or mse: trials would minimise different losses"),
    ],
)
def test_mistakes_are_found_before_the_first_trial(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run("sweep", "x.yaml", *arguments)
    assert not Path("runs").exists()


def test_it_is_not_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for arguments in (["sweep", "x.yaml", RATES], ["train", "x.yaml", "--seeds", "3"]):
        with pytest.raises(ConfigError, match="without torchrun"):
            run(*arguments)


def test_a_folder_with_a_run_is_not_taken(stand_in: None) -> None:
    Run("runs/mine").set_status("finished", step=1)
    with pytest.raises(ConfigError, match="runs/mine is a run already"):
        run("sweep", "x.yaml", RATES, "--name", "mine")


@pytest.mark.usefixtures("stand_in")
def test_unlike_losses_that_are_asked_for_are_taken_with_a_note() -> None:
    said = run("sweep", "x.yaml", "policy=mlp,act", "--metric", "eval/loss", "--trials", "1")
    note = "policy.type is mlp or act: trials minimise different losses"
    assert note in said and note in Path("runs/x-sweep/sweep.html").read_text()


def test_a_metric_that_is_no_loss_ranks_trials_of_any_kind() -> None:
    loaded = load(Path("x.yaml"), [])
    minimised = [{"policy.type": "act"}, {"policy.type": "mlp"}]
    assert choose_objective(loaded, "eval/success", None, minimised).note == ""
    assert choose_objective(loaded, None, None, minimised[:1] * 2).note == ""


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_sweep_says_what_it_optimises_goes_on_and_stays_what_it_was() -> None:
    said = run("sweep", "x.yaml", RATES, "training.batch_size=8,16", "training.weight_decay=0.1", "--trials", "2")
    assert said.splitlines()[0] == ("sweep runs/x-sweep: eval/loss, less is better, the best evaluation of each trial")
    assert "  training.lr: 0.0001 to 0.01, logarithmic" in said
    assert "best: trial " in said and "page: runs/x-sweep/sweep.html" in said
    plan = json.loads(Path("runs/x-sweep/sweep.json").read_text())
    assert plan["searched"] == [RATES, "training.batch_size=8,16"]
    assert plan["settings"]["training.weight_decay"] == 0.1
    with pytest.raises(
        ConfigError, match=r"begun with other settings: training.weight_decay was 0.1 and is 0.0; .*--name"
    ):
        run("sweep", "x.yaml", RATES, "training.batch_size=8,16")
    with pytest.raises(ConfigError, match=r"searched was .* and is .*batch_size=8,32"):
        run("sweep", "x.yaml", RATES, "training.batch_size=8,32", "training.weight_decay=0.1")
    said = run("sweep", "x.yaml", RATES, "training.batch_size=8,16", "training.weight_decay=0.1", "--trials", "4")
    assert "going on: 2 of 4 trials are done" in said
    assert "trial 3 (4/4)" in said and "trial 1 (" not in said
    assert "importance: " in said
    shown = Page(Path("runs/x-sweep/sweep.html").read_text())
    again = [text for text in shown.text if text.strip().startswith("etude train x.yaml training.lr=")]
    assert again and all(text.strip().endswith(" training.weight_decay=0.1") for text in again)


@pytest.mark.usefixtures("stand_in")
def test_a_grid_ends_with_its_last_combination() -> None:
    said = run("sweep", "x.yaml", "training.lr=1e-3,1e-4", "training.batch_size=8", "--sampler", "grid")
    assert "trial 1 (2/2)" in said
    assert "best: trial 0, eval/loss 0.025: lr=1e-3" in said


@pytest.mark.parametrize(
    "given, says",
    [("x", "3,7,9"), ("0", "between 1 and 1000"), ("-1", "3,7,9"), ("1,1", "twice"), ("", "3,7,9"), ("1.5", "3,7,9")],
)
def test_seeds_that_cannot_be_meant_are_refused(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run("train", "x.yaml", "--seeds", given)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_seeds_are_trained_once_each_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    said = run("train", "x.yaml", "--seeds", "2")
    names = ["x-seed-0", "x-seed-1"]
    assert sorted(path.name for path in Path("runs/x-seeds").glob("x-seed-*")) == names
    assert [Run(f"runs/x-seeds/{name}").read_config()["training"]["seed"] for name in names] == [0, 1]
    assert "mean 0.025, standard deviation 0" in said and "page: runs/x-seeds/compare.html" in said
    said = run("train", "x.yaml", "--seeds", "1,7", "--jobs", "2")
    assert "seed 1 (1/2)  had finished before" in said
    assert (Path("runs/x-seeds/x-seed-7") / OUTPUT).read_text() == "begins after step 0\n"
    assert (Path("runs/x-seeds/x-seed-1") / OUTPUT).read_text() == "begins after step 0\n", "not repeated"
    with pytest.raises(ConfigError, match=r"training.lr was 0.001 and is 0.002; .* -t NAME"):
        run("train", "x.yaml", "training.lr=2e-3", "--seeds", "2")
    with pytest.raises(ConfigError, match=r"x-seed-0 was trained for 40 steps already, .*=40 or more, .* -t"):
        run("train", "x.yaml", "training.training_steps=20", "--seeds", "9,0")
    with pytest.raises(ConfigError, match="leave one of them out"):
        run("train", "x.yaml", "training.seed=2", "--seeds", "2")
    with pytest.raises(EtudeError, match="2 of 2 seeds failed; seed 0: the loss is nan"):
        run("train", "x.yaml", "training.lr=0.1", "--seeds", "2", "-t", "hot")
    for arguments in (["--jobs", "2"], ["--seeds", "2", "--resume", "never"]):
        assert runner.invoke(app, ["train", "x.yaml", *arguments]).exit_code == 2


# ---- real trainings --------------------------------------------------------------------------------------------------


def etude(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", "etude", *arguments], {**ENVIRONMENT, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_trials_are_ordinary_runs(folder: Path) -> None:
    done = etude("sweep", "x.yaml", "training.lr=1e-4,1e-2", "--sampler", "grid", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best: trial 1, " in done.stdout
    runs = Run.list("runs/x-sweep")
    assert sorted((one.name, one.state, one.step) for one in runs) == [
        ("trial-0000", "finished", 40), ("trial-0001", "finished", 40),
    ]  # fmt: skip
    assert Run("runs/x-sweep/trial-0001").read_config()["training"]["lr"] == 1e-2
    environment = json.loads(Path("runs/x-sweep/trial-0001/environment.json").read_text())
    assert "etude.cli.child" not in json.dumps(environment.get("command", "")), "it can be typed as it is noted"


def curves(run: Path) -> list[dict[str, float]]:
    rows = read_metrics(Run(run).metrics_path)
    return [{k: v for k, v in row.items() if k == "step" or k.startswith(("train/", "eval/"))} for row in rows]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_goes_on_exactly(folder: Path, signum: signal.Signals) -> None:
    arguments = ["sweep", "x.yaml", RATES, "training.training_steps=1500", "training.save_every=100", "--trials", "2"]
    assert etude(*arguments, "--name", "whole").returncode == 0
    command = [sys.executable, "-m", "etude", *arguments, "--name", "cut"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    run, deadline_s = Run("runs/cut/trial-0001"), time.monotonic() + 300
    while not any(row["step"] >= 200 for row in read_metrics(run.metrics_path)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    child.send_signal(signum)
    _, err = child.communicate(timeout=120)
    assert child.returncode == (130 if signum == signal.SIGINT else -9)
    if signum == signal.SIGINT:
        assert "1 of 2 trials are done; go on with: etude sweep x.yaml" in err
    done = etude(*arguments, "--name", "cut")
    assert done.returncode == 0, done.stderr
    assert "going on: 1 of 2 trials are done, 1 half done" in done.stdout
    for trial in ("trial-0000", "trial-0001"):
        assert curves(Path("runs/cut", trial)) == curves(Path("runs/whole", trial))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ray_tune_finds_what_processes_find(folder: Path, ray_variables: dict[str, str]) -> None:
    arguments = ["sweep", "x.yaml", RATES, "training.batch_size=8,16", "--jobs", "2", "--trials", "2"]
    for more in (["--name", "here"], ["--name", "ray", "--ray"]):
        done = etude(*arguments, *more, **ray_variables)
        assert done.returncode == 0, done.stdout + done.stderr
    for trial in ("trial-0000", "trial-0001"):
        assert curves(Path("runs/here", trial)) == curves(Path("runs/ray", trial))
    hot = ["training.lr=uniform(1e36,1e37)", "training.optimizer=sgd", "training.clip_norm=null", "--jobs", "3"]
    done = etude("sweep", "x.yaml", *hot, "--trials", "4", "--name", "hot", "--ray", **ray_variables)
    assert done.returncode == 1
    assert "the first 3 trials failed alike, and the sweep was stopped: " in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_what_ray_had_begun_goes_on_without_it(folder: Path, ray_variables: dict[str, str]) -> None:
    arguments = ["sweep", "x.yaml", "training.lr=1e-3,1e-2", "training.training_steps=3000", "--sampler", "grid"]
    command, environment = [sys.executable, "-m", "etude", *arguments, "--ray"], {**ENVIRONMENT, **ray_variables}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    run, deadline_s = Run("runs/x-sweep/trial-0000"), time.monotonic() + 300
    while not read_metrics(run.metrics_path):
        assert child.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 130, err
    assert run.status()["state"] == "interrupted", "its actor let it save"
    done = etude(*arguments, "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert "going on: 0 of 2 trials are done" in done.stdout
    steps = [row["step"] for row in read_metrics(run.metrics_path) if "train/loss" in row]
    assert steps == sorted(set(steps)) and steps[-1] == 3000


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_seeds_give_runs_that_differ_in_nothing_else(folder: Path) -> None:
    done = etude("train", "x.yaml", "--seeds", "3", "--jobs", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    configs = [Run(f"runs/x-seeds/x-seed-{seed}").read_config() for seed in range(3)]
    assert [config["training"].pop("seed") for config in configs] == [0, 1, 2]
    assert all(config["training"] == configs[0]["training"] for config in configs)
    assert len({json.dumps(curves(Path(f"runs/x-seeds/x-seed-{seed}"))) for seed in range(3)}) == 3
