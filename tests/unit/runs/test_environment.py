from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import pytest

from etude import secrets
from etude.runs.environment import describe_environment, git_state, redact_argv


def test_the_environment_names_versions_machine_and_command() -> None:
    found = describe_environment(["etude", "train", "x.yaml"])
    assert found["python"] == platform.python_version()
    assert found["argv"] == ["etude", "train", "x.yaml"]
    assert found["packages"]["torch"]
    assert found["cpu_count"] >= 1
    json.dumps(found, allow_nan=False)


def test_no_value_of_an_environment_variable_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_TEST_TOKEN", "canary-7c1f9a")
    assert "canary-7c1f9a" not in json.dumps(describe_environment())


@pytest.mark.parametrize(
    "given, shown",
    [
        (["training.lr=1e-4", "policy.params.key=3"], ["training.lr=1e-4", "policy.params.key=3"]),
        (["logger.api_key=abc"], ["logger.api_key=***"]),
        (["--api-key", "abc", "--verbose"], ["--api-key", "***", "--verbose"]),
        (["--token=abc"], ["--token=***"]),
        (["--password", "--next"], ["--password", "--next"]),
        (["DB_PASSWD=abc", "x"], ["DB_PASSWD=***", "x"]),
    ],
)
def test_options_named_like_secrets_are_shown_without_their_value(given: list[str], shown: list[str]) -> None:
    assert redact_argv(given) == shown


def test_registered_secrets_are_hidden_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_spellings", ())
    secrets.register_secret("canary-55")
    assert redact_argv(["url=https://u:canary-55@host"]) == ["url=https://u:***@host"]


def test_git_state_tells_commit_branch_and_changes(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "init.defaultBranch=trunk"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "branch": "trunk", "dirty": False}
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert state is not None
    assert state["dirty"]
