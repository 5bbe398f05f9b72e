"""`GRPOTrainer`: a model, a reward and prompts are enough to begin with. Everything else has a default."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from etude.algorithms.grpo import GRPO
from etude.config.training import TrainingConfiguration
from etude.errors import ConfigError, DataError
from etude.policies.language.build import language_model
from etude.reading.suggest import unknown
from etude.registry import REWARD_REGISTRY, TASK_REGISTRY
from etude.rng import STREAM_INIT, fold, generators_kept
from etude.rollouts.reward_shapes import WeighedRewards, as_reward
from etude.rollouts.text import TextRollouts
from etude.trainer import Trainer

GENTLE = {"lr": 1e-5, "log_every": 10}
"""What differs from the defaults of `TrainingConfiguration`, which are for models that begin from nothing."""
_SET_HERE = {"path", "tiny", "value_head", "seed", "tasks", "reward", "policy", "data", "algorithm", "config"}
_SET_HERE |= {"sampler", "environment", "self"}


class GRPOTrainer(Trainer):
    """Trains a language model from rewards, by comparing its own completions of each prompt.

        GRPOTrainer("smollm2", reward_funcs=lambda task, text: float("4" in text), train_dataset=["2+2="]).train()

    It is a `Trainer` of a `LanguageModel`, `TextRollouts` and `GRPO`, and trains as a YAML file with the same values
    does, bit for bit. With `run="runs/mine"` it goes on where that run stopped.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        train_dataset: Any = None,
        *,
        reward_weights: Sequence[float] | None = None,
        config: TrainingConfiguration | None = None,
        beta: float | None = None,
        **options: Any,
    ) -> None:
        """Take the parts, and any parameter of theirs by its name.

        Args:
            model: `smollm2`, `tiny` (from scratch, for trying things out), a folder, a hub id, or a policy.
            reward_funcs: One function or several: `f(task, text)` that returns a number, or a mapping with `reward` and
                other scores; `f(prompts, completions, **columns)` that returns a list, as in TRL (known by those
                names, and called with one completion at a time); or a registered name. None asks the task source.
            train_dataset: Prompts: a list of texts or of mappings with `prompt`, a `datasets.Dataset`, a file, or the
                name of a task source such as `addition`.
            reward_weights: A weight for each of several reward functions; 1 each unless given.
            config: Length, optimisation, cadence and safety, in place of single options such as `lr`. Without it `lr`
                is 1e-5 and `log_every` 10 unless given.
            beta: Another name for `kl_coef`.
            **options: Parameters of `TextRollouts` (`group_size`, `prompts_per_step`, `max_new_tokens`, `temperature`,
                ...), `GRPO` (`kl_coef`, `epochs`, `clip_low`, ...), `TrainingConfiguration` (`training_steps`, `lr`,
                ...), the language policy (`lora`, `dtype`, ...) and `Trainer` (`run`, `engine`, `callbacks`, ...).
        """
        if beta is not None:
            if "kl_coef" in options:
                raise ConfigError("GRPOTrainer: beta is another name for kl_coef; give one of them")
            options["kl_coef"] = beta
        given = _sorted_out(options)
        if config is not None and given["training"]:
            raise ConfigError(f"GRPOTrainer: {next(iter(given['training']))} is given beside config; put it in there")
        config = TrainingConfiguration(**GENTLE | given["training"]) if config is None else config
        if not isinstance(config, TrainingConfiguration):
            raise ConfigError(f"GRPOTrainer: config must be a TrainingConfiguration(...), got {type(config).__name__}")
        tasks, reward = _tasks(train_dataset), _reward(reward_funcs, reward_weights)  # refused before a model is read
        # On the stream that a configuration file makes its parts on: new weights are the same ones.
        with generators_kept(fold(config.seed, STREAM_INIT, 1)):
            policy = _policy(model, given["model"])
            data = TextRollouts(tasks, reward, **given["rollouts"])
            algorithm = GRPO(**given["algorithm"])
        super().__init__(policy, data, algorithm, config=config, **given["trainer"])


def _sorted_out(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options by whose parameters they are; one that several have goes to each of them."""
    takers = {
        "rollouts": set(inspect.signature(TextRollouts).parameters) - _SET_HERE,
        "algorithm": {field.name for field in dataclasses.fields(GRPO)},
        "training": set(TrainingConfiguration.model_fields),
        "model": set(inspect.signature(language_model).parameters) - _SET_HERE,
        "trainer": set(inspect.signature(Trainer).parameters) - _SET_HERE,
    }
    known = sorted(set().union(*takers.values(), {"config", "reward_weights"}))
    for name in options:
        if not any(name in taken for taken in takers.values()):
            raise ConfigError(f"GRPOTrainer: {name}: {unknown(name, known)}")
    return {who: {name: options[name] for name in options if name in taken} for who, taken in takers.items()}


def _policy(model: Any, options: Mapping[str, Any]) -> nn.Module:
    if isinstance(model, nn.Module):
        if options:
            raise ConfigError(f"GRPOTrainer: {next(iter(options))} is for models that are made here; this one is made")
        if not hasattr(model, "log_probs"):
            raise ConfigError(
                f"GRPOTrainer: model must be a LanguageModel, got {type(model).__name__}; a model of transformers "
                "becomes one with etude.policies.language.LanguageModel(model, tokenizer)"
            )
        return model
    if not isinstance(model, str | Path):
        raise ConfigError(f"GRPOTrainer: model must be a name, a folder or a LanguageModel, got {type(model).__name__}")
    if str(model) == "tiny" and not Path(model).exists():
        return language_model(tiny=True, **options)
    return language_model(str(model), **options)


def _reward(given: Any, weights: Sequence[float] | None) -> Any:
    if isinstance(given, list | tuple):
        found = [REWARD_REGISTRY.get(one) if isinstance(one, str) else one for one in given]
        return WeighedRewards(found, weights)
    if weights is not None:
        raise ConfigError("GRPOTrainer: reward_weights goes with a list of reward_funcs")
    return given if given is None or isinstance(given, str) else as_reward(given)


def _tasks(given: Any) -> Any:
    if isinstance(given, Path) or (isinstance(given, str) and _is_path(given)):
        return {"type": "file", "params": {"path": str(given)}}
    if given is None:
        raise ConfigError("GRPOTrainer: train_dataset is missing; give prompts, a file of them, or a task source")
    if hasattr(given, "__len__") and not len(given):
        raise DataError("GRPOTrainer: train_dataset is empty; give at least one prompt")
    return given


def _is_path(text: str) -> bool:
    """Tell a file from the name of a task source; a name that is registered is one, whatever lies here."""
    return text not in TASK_REGISTRY and (os.sep in text or "." in text or Path(text).exists())
