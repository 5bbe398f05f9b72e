"""`etude verify`: equal means equal bit for bit, and a difference is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from etude.cli import verify
from etude.cli.verify import NotReproducibleError, digest_of, hash_parameters, verify_config
from etude.errors import ConfigError

CONFIG = "policy: mlp\ndata: digits\n"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def test_the_hash_follows_values_types_shapes_and_names(tmp_path: Path) -> None:
    weights = torch.arange(6, dtype=torch.float32)
    nudged = weights.clone()
    nudged[3] = torch.nextafter(nudged[3], torch.tensor(9.0))
    variants = [
        {"w": weights}, {"v": weights}, {"w": weights.view(2, 3)}, {"w": weights.view(torch.int32)}, {"w": nudged},
        {"w": weights, "b": weights[:0]},
    ]  # fmt: skip
    digests = [
        digest_of(hash_parameters(write(tmp_path / f"{index}.safetensors", **one)))
        for index, one in enumerate(variants)
    ]
    assert len(set(digests)) == len(variants)
    again = digest_of(hash_parameters(write(tmp_path / "again.safetensors", w=weights.clone())))
    assert again == digests[0]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(CONFIG)
    return path


def test_equal_runs_pass(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(config.with_name("a.safetensors"), w=torch.ones(2))
    monkeypatch.setattr(verify, "_train_once", lambda *_: file)
    verify_config(config, [], steps=3)
    first, second, verdict = capsys.readouterr().out.splitlines()
    assert first.removeprefix("run 1: ") == second.removeprefix("run 2: ")
    assert verdict.startswith("equal")


def test_a_difference_names_the_tensor(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = iter(
        [
            write(config.with_name("a.safetensors"), w=torch.ones(2), b=torch.zeros(1)),
            write(config.with_name("b.safetensors"), w=torch.ones(2) + 1e-7, b=torch.zeros(1)),
        ]
    )
    monkeypatch.setattr(verify, "_train_once", lambda *_: next(files))
    with pytest.raises(NotReproducibleError, match="differ in 1 of 2 tensors, first 'w'"):
        verify_config(config, [], steps=3)


def test_a_bad_config_starts_no_process(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match="unknown key"):
        verify_config(config, ["training.lrr=1"], steps=3)


PLUGIN = """
import os
from etude import Trainer
from etude.registry import TRAINER_REGISTRY


@TRAINER_REGISTRY.register("restless")
class Restless(Trainer):
    def compute_loss(self, policy, batch):
        loss = super().compute_loss(policy, batch)
        return loss.total * (1 + int.from_bytes(os.urandom(4), "big") / 2**32)
"""


@pytest.mark.slow
@pytest.mark.parametrize("trainer,code", [("trainer", 0), ("restless", NotReproducibleError.exit_code)])
def test_real_runs_are_compared(config: Path, trainer: str, code: int) -> None:
    config.with_name("restless.py").write_text(PLUGIN)
    config.write_text(f"plugins: [restless.py]\n{CONFIG}trainer: {trainer}\n")
    command = [sys.executable, "-m", "etude", "verify", str(config), "--steps", "3", "training.batch_size=8"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=ENVIRONMENT, cwd=config.parent, timeout=200
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.count("tensors after 3 steps") == 2
    assert not (config.parent / "runs").exists()
