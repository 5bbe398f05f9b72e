"""A tiny language model, its rollouts, and trainers to hold, for the tests of services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from etude import TrainingConfiguration
from etude.policies.language import LanguageModel
from etude.rollouts.text import TextRollouts
from etude.service import ServiceTrainer

SETTINGS = {"train_service": {"world_size": 1, "backend": "self-hosted", "url": "http://localhost"}}
QUICK: dict[str, Any] = {"lr": 3e-3, "batch_size": 8, "training_steps": 2, "log_every": 1, "device": "cpu"}


def tiny(**options: Any) -> LanguageModel:
    torch.set_num_threads(1)
    return LanguageModel.tiny(seed=0, **options)


def digits(**options: Any) -> TextRollouts:
    return TextRollouts("digits", **{"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, **options})


def write(folder: Path, **files: str) -> Path:
    """Write files of a recipe and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def hold(
    module_path: Path | None, class_name: str, settings: Any = None, *, policy: Any = None, data: Any = None,
    run: Any = False, callbacks: Any = (), **training: Any,
) -> ServiceTrainer:  # fmt: skip
    return ServiceTrainer(
        policy or tiny(), data or digits(), class_name=class_name, module_path=module_path,
        settings={**SETTINGS, **(settings or {})}, config=TrainingConfiguration(**{**QUICK, **training}), run=run,
        loggers=[], callbacks=callbacks, show_progress=False,
    )  # fmt: skip


def weights(policy: Any) -> list[torch.Tensor]:
    return [value.detach().clone() for value in policy.state_dict().values()]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
