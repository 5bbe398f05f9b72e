"""Policies to deploy, and a real server in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.policies import PolicyModule
from etude.types import DataSpec, Feature


def stats(size: int) -> dict[str, list[float]]:
    scale, offset = torch.linspace(0.5, 2.0, size), torch.linspace(-1.0, 3.0, size)
    return {
        "mean": offset.tolist(),
        "std": scale.tolist(),
        "min": (offset - 2 * scale).tolist(),
        "max": (offset + 2 * scale).tolist(),
    }


def make_spec(state: int = 5, action: int = 3, *, camera: int = 0, tasks: int = 0) -> DataSpec:
    features = {
        "observation.state": Feature((state,), "float32", "state", stats=stats(state)),
        "action": Feature((action,), "float32", "action", stats=stats(action)),
    }
    if camera:
        features["observation.images.top"] = Feature((camera, camera, 3), "uint8", "image")
    if tasks:
        features["task_index"] = Feature((), "int64", "task", classes=tasks)
    return DataSpec(features, fps=10.0)


def built(policy: PolicyModule, spec: DataSpec, seed: int = 0) -> PolicyModule:
    torch.manual_seed(seed)
    policy.build(spec)
    return policy.eval()


def see(spec: DataSpec, steps: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """An episode of random observations, as a robot has them: images (H, W, C), no batch dimension."""
    draw = np.random.default_rng(seed)
    episode = []
    for _ in range(steps):
        seen: dict[str, np.ndarray] = {}
        for name, feature in spec.features.items():
            if feature.role == "image":
                seen[name] = draw.integers(0, 256, feature.shape).astype(np.uint8)
            elif feature.role == "task":
                seen[name] = np.asarray(draw.integers(0, feature.classes or 1))
            elif feature.role != "action":
                seen[name] = draw.normal(size=feature.shape).astype(np.float32)
        episode.append(seen)
    return episode


def act_alone(policy: Any, episode: list[dict[str, np.ndarray]], seed: int = 0) -> np.ndarray:
    """What the policy does by itself over an episode."""
    from etude.policies.observation import to_batch

    torch.manual_seed(seed)
    policy.reset()
    return np.stack([policy.select_action(to_batch(seen, policy.spec))[0].numpy() for seen in episode])


@contextmanager
def serving(source: Path, env: dict[str, str], *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `etude serve-policy` and give its address; it has ended afterwards."""
    command = [sys.executable, "-m", "etude", "serve-policy", str(source), "--port", "0", *arguments]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "ws://" in line, line + (process.stderr.read() if process.stderr else "")
        yield line.split()[-1], process
    finally:
        if process.poll() is None:
            os.kill(process.pid, 9)
        process.communicate(timeout=60)
