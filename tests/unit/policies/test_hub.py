"""Policies go to the hub and come back, with its official client; the hub is a stand-in of its HTTP interface."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.slow

from etude.errors import CheckpointError, ConfigError  # noqa: E402
from etude.policies import MLP  # noqa: E402
from etude.policies.hub import pull_from_hub, push_to_hub  # noqa: E402
from etude.types import DataSpec, Feature  # noqa: E402
from tests.hub import TOKEN, Hub, serve_hub  # noqa: E402


def _policy() -> MLP:
    features = {
        "observation.state": Feature((3,), "float32", "state"),
        "action": Feature((2,), "float32", "action"),
    }
    policy = MLP(hidden=[64], normalization={"state": "identity", "action": "identity"})
    policy.build(DataSpec(features))
    return policy.eval()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub() as found:
        yield found


@pytest.fixture
def etude(hub: Hub, child_env: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command beside the hub: its client reads where that is when it is imported."""
    here = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}

    def run(*arguments: str, token: str = TOKEN, **more: str) -> subprocess.CompletedProcess[str]:
        env = {**child_env, **here, "HF_TOKEN": token, **more}
        command = [sys.executable, "-m", "etude", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False, timeout=100)

    return run


def test_what_is_pushed_is_what_is_pulled(
    etude: Callable[..., subprocess.CompletedProcess[str]], hub: Hub, tmp_path: Path
) -> None:
    policy = _policy()
    policy.save_pretrained(tmp_path / "mine")
    pushed = etude("push", "mine", "me/act", "--private")
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.strip() == f"{hub.url}/me/act/commit/{hub.sha('me/act', 'main')}"
    assert set(hub.repos["me/act"]["main"]) == {"README.md", "config.json", "model.safetensors"}
    assert hub.private == {"me/act"}

    hub.repos["me/act"]["main"]["pytorch_model.bin"] = b"a pickle"
    pulled = etude("pull", "me/act")
    assert pulled.returncode == 0, pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert not (folder / "pytorch_model.bin").exists()
    again = MLP.from_pretrained(folder)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in policy.state_dict().items())

    offline = etude("pull", "me/act", HF_HUB_OFFLINE="1")
    assert offline.stdout == pulled.stdout, offline.stderr

    stranger = etude("pull", "me/act", "--output", "there", token="")
    assert stranger.returncode == 4
    assert stranger.stderr.startswith("etude: error: cannot pull me/act: ")
    assert "HF_TOKEN" in stranger.stderr
    assert stranger.stderr.count("\n") == 1


def test_refusals_are_one_sentence(
    etude: Callable[..., subprocess.CompletedProcess[str]], hub: Hub, tmp_path: Path
) -> None:
    _policy().save_pretrained(tmp_path / "mine")
    wrong = etude("push", "mine", "me/act", token="hf_somebodyelse")
    assert wrong.returncode == 4
    assert wrong.stderr.count("\n") == 1
    assert "hf auth login" in wrong.stderr
    assert "somebodyelse" not in wrong.stderr
    hub.repos["me/notes"] = {"main": {"README.md": b"no policy"}}
    empty = etude("pull", "me/notes")
    assert empty.stderr.endswith("\netude: error: me/notes has no config.json: it holds no policy that was pushed\n")


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=r"cannot be reached: HF_HUB_OFFLINE is set"):
        push_to_hub(_policy(), "me/act")
    with pytest.raises(CheckpointError, match=r"cannot pull nobody/nothing: it is not in the cache, and HF_HUB_OFF"):
        pull_from_hub("nobody/nothing")
    with pytest.raises(ConfigError, match=r"owner/name, got 'act'"):
        pull_from_hub("act")
