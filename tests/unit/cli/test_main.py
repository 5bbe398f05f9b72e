"""The entry point: one sentence for a user's mistake, a traceback for ours, codes that scripts can rely on."""

from __future__ import annotations

import errno
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude import __version__, errors
from etude.cli import runs as runs_command
from etude.cli.main import app, main
from etude.errors import ConfigError, EtudeError, Interrupted
from etude.secrets import register_secret
from tests.processes import run_forked

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
ERRORS = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, EtudeError)]


def etude(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "etude", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT, timeout=100)


def run_main(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """Run `etude runs` with a command that raises `error`, and return the exit code."""

    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(runs_command, "print_runs", fail)
    monkeypatch.setattr(sys, "argv", ["etude", "runs"])
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        gc.enable()
        gc.unfreeze()
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize("kind", ERRORS)
def test_a_users_mistake_is_one_message_and_the_code_of_its_class(
    kind: type[EtudeError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, kind("x.yaml:3:1: lrr is unknown")) == kind.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "etude: error: x.yaml:3:1: lrr is unknown\n"


def test_exit_codes_tell_classes_apart() -> None:
    families = [one for one in ERRORS if EtudeError in one.__bases__]
    codes = [EtudeError.exit_code, *(one.exit_code for one in families)]
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 128 for code in codes)


def test_our_mistake_keeps_its_traceback_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register_secret("canary-in-traceback")
    assert run_main(monkeypatch, ZeroDivisionError("while reading canary-in-traceback")) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert "ZeroDivisionError: while reading ***" in err
    assert "canary-in-traceback" not in err


def test_a_users_mistake_shows_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    register_secret("canary-in-message")
    run_main(monkeypatch, EtudeError("key canary-in-message refused"))
    assert capsys.readouterr().err == "etude: error: key *** refused\n"


@pytest.mark.parametrize("signum,code", [(2, 130), (15, 143)])
def test_an_interrupted_run_keeps_its_code_and_says_why(
    signum: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, Interrupted(signum, "interrupted at step 7; saved")) == code
    assert capsys.readouterr().err == "etude: interrupted at step 7; saved\n"


def test_control_c_before_training_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, KeyboardInterrupt()) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_rank_of_a_group_says_which(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    run_main(monkeypatch, EtudeError("no data"))
    assert capsys.readouterr().err == "etude: rank 1: error: no data\n"


def test_version_and_help_import_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['etude', sys.argv[1]]\n"
        "from etude.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'rich', 'pydantic', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for option in ("--version", "--help"):
        done = subprocess.run(
            [sys.executable, "-c", code, option],
            capture_output=True,
            text=True,
            check=False,
            env=ENVIRONMENT,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert __version__ in done.stdout or "torchrun" in done.stdout or "Look at runs:" in done.stdout
        assert "\x1b" not in done.stdout


def test_an_unknown_command_is_corrected() -> None:
    done = etude("chekc")
    assert done.returncode == 2
    assert "Did you mean 'check'?" in done.stderr


def test_train_without_a_config_says_what_to_type() -> None:
    done = etude("train")
    assert done.returncode == 2
    assert "etude train configs/digits.yaml" in done.stderr


@pytest.mark.parametrize(
    "arguments, meant",
    [
        (["train", "digits", "--lr", "3"], "training.lr=3"),
        (["train", "digits", "--batch-size=8"], "training.batch_size=8"),
        (["check", "digits", "--training.lr", "3"], "training.lr=3"),
        (["resume", "digits", "--name", "training.lr=3"], "run.name=VALUE"),
        (["verify", "digits", "--engine", "ray"], "engine=ray"),
    ],
)
def test_a_setting_written_as_an_option_is_answered_with_the_override(arguments: list[str], meant: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).endswith(f"settings are written without dashes: {meant}")


def test_other_unknown_options_stay_usage_errors() -> None:
    result = CliRunner().invoke(app, ["check", "digits", "--zzz"])
    assert result.exit_code == 2
    assert "--zzz" in result.output


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    command = f"{sys.executable} -m etude --help | true"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=100
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "x.yaml", "run.root=file"],
        ["train", "x.yaml", "run.root=/proc/nowhere"],
        ["report", "a", "-o", "file/page.html"],
        ["report", "a", "-o", "runs"],
        ["report", "a", "-o", "/proc/nowhere.html"],
        ["compare", "a", "b", "-o", "/proc/nowhere.html"],
        ["evaluate", "x.py:act", "--env", "gym:Pendulum-v1", "-o", "/proc/nowhere"],
        ["record", "--env", "metaworld/reach", "--episodes", "1", "--root", "/proc/nowhere"],
        ["new", "trainer", "some_trainer", "--dir", "file/x"],
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence(
    arguments: list[str], tmp_path: Path, child_env: dict[str, str]
) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    (tmp_path / "x.yaml").write_text("policy: mlp\ndata: digits\ntraining: {training_steps: 1}\nloggers: []\n")
    (tmp_path / "x.py").write_text("def act(observation):\n    return [0.0]\n")
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "status.json").write_text('{"state": "finished", "step": 1}')
        (tmp_path / "runs" / name / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    done = run_forked(main, cwd=tmp_path, env=child_env, arguments=["etude", *arguments])
    assert done.returncode == 2
    assert re.fullmatch(
        r"etude: error: cannot use (file|runs|/proc/nowhere)\S*: [^\n]+; make it writable, or name another place\n",
        done.stderr,
    )


def test_a_full_disk_is_one_sentence_whoever_was_writing(tmp_path: Path, child_env: dict[str, str]) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # without a name, as a write has none

    def run() -> None:
        main.__globals__["app"] = full
        main()

    done = run_forked(run, cwd=tmp_path, env=child_env, arguments=["etude", "sweep"])
    assert done.returncode == 2
    assert done.stderr == "etude: error: cannot write: No space left on device; make room, and run it again\n"
