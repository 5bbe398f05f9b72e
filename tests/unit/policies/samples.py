"""Specs and batches for the tests of policies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.data import Windows
from etude.types import DataSpec, Feature


def stats(size: int) -> dict[str, Any]:
    """Statistics with a scale and an offset of their own in each dimension."""
    scale = torch.linspace(0.5, 2.0, size)
    offset = torch.linspace(-1.0, 3.0, size)
    around = {"min": -2.0, "max": 2.0, "q01": -1.8, "q99": 1.8}
    return {"mean": offset, "std": scale, **{key: offset + at * scale for key, at in around.items()}}


def make_spec(
    state: int = 5,
    action: int = 3,
    *,
    environment: int = 0,
    cameras: tuple[str, ...] = (),
    size: int = 64,
    tasks: int = 0,
    text: int = 0,
) -> DataSpec:
    features = {"action": Feature((action,), "float32", "action", stats=stats(action))}
    if state:
        features["observation.state"] = Feature((state,), "float32", "state", stats=stats(state))
    if environment:
        shape = (environment,)
        features["observation.environment_state"] = Feature(shape, "float32", "environment", stats=stats(environment))
    for camera in cameras:
        features[f"observation.images.{camera}"] = Feature((size, size, 3), "uint8", "image")
    if tasks:
        features["task_index"] = Feature((), "int64", "task", classes=tasks)
    if text:
        features["observation.instruction"] = Feature((text,), "float32", "text")
    return DataSpec(features, fps=10.0)


def make_batch(spec: DataSpec, size: int = 4, chunk: int = 6, history: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """A batch as the data would give it: images (C, H, W), a time dimension only where there is history."""
    generator = torch.Generator().manual_seed(seed)
    steps = () if history == 1 else (history,)
    batch: dict[str, Tensor] = {}
    for name, feature in spec.features.items():
        if feature.role == "image":
            height, width, channels = feature.shape
            shape = (size, *steps, channels, height, width)
            batch[name] = torch.randint(256, shape, generator=generator).to(torch.uint8)
        elif feature.role == "task":
            batch[name] = torch.arange(size) % (feature.classes or 1)
        elif feature.role == "action":
            batch[name] = torch.randn(size, chunk, *feature.shape, generator=generator)
            batch[f"{name}_is_pad"] = torch.arange(chunk) >= chunk - torch.arange(size)[:, None] % chunk
        else:
            time = () if feature.role == "text" else steps
            batch[name] = torch.randn(size, *time, *feature.shape, generator=generator)
    return batch


def now(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The observations of a batch, without actions."""
    return {name: value for name, value in batch.items() if not name.startswith("action")}


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def reaching(chunk: int, episodes: int = 6, length: int = 20, history: list[int] | None = None) -> Windows:
    """Episodes that move from a random place to a random goal; the action is a share of what is left."""
    generator = np.random.default_rng(0)
    states, actions = [], []
    for _ in range(episodes):
        place, goal = generator.uniform(-1, 1, 2), generator.uniform(-1, 1, 2)
        for _ in range(length):
            action = 0.2 * (goal - place)
            states.append(np.concatenate([place, goal]))
            actions.append(action)
            place = place + action
    columns = {"observation.state": np.float32(states), "action": np.float32(actions)}
    deltas = {"action": list(range(chunk))}
    if history is not None:
        deltas["observation.state"] = history
    return Windows(columns, np.arange(1, episodes + 1) * length, deltas, fps=10.0)
